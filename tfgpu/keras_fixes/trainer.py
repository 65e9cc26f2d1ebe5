"""The compiled steps of `fit`, `evaluate` and `Trainer`: many in one tf.function, logs read once at the end.

Stock Keras feeds distributed values through `Optional`s and a nested tf.function, averages the logs over replicas, and
draws a real batch (one that training then misses) to build the model: https://github.com/keras-team/keras/issues/20585,
https://github.com/keras-team/keras/issues/20329, https://github.com/keras-team/keras/issues/20861.
"""

import contextlib
import logging
from collections.abc import Callable

import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.trainer import Trainer

from tfgpu.errors import InputError
from tfgpu.keras_fixes import layers, picks, pieces, replica
from tfgpu.keras_fixes.seam import wrap

_log = logging.getLogger(__name__)


class Steps:
    """Runs steps of a model on an iterator, `count` of them a call, and returns the logs after the last.

    `model.train_function` and `model.test_function` hold one under replicas; `Trainer` makes them anywhere.

    Args:
        model: the compiled model.
        step_function: `model.train_step` or `model.test_step`.
    """

    def __init__(self, model, step_function: Callable):
        self._model = model
        self._strategy = model.distribute_strategy
        self._is_spread = replica.is_spread(self._strategy)
        step_function = model._autoconvert_optionals(step_function)
        if model.jit_compile and not model.run_eagerly and not self._is_spread:
            step_function = tf.function(step_function, jit_compile=True, reduce_retracing=True)
        self._step = step_function
        self._layout = None
        self._picks = []
        self._on_iterator = self._compile(lambda iterator: self._finish(self._run_anew(iterator.get_next())))
        self._on_data = self._compile(lambda data: self._finish(self._run_anew(data)))
        self._loop = self._compile(self._run_many)

    def __call__(self, iterator):
        """Runs the model's `steps_per_execution` steps, or those that are left: what `fit` and `evaluate` call.

        Raises:
            tf.errors.OutOfRangeError: the iterator had no batch left at all.
        """
        count = self._model.steps_per_execution
        if isinstance(iterator, (pieces.DealtIterator, tf.distribute.DistributedIterator, tf.data.Iterator)):
            return self.run(iterator, count)[1]
        for _, data in zip(range(count), iterator, strict=False):
            logs = self._on_data(self._cut_for_replicas(data) if self._is_spread else data)
        return logs

    def run(self, iterator, count: int) -> tuple[int, dict]:
        """Runs up to `count` steps; another count retraces nothing.

        Returns:
            How many steps there was data for, and the logs after the last of them.

        Raises:
            tf.errors.OutOfRangeError: the iterator had no batch left at all.
        """
        done, logs = 0, None
        iterator = getattr(iterator, "source", iterator)
        if count == 1 or self._layout is None:  # the first step tells what the loop carries
            done, logs = 1, self._on_iterator(iterator)
        if done < count:
            more, new = self._loop(iterator, tf.constant(count - done, tf.int32))
            done, logs = done + int(more), new if int(more) else logs
        if done == 0:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        return done, logs

    def _compile(self, function: Callable) -> Callable:
        function = tf.autograph.experimental.do_not_convert(function)
        return function if self._model.run_eagerly else tf.function(function, reduce_retracing=True)

    def _run_many(self, iterator, count: tf.Tensor):
        # The step is a Python function inside the loop, never a nested tf.function: TensorFlow feeds a collective's key
        # at call time and loses it where a function is called from a loop ("must feed a value for placeholder").
        again = self._run_anew if self._model.run_eagerly else self._run

        def another(done, left, parts):
            data = iterator.get_next_as_optional()
            return tf.cond(
                data.has_value(),
                lambda: (done + 1, left - 1, again(data.get_value())),
                lambda: (done, 0, parts),
            )

        nothing = self._strategy.run(lambda: tree.map_structure(lambda t: tf.zeros(t.shape, t.dtype), self._parts))
        done, _, parts = tf.while_loop(lambda done, left, parts: left > 0, another, (0, count, nothing))
        return done, self._finish(parts)

    def _run_anew(self, data):
        """A step whose layers pick with Python's `random` afresh; the loop's trace then picks what this one did."""
        self._picks = []
        return self._run(data)

    def _run(self, data):
        """One step on every replica. Returns what `_finish` needs beside the metrics' own state."""
        if not self._is_spread:
            return self._strategy.run(self._only_step, args=(data,))
        return self._strategy.run(self._replica_step, args=(pieces.deal(self._strategy, data),))

    def _finish(self, parts):
        return self._finish_spread(parts) if self._is_spread else parts

    def _only_step(self, data):
        with _after(data), picks.picking(self._picks):
            self._layout = logs = tree.map_structure(tf.convert_to_tensor, self._step(data))
        self._parts = tree.map_structure(lambda t: tf.TensorSpec(t.shape, t.dtype), logs)
        return logs

    def _replica_step(self, data):
        place = None
        if isinstance(data, pieces.Piece):
            data, *place = data
        local = pieces.rows_of(data)
        facts = replica.begin(local, place, jit=bool(self._model.jit_compile))
        for metric in self._model.metrics:
            _record_results(type(metric))
        with replica.stepping(facts), replica.compiled(facts), _after(data), picks.picking(self._picks):
            logs = self._step(data) if replica.has_rows_for_sure() else self._step_with_a_row(data)
            leaves = tree.flatten(logs)
            sources = [facts.results.get(id(leaf), (None, None, None))[1:] for leaf in leaves]
            parts = [
                replica.by_share(tf.cast(leaf, tf.float32))
                for leaf, (metric, _) in zip(leaves, sources, strict=True)
                if metric is None
            ]
        self._layout = logs, sources
        self._parts = [tf.TensorSpec(part.shape, part.dtype) for part in parts]
        return parts

    def _step_with_a_row(self, data):
        """Runs the step on one made-up row where this replica has none, and undoes what that does to the metrics.

        An empty batch is a mean of nothing, and oneDNN ends the process at an empty pooling gradient.
        """
        variables = [v for metric in self._model.metrics for v in metric.variables]
        with replica.uncompiled():
            before = [tf.identity(v.value) for v in variables]
            data = tree.map_structure(layers.with_a_row, data)
        logs = self._step(data)
        with replica.uncompiled():
            for variable, value in zip(variables, before, strict=True):
                variable.assign(tf.where(replica.has_rows(), variable.value, value))
        return logs

    def _finish_spread(self, parts):
        logs = self._strategy.run(self._make_global, args=(parts,))
        return tree.map_structure(lambda value: self._strategy.experimental_local_results(value)[0], logs)

    def _make_global(self, parts):
        """One all-reduce: sums the metrics' state and reads them anew; sums the other entries' parts."""
        logs, sources = self._layout
        metrics = list({id(metric): metric for metric, _ in sources if metric is not None}.values())
        variables = [v for metric in metrics for v in metric.variables]
        summed = iter(replica.all_reduce([_contribution(v) for v in variables] + list(parts)))
        state = [(v, tf.cast(next(summed), v.dtype)) for v in variables]
        with backend.StatelessScope(state_mapping=state):
            read = {id(metric): tree.flatten(metric.result()) for metric in metrics}
        values = [next(summed) if metric is None else read[id(metric)][at] for metric, at in sources]
        return tree.pack_sequence_as(logs, values)

    def _cut_for_replicas(self, data, *, with_places=True):
        """`train_on_batch`'s one batch in equal parts, in replica order, as a distributed dataset cuts its batches."""

        batch = tf.nest.map_structure(lambda v: None if v is None else tf.convert_to_tensor(v), data)

        def part(ctx):
            at = replica.piece_of(self._strategy, ctx.replica_id_in_sync_group)
            piece = pieces.piece_of_batch(batch, at, ctx.num_replicas_in_sync)
            return piece if with_places else piece.data

        return self._strategy.experimental_distribute_values_from_function(part)


