"""The compiled steps of `fit`, `evaluate` and `Trainer`: many in one tf.function, logs read once at the end.

Stock Keras feeds distributed values through `Optional`s and a nested tf.function, and averages the logs over replicas:
https://github.com/keras-team/keras/issues/20585, https://github.com/keras-team/keras/issues/20329.
"""

import contextlib
import functools
import logging
import time
from collections.abc import Callable

import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.trainer import Trainer

from tfgpu.compat.patch import wrap
from tfgpu.core import (
    batch_rows,
    batch_sharding,
    collectives,
    nested_functions,
    profiling_hooks,
    replica_attributes,
    replication,
    step_blocks,
    step_context,
    trace_choices,
    traffic,
    xla_trial,
)
from tfgpu.optim import local_sgd

_log = logging.getLogger(__name__)


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
        averager: averages replicas that train apart; None where they train together.
        guard: undoes steps that bring NaN, where a `fit` asks for it (`skipping.Guard`).
        done: steps so far.
        sent_bytes: what each replica has handed to collectives in them.
    """

    def __init__(self, model, step_function: Callable):
        self._model = model
        self._strategy = model.distribute_strategy
        self._is_spread = replication.is_replicated(self._strategy)
        self.pace = step_blocks.Pace()
        self.logs = self._layout = None
        # TensorFlow keeps a collective's shape for the length of a call: one that varies allows one step a call.
        self._varies = False
        self._step = model._autoconvert_optionals(step_function)
        self._jit = bool(model.jit_compile) and not model.run_eagerly
        self._trial = xla_trial.trial_of(model)
        self._before = False, 0, 0.0  # the last block: whether XLA compiled it, steps, seconds
        stock = keras_trainer.TensorFlowTrainer
        names = "train_step", "test_step", "compute_metrics", "get_metrics_result"
        self.logs_are_results = all(_function(getattr(model, name)) is getattr(stock, name) for name in names)
        plan = replication.local_training_of(self._strategy) if self._is_spread else None
        is_training = _function(step_function) is _function(model.train_step)
        self._kind = "train" if is_training else "test"
        self.averager = local_sgd.Averager(model, plan) if plan is not None and is_training else None
        self.done = self.sent_bytes = 0
        self._sent = {}
        self.guard = None
        self._on_data = functools.cache(lambda **how: self._compile(functools.partial(self._run_once, **how)))
        self._loop = functools.cache(self._make_loop)
        # Under replicas XLA compiles what it can of the step, and the collectives stay outside.
        self._compiled_step = functools.cache(self._compile_step)

    def __call__(self, batches):
        """What `fit`, `evaluate` and `train_on_batch` call.

        Args:
            batches: a `Block`; or an iterator, for the model's `steps_per_execution` steps or those that are left.

        Raises:
            tf.errors.OutOfRangeError: there was no batch left at all.
        """
        count, logs = self._model.steps_per_execution, None
        is_data_set = isinstance(
            batches, (batch_sharding.DealtIterator, tf.distribute.DistributedIterator, tf.data.Iterator)
        )
        if isinstance(batches, step_blocks.Block):
            return self._run_block(batches)
        if is_data_set and not self._model.run_eagerly:
            return self._run_block(step_blocks.Block(batches, count))
        for _, data in zip(range(count), batches, strict=False):
            apart = self._is_apart()
            data = data if is_data_set or not self._is_spread else batch_sharding.deal(self._strategy, data)
            with self.averager.running() if apart else contextlib.nullcontext(), self._marked(1):
                logs, agreed = self._on_data(apart=apart, guarded=_is_guarded())(data, _told(0.0), self._since())
            self._count(1, apart)
            self._hear(agreed)
        if logs is None:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        return logs

    def _run_block(self, block: step_blocks.Block) -> dict:
        jit = self._next_way(block)
        block.done, began, (*earlier, seconds) = 0, time.perf_counter(), self._before
        while block.done < block.count:
            # The first step tells whether many can be run in one call.
            count = block.count - block.done if self._layout is not None and not self._varies else 1
            count = count if self.averager is None else min(count, self.averager.left())
            done, logs, agreed = self._call_loop(block, count, seconds, jit)
            block.done += done
            if done:
                self.logs = logs
            if done < count:
                break
        if block.done == 0:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        if self._is_trying():
            tree.map_structure(lambda value: value.numpy(), self.logs)  # a GPU may still be at work
        self._before = jit, block.done, time.perf_counter() - began
        spans = replication.spans_processes(self._strategy)
        self._note(*earlier, self._hear(agreed)) if spans else self._note(*self._before)
        return self.logs

    def _hear(self, agreed: tf.Tensor) -> float:
        """Takes in what the workers agree on: whether they leave, and how long the block before took."""
        if not replication.spans_processes(self._strategy):
            return 0.0
        seconds, wish = agreed.numpy()
        run = step_blocks.current()
        if wish > 0 and run is not None and run.leaving is not None:
            run.leaving.is_agreed = True
        return float(seconds)

    def _is_trying(self) -> bool:
        return self._trial is not None and not self._trial.is_over

    def _next_way(self, block: step_blocks.Block) -> bool:
        """Whether XLA compiles the block's steps."""
        if self._is_trying() and self._trial.jit and not self._trial.is_possible:
            iterator, kind = self._loop_of(block)
            told, since = _told(0.0), self._since()
            traced = self._loop(*kind, False).get_concrete_function(iterator, tf.constant(1), told, since)
            self._trial.check(traced, None if self._is_spread else self._compiled_step(), iterator.element_spec)
        return self._jit if self._trial is None else self._trial.jit

    def _note(self, jit: bool, steps: int, seconds: float) -> None:
        self.pace.note(steps, seconds)
        if self._is_trying():
            self._trial.note(jit, steps, seconds)

    def _loop_of(self, block: step_blocks.Block) -> tuple:
        """The block's iterator as the compiled loop takes it, and the kind of loop."""
        iterator, with_places = block.iterator, None
        if isinstance(iterator, batch_sharding.DealtIterator):
            iterator, with_places = iterator.source, iterator.with_places
        is_sure = block.is_sure and isinstance(iterator, tf.data.Iterator)
        return iterator, (is_sure, with_places, self._is_apart(), _is_guarded())

    def _call_loop(
        self, block: step_blocks.Block, count: int, seconds: float, jit: bool
    ) -> tuple[int, dict, tf.Tensor]:
        iterator, kind = self._loop_of(block)
        loop, (is_sure, _, apart, _) = self._loop(*kind, jit), kind
        with self.averager.running() if apart else contextlib.nullcontext(), self._marked(count):
            done, logs, agreed = loop(iterator, tf.constant(count), _told(seconds), self._since())
        done = count if is_sure else int(done)
        self._count(done, apart)
        return done, logs, agreed

    def _marked(self, count: int):
        jit = self._jit or self._trial is not None
        return profiling_hooks.steps_begin(
            self.done, count, self._kind, step_blocks.set_by(self._model, self._kind), jit=jit
        )

    def _is_apart(self) -> bool:
        return self.averager is not None and self.averager.is_apart()

    def _since(self) -> tf.Tensor:
        return tf.constant(0 if self.averager is None else self.averager.since)

    def _count(self, steps: int, apart: bool) -> None:
        """Takes in that so many steps have run in a call."""
        self.done += steps
        self.sent_bytes += sum(steps * sent.bytes for sent in [self._sent.get(apart)] if sent is not None)
        self.sent_bytes += sum(sent.bytes for sent in [self._sent.get(None)] if sent is not None)
        if apart:
            self.averager.count(steps)

    @property
    def sent_is_whole(self) -> bool:
        """Whether `sent_bytes` has all: every shape was known when the steps were traced."""
        return all(sent.is_whole for sent in self._sent.values())

    def _make_loop(self, is_sure: bool, with_places: bool | None, apart: bool, guarded: bool, jit: bool) -> Callable:
        how = dict(is_sure=is_sure, with_places=with_places, apart=apart, guarded=guarded, jit=jit)
        return self._compile(functools.partial(self._run_many, **how))

    def _compile(self, function: Callable) -> Callable:
        if self._model.run_eagerly:
            return tf.autograph.experimental.do_not_convert(function)
        return nested_functions.own(function, reduce_retracing=True)

    def _compile_step(self) -> Callable:
        # A partial has no code of its own, by which TensorFlow would take all models' steps for one function.
        return tf.function(functools.partial(self._step), jit_compile=True, reduce_retracing=True)

    def _run_once(self, data, told, since: tf.Tensor, *, apart: bool, guarded: bool):
        self._picks = []
        return self._finish(self._run(data, self._jit, apart, guarded, since)[0], told)

    def _run_many(self, iterator, count, told, since, *, is_sure, with_places, apart, guarded, jit):
        """Up to `count` steps: how many there was data for, the logs, and `told` as the workers agree on it.

        Args:
            iterator: of what the replicas get, or of whole batches.
            count: int32 scalar; another one retraces nothing.
            told: float32 [2]: how long the block before took here, in seconds, and whether this worker wants to leave.
            since: steps since replicas that train apart were averaged, int32 scalar.
            is_sure: there is data for all of them, so that nothing needs to ask for its end.
            with_places: the batches are whole, and this tells whether their pieces say where they lie; None where the
                replicas' parts have been dealt.
            apart: the replicas train apart.
            guarded: steps that bring a number that is none are left out.
            jit: XLA compiles the steps.
        """
        self._picks = []

        def run(batch, since, kept):
            if with_places is not None:
                batch = batch_sharding.deal(self._strategy, batch, with_places=with_places)
            parts, since = self._run(batch, jit, apart, guarded, since)
            return since, self._keep(parts, kept)

        # The step is a Python function inside the loop, never a nested tf.function: TensorFlow feeds a collective's key
        # at call time and loses it where a function is called from a loop ("must feed a value for placeholder").
        def another(done, left, since, kept):
            if is_sure:
                batch = iterator.get_next()
                with _state_waits_for(batch):
                    return done + 1, left - 1, *run(batch, since, kept)
            data = iterator.get_next_as_optional()
            return tf.cond(
                data.has_value(),
                lambda: (done + 1, left - 1, *run(data.get_value(), since, kept)),
                lambda: (done, 0, since, kept),
            )

        nothing = self._strategy.run(tf.raw_ops.OptionalNone)
        done, *_, kept = tf.while_loop(lambda done, left, *_: left > 0, another, (0, count, since, nothing))
        return done, *self._finish(self._strategy.run(self._kept_parts, args=(kept,)), told)

    def _run(self, data, jit: bool, apart: bool, guarded: bool, since: tf.Tensor):
        """One step on every replica. Returns what `_finish` needs beside the metrics' state, and the new `since`."""
        if not self._is_spread:
            return self._strategy.run(self._only_step, args=(data, jit, guarded)), since
        if apart:
            self.averager.begin(since)
        parts = self._strategy.run(self._replica_step, args=(data, jit, apart, guarded))
        return parts, self.averager.follow(since) if apart else since

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

    def _finish(self, parts, told):
        if not self._is_spread:
            return self._logs(parts), told
        found = self._strategy.run(self._make_global, args=(parts, told))
        return tree.map_structure(lambda value: self._strategy.experimental_local_results(value)[0], found)

    def _only_step(self, data, jit: bool, guarded: bool = False):
        step = self._compiled_step() if jit else self._step
        with trace_choices.shared(self._picks), _recording(self._model, self.logs_are_results) as results:
            logs = self.guard.run(step, data) if guarded else step(data)
            logs = tree.map_structure(tf.convert_to_tensor, logs)
        return self._part(logs, results, lambda leaf: leaf)

    def _replica_step(self, data, jit: bool, apart: bool, guarded: bool):
        if isinstance(data, batch_sharding.Piece):
            data, local, *place = data
        else:
            local, place = batch_sharding.rows_of(data), None
            data = data if tf.get_static_value(local) else tree.map_structure(batch_sharding.with_stand_in_row, data)
        facts = batch_rows.begin_step(
            local, place, jit=jit, local_updates=apart, local_forward=apart and self.averager.is_alone
        )
        with (
            traffic.metering() as self._sent[apart],
            replica_attributes.of_model(self._model),
            step_context.scope(step=facts),
            step_context.xla_scope(facts),
            trace_choices.shared(self._picks),
            _recording(self._model, self.logs_are_results) as results,
        ):
            step = self._step if step_context.surely_has_rows() else self._step_on_a_stand_in
            logs = self.guard.run(step, data) if guarded else step(data)
            self._varies |= facts.has_varying_shapes
            if apart:
                self.averager.note(facts)
            return self._part(logs, results, lambda leaf: step_context.times_share(tf.cast(leaf, tf.float32)))

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

    def _make_global(self, parts, told):
        """One all-reduce: sums the metrics' state and reads them anew; sums the other entries' parts."""
        metrics = {id(metric): metric for metric, _ in self._layout[1] if metric is not None}.values()
        metrics = self._model.metrics if self.logs_are_results else metrics
        variables = [v for metric in metrics for v in metric.variables]
        mine = [_contribution(v) for v in variables] + list(parts)
        if replication.spans_processes(self._strategy):
            mine.append(told / step_context.num_replicas())
        with traffic.metering() as self._sent[None]:
            summed = collectives.all_reduce(mine)
        state = [(v, tf.cast(value, v.dtype)) for v, value in zip(variables, summed, strict=False)]
        if replication.spans_processes(self._strategy):
            told = summed.pop()
        return self._logs(summed[len(variables) :], state), told

    def _step_on_a_stand_in(self, data):
        """Runs the step, and undoes what that does to the metrics where this replica has only a row that stands in.

        An empty batch is a mean of nothing, and oneDNN ends the process at an empty pooling gradient.
        """
        variables = [v for metric in self._model.metrics for v in metric.variables]
        with step_context.outside_xla():
            before = [tf.identity(v.value) for v in variables]
        logs = self._step(data)
        with step_context.outside_xla():
            for variable, value in zip(variables, before, strict=True):
                variable.assign(tf.where(step_context.has_rows(), variable.value, value))
        return logs


