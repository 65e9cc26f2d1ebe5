"""The compiled steps of `fit`, `evaluate` and `Trainer`: many in one tf.function, logs read once at the end.

Stock Keras feeds distributed values through `Optional`s and a nested tf.function, averages the logs over replicas, and
draws a real batch (one that training then misses) to build the model: https://github.com/keras-team/keras/issues/20585,
https://github.com/keras-team/keras/issues/20329, https://github.com/keras-team/keras/issues/20861.
"""

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable

import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.trainer import Trainer

from tfgpu.errors import InputError
from tfgpu.keras_fixes import attributes, blocks, layers, picks, pieces, replica
from tfgpu.keras_fixes.seam import wrap

_log = logging.getLogger(__name__)
_here = threading.local()


class Steps:
    """Runs steps of a model on an iterator, many of them a call, and returns the logs after the last.

    `model.train_function` and `model.test_function` hold one.

    Args:
        model: the compiled model.
        step_function: `model.train_step` or `model.test_step`.

    Attributes:
        pace: how long blocks are where nobody asked for a length.
        logs: what the last call returned.
        logs_are_results: the logs are the results of the model's metrics, and nothing else: the steps are Keras's own.
    """

    def __init__(self, model, step_function: Callable):
        self._model = model
        self._strategy = model.distribute_strategy
        self._is_spread = replica.is_spread(self._strategy)
        self.pace = blocks.Pace()
        self.logs = self._layout = None
        # TensorFlow keeps a collective's shape for the length of a call: one that varies allows one step a call.
        self._varies = False
        self._before = 0, 0.0  # steps and seconds of the last block
        step_function = model._autoconvert_optionals(step_function)
        if model.jit_compile and not model.run_eagerly and not self._is_spread:
            step_function = tf.function(step_function, jit_compile=True, reduce_retracing=True)
        self._step = step_function
        stock = keras_trainer.TensorFlowTrainer
        names = "train_step", "test_step", "compute_metrics", "get_metrics_result"
        self.logs_are_results = all(_function(getattr(model, name)) is getattr(stock, name) for name in names)
        self._on_data = self._compile(self._run_once)
        self._loops = {sure: self._compile(functools.partial(self._run_many, is_sure=sure)) for sure in (False, True)}

    def __call__(self, batches):
        """What `fit`, `evaluate` and `train_on_batch` call.

        Args:
            batches: a `Block`; or an iterator, for the model's `steps_per_execution` steps or those that are left.

        Raises:
            tf.errors.OutOfRangeError: there was no batch left at all.
        """
        count, logs = self._model.steps_per_execution, None
        is_data_set = isinstance(batches, (pieces.DealtIterator, tf.distribute.DistributedIterator, tf.data.Iterator))
        if isinstance(batches, blocks.Block):
            return self._run_block(batches)
        if is_data_set and not self._model.run_eagerly:
            return self._run_block(blocks.Block(batches, count))
        for _, data in zip(range(count), batches, strict=False):
            logs = self._on_data(data if is_data_set or not self._is_spread else self._cut_for_replicas(data))
        if logs is None:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        return logs

    def _run_block(self, block: blocks.Block) -> dict:
        block.done, began, (steps, seconds) = 0, time.perf_counter(), self._before
        while block.done < block.count:
            # The first step tells whether many can be run in one call.
            count = block.count - block.done if self._layout is not None and not self._varies else 1
            done, logs, agreed = self._call_loop(block, count, seconds)
            block.done += done
            if done:
                self.logs = logs
            if done < count:
                break
        if block.done == 0:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        self._before = block.done, time.perf_counter() - began
        if replica.spans_processes(self._strategy):
            self.pace.note(steps, float(agreed))
        else:
            self.pace.note(*self._before)
        return self.logs

    def _call_loop(self, block: blocks.Block, count: int, seconds: float) -> tuple[int, dict, tf.Tensor]:
        iterator = getattr(block.iterator, "source", block.iterator)
        is_sure = block.is_sure and isinstance(iterator, tf.data.Iterator)
        loop = self._loops[is_sure]
        done, logs, agreed = loop(iterator, tf.constant(count), tf.constant(seconds, tf.float32))
        return count if is_sure else int(done), logs, agreed

    def _compile(self, function: Callable) -> Callable:
        function = tf.autograph.experimental.do_not_convert(function)
        return function if self._model.run_eagerly else tf.function(function, reduce_retracing=True)

    def _run_once(self, data):
        self._picks = []
        return self._finish(self._run(data), tf.constant(0.0))[0]

    def _run_many(self, iterator, count: tf.Tensor, seconds: tf.Tensor, *, is_sure: bool):
        """Up to `count` steps: how many there was data for, the logs, and `seconds` as the workers agree on them.

        Args:
            iterator: of the pieces that this process's replicas get, or of whole batches.
            count: int32 scalar; another one retraces nothing.
            seconds: how long the block before took here, float32 scalar.
            is_sure: there is data for all of them, so that nothing needs to ask for its end.
        """
        self._picks = []

        # The step is a Python function inside the loop, never a nested tf.function: TensorFlow feeds a collective's key
        # at call time and loses it where a function is called from a loop ("must feed a value for placeholder").
        def another(done, left, kept):
            if is_sure:
                return done + 1, left - 1, self._keep(self._run(iterator.get_next()), kept)
            data = iterator.get_next_as_optional()
            return tf.cond(
                data.has_value(),
                lambda: (done + 1, left - 1, self._keep(self._run(data.get_value()), kept)),
                lambda: (done, 0, kept),
            )

        nothing = self._strategy.run(tf.raw_ops.OptionalNone)
        done, _, kept = tf.while_loop(lambda done, left, kept: left > 0, another, (0, count, nothing))
        return done, *self._finish(self._strategy.run(self._kept_parts, args=(kept,)), seconds)

    def _run(self, data):
        """One step on every replica. Returns what `_finish` needs beside the metrics' own state."""
        if not self._is_spread:
            return self._strategy.run(self._only_step, args=(data,))
        return self._strategy.run(self._replica_step, args=(pieces.deal(self._strategy, data),))

    def _keep(self, parts, kept):
        """The parts in the place of the last step's; an optional: at first nobody knows their shapes."""
        if not self._parts:
            return kept
        return self._strategy.run(lambda parts: tf.raw_ops.OptionalFromValue(components=parts), args=(parts,))

    def _kept_parts(self, kept):
        """The last step's parts; where there was none, nothing looks at what this returns."""
        if not self._parts:
            return []
        return tf.cond(
            tf.raw_ops.OptionalHasValue(optional=kept),
            lambda: tf.raw_ops.OptionalGetValue(
                optional=kept, output_types=[p.dtype for p in self._parts], output_shapes=[p.shape for p in self._parts]
            ),
            lambda: [tf.zeros([size or 0 for size in p.shape], p.dtype) for p in self._parts],
        )

    def _finish(self, parts, seconds):
        if not self._is_spread:
            return self._logs(parts), seconds
        found = self._strategy.run(self._make_global, args=(parts, seconds))
        return tree.map_structure(lambda value: self._strategy.experimental_local_results(value)[0], found)

    def _only_step(self, data):
        with _after(data), picks.picking(self._picks), _recording(self._model, self.logs_are_results) as results:
            logs = tree.map_structure(tf.convert_to_tensor, self._step(data))
        return self._part(logs, results, lambda leaf: leaf)

    def _replica_step(self, data):
        if isinstance(data, pieces.Piece):
            data, local, *place = data
        else:
            local, place = pieces.rows_of(data), None
            data = data if tf.get_static_value(local) else tree.map_structure(layers.with_a_row, data)
        facts = replica.begin(local, place, jit=bool(self._model.jit_compile))
        with (
            attributes.of_model(self._model),
            replica.stepping(facts),
            replica.compiled(facts),
            _after(data),
            picks.picking(self._picks),
            _recording(self._model, self.logs_are_results) as results,
        ):
            logs = self._step(data) if replica.has_rows_for_sure() else self._step_on_a_stand_in(data)
            self._varies |= facts.varies
            return self._part(logs, results, lambda leaf: replica.by_share(tf.cast(leaf, tf.float32)))

    def _part(self, logs, results: dict, value_of: Callable) -> list[tf.Tensor]:
        """The values in the logs that are no results of metrics: those are read anew where they are needed."""
        leaves = tree.flatten(logs)
        sources = [results.get(id(leaf), (None, None, None))[1:] for leaf in leaves]
        parts = [value_of(leaf) for leaf, (metric, _) in zip(leaves, sources, strict=True) if metric is None]
        self._layout = logs, sources
        self._parts = [tf.TensorSpec(part.shape, part.dtype) for part in parts]
        return parts

    def _logs(self, parts, state=()):
        """The logs, of the parts and of the metrics, whose state may stand for their variables'."""
        logs, sources = self._layout
        parts = iter(parts)
        with backend.StatelessScope(state_mapping=state) if state else contextlib.nullcontext():
            if self.logs_are_results:
                return tree.map_structure(tf.convert_to_tensor, self._model.get_metrics_result())
            metrics = {id(metric): metric for metric, _ in sources if metric is not None}
            read = {key: tree.flatten(metric.result()) for key, metric in metrics.items()}
        values = [next(parts) if metric is None else read[id(metric)][at] for metric, at in sources]
        return tree.pack_sequence_as(logs, [tf.convert_to_tensor(value) for value in values])

    def _make_global(self, parts, seconds):
        """One all-reduce: sums the metrics' state and reads them anew; sums the other entries' parts."""
        metrics = {id(metric): metric for metric, _ in self._layout[1] if metric is not None}.values()
        metrics = self._model.metrics if self.logs_are_results else metrics
        variables = [v for metric in metrics for v in metric.variables]
        mine = [_contribution(v) for v in variables] + list(parts)
        if replica.spans_processes(self._strategy):
            mine.append(seconds / replica.count())
        summed = replica.all_reduce(mine)
        state = [(v, tf.cast(value, v.dtype)) for v, value in zip(variables, summed, strict=False)]
        if replica.spans_processes(self._strategy):
            seconds = summed.pop()
        return self._logs(summed[len(variables) :], state), seconds

    def _step_on_a_stand_in(self, data):
        """Runs the step, and undoes what that does to the metrics where this replica has only a row that stands in.

        An empty batch is a mean of nothing, and oneDNN ends the process at an empty pooling gradient.
        """
        variables = [v for metric in self._model.metrics for v in metric.variables]
        with replica.uncompiled():
            before = [tf.identity(v.value) for v in variables]
        logs = self._step(data)
        with replica.uncompiled():
            for variable, value in zip(variables, before, strict=True):
                variable.assign(tf.where(replica.has_rows(), variable.value, value))
        return logs

    def _cut_for_replicas(self, data, *, with_places=True):
        """`train_on_batch`'s one batch in equal parts, in replica order, as a distributed dataset cuts its batches."""

        batch = tf.nest.map_structure(lambda v: None if v is None else tf.convert_to_tensor(v), data)

        def part(ctx):
            at = replica.piece_of(self._strategy, ctx.replica_id_in_sync_group)
            piece = pieces.piece_of_batch(batch, at, ctx.num_replicas_in_sync, stand_in=with_places)
            return piece if with_places else piece.data

        return self._strategy.experimental_distribute_values_from_function(part)