def run_many_steps_in_one_call() -> None:
    """Gives models under replicas `Steps` as their train and test functions."""

    @wrap(keras_trainer.TensorFlowTrainer, "_make_function")
    def make_function(stock, self, step_function):
        if not replica.is_spread(self.distribute_strategy):
            return stock(self, step_function)
        return Steps(self, step_function)


def compile_in_scope() -> None:
    """Compiles a model under the strategy that it was made under, so that the optimizer belongs to it too.

    Raises:
        InputError: by `compile`, where the model was made before the strategy's scope.
    """

    @wrap(Trainer, "compile")
    def compile_model(stock, self, *args, **kwargs):
        own, here = self._distribute_strategy, tf.distribute.get_strategy()
        if own is None and replica.is_spread(here):
            raise InputError("The model was made outside `strategy.scope()`. Make it inside, where you compile it.")
        with own.scope() if replica.is_spread(own) and own is not here else contextlib.nullcontext():
            return stock(self, *args, **kwargs)


def build_from_spec() -> None:
    """Builds a model from the data's `element_spec`, where stock Keras draws a batch and averages it over replicas."""

    @wrap(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build")
    def maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
        if iterator is not None and self._distribute_strategy is not None:
            spec = iterator._distributed_dataset.element_spec
            data_batch = tf.nest.map_structure(_one_replica, spec.data if isinstance(spec, pieces.Piece) else spec)
        try:
            return stock(self, None, data_batch)
        except Exception as error:  # whatever a model of the user's raises
            if iterator is None or type(self).train_step is keras_trainer.TensorFlowTrainer.train_step:
                raise
            # The data may be laid out for a train step of the model's own, which builds what is left in its first run.
            _log.debug("The model was not built from the data's spec: %s", error)


def split_batches_to_predict() -> None:
    """`predict_on_batch` splits its batch over the replicas; stock Keras predicts the whole batch on each of them.

    A replica without rows predicts one that stands in, and gives nothing: oneDNN has no empty convolution.
    """

    @wrap(keras_trainer.TensorFlowTrainer, "predict_on_batch")
    def predict_on_batch(stock, self, x):
        if not replica.is_spread(self.distribute_strategy):
            return stock(self, x)
        return stock(self, Steps(self, self.predict_step)._cut_for_replicas(x, with_places=False))


    _stand_in_to_predict(keras_trainer.TensorFlowTrainer)

    @wrap(keras_trainer.TensorFlowTrainer, "make_predict_function")
    def make_predict_function(stock, self, force=False):
        for cls in type(self).__mro__:  # a model may have a step of its own
            if "predict_step" in vars(cls) and issubclass(cls, keras_trainer.TensorFlowTrainer):
                _stand_in_to_predict(cls)
        return stock(self, force)


def _stand_in_to_predict(cls: type) -> None:
    """Gives the class's `predict_step` a row that stands in where a replica has none, and drops what comes of it."""
    if vars(cls).get("_predicts_stand_ins"):
        return
    cls._predicts_stand_ins = True

    @wrap(cls, "predict_step")
    def predict_step(stock, self, data):
        if replica.context() is None or self.jit_compile:
            return stock(self, data)
        local = pieces.rows_of(data)
        if tf.get_static_value(local):
            return stock(self, data)
        found = stock(self, tf.nest.map_structure(layers.with_a_row, data))
        kept = [v[: tf.where(local > 0, tf.shape(v)[0], 0)] if v.shape.rank else v for v in tf.nest.flatten(found)]
        return tf.nest.pack_sequence_as(found, kept)


def _after(data):
    """Lets nothing of a step run before its data is there: where that ends, `iterations` must not count one more."""
    return tf.control_dependencies([t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)])


def _one_replica(spec):
    if isinstance(spec, tf.OptionalSpec):
        return None
    return spec._value_specs[0] if hasattr(spec, "_value_specs") else spec


def _contribution(variable) -> tf.Tensor:
    """What this replica adds to the global value of a metric's variable, as the variable's `aggregation` says."""
    value = variable.value
    # identity: an all-reduce of a captured variable's own tensor fails inside a tf.function
    value = tf.identity(tf.cast(value, tf.float32 if value.dtype.is_floating else value.dtype))
    if variable.aggregation == "sum":
        return value
    if variable.aggregation == "mean":
        return value / replica.count(value.dtype)
    return value * tf.cast(replica.context().replica_id_in_sync_group == 0, value.dtype)


def _record_results(cls: type) -> None:
    """Lets a step know which numbers of its logs are results of which metric."""
    if "_records_results" in cls.__dict__:
        return
    cls._records_results = True

    @wrap(cls, "result")
    def result(stock, self):
        out = stock(self)
        facts = replica.step()
        if facts is not None:
            facts.results.update({id(t): (t, self, at) for at, t in enumerate(tree.flatten(out))})
        return out