def run_many_steps_in_one_call() -> None:
    """Gives models on one device, or under replicas, `Steps` as their train and test functions."""
    xla_trial.measure_jit()

    @wrap(keras_trainer.TensorFlowTrainer, "_make_function")
    def make_function(stock, self, step_function):
        strategy = self._distribute_strategy
        if (
            strategy is None
            or isinstance(strategy, tf.distribute.OneDeviceStrategy)
            or replication.is_replicated(strategy)
        ):
            return Steps(self, step_function)
        return stock(self, step_function)


def read_results_once() -> None:
    """Reads the metrics once a block of steps, and not again at the epoch's end, where each costs a reduction."""

    @wrap(Trainer, "get_metrics_result")
    def metrics_result(stock, self):
        return {} if step_context.current().unread_model is self else stock(self)

    @wrap(Trainer, "_get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        for steps in (self.train_function, self.test_function):
            if isinstance(steps, Steps) and logs and logs is steps.logs and steps.logs_are_results:
                return logs
        return stock(self, logs)


def _told(seconds: float) -> tf.Tensor:
    """What this process tells the others with a block of steps."""
    run = step_blocks.current()
    wish = run is not None and run.leaving is not None and run.leaving.is_wished
    return tf.constant([seconds, float(wish)], tf.float32)


def _is_guarded() -> bool:
    run = step_blocks.current()
    return run is not None and run.kind == "train" and run.guard is not None


def _function(method):
    """The function of a method; None where someone put something else in its place."""
    return getattr(method, "__func__", None)


@contextlib.contextmanager
def _state_waits_for(batch):
    """Lets nothing that is made inside change a state before the batch is there: `iterations`, a seed, a metric.

    Where the data fails after all, the state is that of the last whole step. What needs the batch waits for it in any
    case; waiting for it with all the rest, constants and reads of variables, takes a fifth of a small model's step.
    """
    graph = tf.compat.v1.get_default_graph()
    tensors = [t for t in tf.nest.flatten(batch, expand_composites=True) if tf.is_tensor(t)]
    sources = list({tensor.op.name: tensor.op for tensor in tensors}.values())
    first = len(graph.get_operations())
    yield
    waiting = {op.name for op in sources}
    for op in graph.get_operations()[first:]:
        if any(tensor.op.name in waiting for tensor in op.inputs) or any(o.name in waiting for o in op.control_inputs):
            waiting.add(op.name)
        elif op.op_def.is_stateful and op.type != "ReadVariableOp":
            op._add_control_inputs(sources)
            waiting.add(op.name)


def _contribution(variable) -> tf.Tensor:
    """What this replica adds to the global value of a metric's variable, as the variable's `aggregation` says."""
    value = variable.value
    # identity: an all-reduce of a captured variable's own tensor fails inside a tf.function
    value = tf.identity(tf.cast(value, tf.float32 if value.dtype.is_floating else value.dtype))
    if variable.aggregation == "sum":
        return value
    if variable.aggregation == "mean":
        return value / step_context.num_replicas(value.dtype)
    return value * tf.cast(replication.replica_context().replica_id_in_sync_group == 0, value.dtype)


@contextlib.contextmanager
def _recording(model, are_results: bool):
    """Notes which numbers are results of which metric: `id(tensor) -> (tensor, metric, position)`.

    Where all the logs are results (`are_results`) the step need not read any: they are read when the block has ended.
    """
    for metric in () if are_results else model.metrics:
        _record_results(type(metric))
    results = {}
    with step_context.scope(results=results, unread_model=model if are_results else None):
        yield results


def _record_results(cls: type) -> None:
    if "_records_results" in cls.__dict__:
        return
    cls._records_results = True

    @wrap(cls, "result")
    def result(stock, self, *args, **kwargs):
        out = stock(self, *args, **kwargs)
        results = step_context.current().results
        if results is not None and not args and not kwargs:
            results.update({id(t): (t, self, at) for at, t in enumerate(tree.flatten(out))})
        return out