def run_many_steps_in_one_call() -> None:
    """Gives models on one device, or under replicas, `Steps` as their train and test functions."""

    @wrap(keras_trainer.TensorFlowTrainer, "_make_function")
    def make_function(stock, self, step_function):
        strategy = self._distribute_strategy
        if strategy is None or isinstance(strategy, tf.distribute.OneDeviceStrategy) or replica.is_spread(strategy):
            return Steps(self, step_function)
        return stock(self, step_function)


def read_results_once() -> None:
    """Reads the metrics once a block of steps, and not again at the epoch's end, where each costs a reduction."""

    @wrap(Trainer, "get_metrics_result")
    def metrics_result(stock, self):
        return {} if getattr(_here, "unread", None) is self else stock(self)

    @wrap(Trainer, "_get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        for steps in (self.train_function, self.test_function):
            if isinstance(steps, Steps) and logs and logs is steps.logs and steps.logs_are_results:
                return logs
        return stock(self, logs)


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
        cut = Steps(self, self.predict_step)._cut_for_replicas
        return stock(self, cut(x, with_places=not self.jit_compile))


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
        if type(data) is tuple and len(data) == 1 and isinstance(data[0], pieces.Piece):
            local, data = data[0].local, (data[0].data,)  # of `predict_on_batch`
        elif isinstance(data, pieces.Piece):
            local, data = data.local, data.data
        elif replica.context() is None or self.jit_compile:
            return stock(self, data)
        else:
            local, data = pieces.rows_of(data), tf.nest.map_structure(layers.with_a_row, data)
        found = stock(self, data)
        if tf.get_static_value(local):
            return found
        kept = [v[: tf.where(local > 0, tf.shape(v)[0], 0)] if v.shape.rank else v for v in tf.nest.flatten(found)]
        return tf.nest.pack_sequence_as(found, kept)


def _function(method):
    """The function of a method; None where someone put something else in its place."""
    return getattr(method, "__func__", None)


def _after(data):
    """Lets nothing of a step run before its data is there: where that ends, `iterations` must not count one more."""
    return tf.control_dependencies([t for t in tf.nest.flatten(data, expand_composites=True) if tf.is_tensor(t)])


def _one_replica(spec):
    if isinstance(spec, (tf.OptionalSpec, tf.NoneTensorSpec)):
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


@contextlib.contextmanager
def _recording(model, are_results: bool):
    """Notes which numbers are results of which metric: `id(tensor) -> (tensor, metric, position)`.

    Where all the logs are results (`are_results`) the step need not read any: they are read when the block has ended.
    """
    for metric in () if are_results else model.metrics:
        _record_results(type(metric))
    before = getattr(_here, "results", None), getattr(_here, "unread", None)
    _here.results, _here.unread = {}, model if are_results else None
    try:
        yield _here.results
    finally:
        _here.results, _here.unread = before


def _record_results(cls: type) -> None:
    if "_records_results" in cls.__dict__:
        return
    cls._records_results = True

    @wrap(cls, "result")
    def result(stock, self, *args, **kwargs):
        out = stock(self, *args, **kwargs)
        results = getattr(_here, "results", None)
        if results is not None and not args and not kwargs:
            results.update({id(t): (t, self, at) for at, t in enumerate(tree.flatten(out))})
        return out
