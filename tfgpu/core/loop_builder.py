"""The compiled loops around a model's step: one tf.function runs many steps on every replica.

Stock Keras feeds distributed values through `Optional`s and a nested tf.function:
https://github.com/keras-team/keras/issues/20585, https://github.com/keras-team/keras/issues/20329.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.compat import training
from tfgpu.compat.keras import tree
from tfgpu.core import (
    batch_rows,
    batch_sharding,
    metric_logs,
    nested_graphs,
    replica_attributes,
    replication,
    step_context,
    traffic,
)
from tfgpu.core.feed import read_ahead, sharded_dataset, shards_ahead
from tfgpu.core.metric_logs import LogReader
from tfgpu.core.randomness import draw_sizes, row_draws, trace_choices
from tfgpu.core.row_mixing import whole_batch
from tfgpu.core.sparse import index_origin
from tfgpu.core.workers.batch_count import BatchCount


class Updates:
    """How the replicas of a model update its weights in a step; the methods here add nothing.

    A strategy whose replicas train on their own copies has another one for each model (`replication.local_training_of`,
    whose `averager(model)` makes it).

    Attributes:
        are_local: each replica updates its own weights.
        has_local_forward: the forward pass sees one replica's rows only.
        since: batches since the replicas were last averaged.
    """

    are_local = False
    has_local_forward = False
    since = 0

    def left(self) -> float:
        """How many batches come before these updates; infinite if the next batch already has them."""
        return float("inf")

    def is_due(self) -> bool:
        """Whether the next batch has these updates."""
        return self.left() == float("inf")

    def running(self) -> contextlib.AbstractContextManager:
        """Surrounds a call of such steps."""
        return contextlib.nullcontext()

    def count(self, steps: int) -> None:
        """Records that `steps` such steps have run."""

    def begin(self, since: tf.Tensor) -> None:
        """Called before a step, traced outside the replicas."""

    def follow(self, since: tf.Tensor) -> tf.Tensor:
        """Called after a step, traced outside the replicas; returns the new `since`."""
        return since

    def note(self, facts: step_context.Step) -> None:
        """Records, inside a replica, what a traced step updates."""


TOGETHER = Updates()
"""The gradients are summed over the replicas."""


@dataclass(frozen=True)
class LoopKind:
    """What a loop is compiled for; each kind is traced once, for any number of steps.

    Attributes:
        jit: XLA compiles the steps.
        is_sure: there is data for all steps, so the loop need not check for its end.
        gives_row_ranges: for a loop that shards whole batches: whether the shards tell their row ranges; None if the
            data is already sharded.
        updates: how the replicas update the weights.
        is_wrapped: a step wrapper runs each step.
        rows: of each whole batch, for a loop that is traced for that number; None if it takes any.
        has_own_rows: the data gives this worker's rows of each batch, and how many the whole batch has.
        batch_rows: of each whole batch of such data, if its shapes say it.
        device: to which the data of one device is read ahead; None if batches are in host memory.
        is_ahead: the data of replicas is read ahead to their devices.
        is_timed: the loop measures the wait for data that is read ahead.
    """

    jit: bool = False
    is_sure: bool = False
    gives_row_ranges: bool | None = None
    updates: Updates = TOGETHER
    is_wrapped: bool = False
    rows: int | None = None
    has_own_rows: bool = False
    batch_rows: int | None = None
    device: str | None = None
    is_ahead: bool = False
    is_timed: bool = False


class LoopBuilder:
    """Compiles the loops of one model's training or test step.

    Args:
        model: the compiled model.
        step_function: `model.train_step` or `model.test_step`.
        log_reader: reads the logs.
        meter: counts what the steps hand to collectives.

    Attributes:
        varying: for each kind of loop traced so far, whether a collective's shape varies between steps.
        collectives: per replica, in the step that was traced last.
        sees_whole_batch: the user's step mixes rows and sees the whole batch (`row_mixing.whole_batch`).
        batch_rows: of a full batch, where the data says it.
        python: what the step changes in Python.
        step_wrapper: runs the steps of wrapped kinds (`step_blocks.StepWrapper`).
        batch_count: counts the batches where workers make them themselves; else None.
    """

    def __init__(self, model: keras.Model, step_function: Callable, log_reader: LogReader, meter: traffic.Meter):
        self._model, self._strategy = model, model.distribute_strategy
        self._is_replicated = replication.is_replicated(self._strategy)
        self._step = training.without_optionals(model, step_function)
        self._step_name = getattr(step_function, "__name__", "")
        self._log_reader, self._meter = log_reader, meter
        self.python = replica_attributes.PythonState()
        self._choices: list = []
        self._own_variables: dict[int, keras.Variable] = {}
        self.varying: dict[LoopKind, bool] = {}
        self.collectives = 0.0
        self.sees_whole_batch = False
        self.batch_rows: int | None = None
        self.step_wrapper = None
        self.batch_count = BatchCount() if replication.spans_processes(self._strategy) else None
        self.loop = functools.cache(lambda kind: self._compile(functools.partial(self._run_many, kind=kind)))
        self.single = functools.cache(lambda kind: self._compile(functools.partial(self._run_one, kind=kind)))
        # A partial has no code object, by which TensorFlow would take all models' steps for one function.
        self.xla_step = functools.cache(
            lambda: tf.function(functools.partial(self._step), jit_compile=True, reduce_retracing=True)
        )

    @property
    def has_varying_shapes(self) -> bool:
        """Whether any loop that was traced has collectives of varying shapes."""
        return any(self.varying.values())

    def can_run_many(self, kind: LoopKind) -> bool:
        """Whether many steps of a kind can run in a call. TensorFlow fixes the shapes of collectives for a call.

        A kind that was not traced yet is taken to be like the others.
        """
        return not self.varying.get(kind, self.has_varying_shapes)

    def begin_trace(self, kind: LoopKind = LoopKind()) -> None:
        """Begins a new trace, which makes its own choices; one for full batches makes those of the trace for any."""
        self._choices, self._own_variables = [] if kind.rows is None else self._choices, {}

    def _compile(self, function: Callable) -> Callable:
        if self._model.run_eagerly:
            return tf.autograph.experimental.do_not_convert(function)
        return nested_graphs.own(function, reduce_retracing=True)

    def _run_one(self, data, ballot: tf.Tensor, since: tf.Tensor, *, kind: LoopKind):
        """One step on distributed data: returns the logs, and the result of the workers' vote."""
        self.begin_trace(kind)
        return self._finish(self._run(data, since, kind)[0], ballot)

    def _run_many(self, iterator, count: tf.Tensor, ballot: tf.Tensor, since: tf.Tensor, *, kind: LoopKind):
        """Up to `count` steps: returns how many ran, their wait for data, the logs, the workers' vote.

        The wait is int32, in microseconds; 0 unless the kind is timed.

        Args:
            iterator: yields distributed or whole batches.
            count: int32 scalar; another value causes no retracing.
            ballot: this worker's vote (`worker_vote.ballot`).
            since: steps since replicas that train on their own copies were averaged, int32 scalar.
            kind: what the loop is compiled for.
        """
        self.begin_trace(kind)

        def run(batch, since, last):
            if kind.gives_row_ranges is not None:
                batch = self._sharded(batch, kind)
            values, since = self._run(batch, since, kind)
            return since, self.to_optional(values, last)

        timed = read_ahead.timed if kind.is_timed else lambda read: (read(), 0)

        # The step is a Python function inside the loop, never a nested tf.function: TensorFlow feeds a collective's key
        # at call time and loses it if a loop calls the function ("must feed a value for placeholder").
        def another(done, left, waited, since, last):
            if kind.is_sure:
                batch, wait = timed(lambda: self._next(iterator, kind))
                with _state_waits_for(batch):
                    return done + 1, left - 1, waited + wait, *run(batch, since, last)
            (has_value, get_value), wait = timed(lambda: self._next_if_any(iterator, kind))

            def step():
                if self.batch_count is not None:
                    self.batch_count.note_batch()
                return done + 1, left - 1, waited + wait, *run(get_value(), since, last)

            def end():
                if self.batch_count is not None:
                    self.batch_count.note_end()
                return done, 0, waited, since, last

            return tf.cond(has_value, step, end)

        start = 0, count, 0, since, self._strategy.run(tf.raw_ops.OptionalNone)
        done, _, waited, _, last = tf.while_loop(lambda done, left, *_: left > 0, another, start)
        return done, waited, *self._finish(self._strategy.run(self.from_optional, args=(last,)), ballot)

    def _next(self, iterator, kind: LoopKind):
        if kind.is_ahead:
            return shards_ahead.next_shards(self._strategy, iterator, kind.rows)
        with tf.device(kind.device) if kind.device else batch_sharding.on_host():
            return iterator.get_next()

    def _next_if_any(self, iterator, kind: LoopKind) -> tuple[tf.Tensor, Callable]:
        if kind.is_ahead:
            return shards_ahead.next_shards_if_any(self._strategy, iterator, kind.rows)
        return sharded_dataset.next_batch(iterator, kind.device)

    def _sharded(self, batch, kind: LoopKind):
        how = {"gives_row_ranges": kind.gives_row_ranges}
        if kind.has_own_rows:
            return batch_sharding.shard_rows(self._strategy, batch, rows=kind.rows or kind.batch_rows, **how)
        return batch_sharding.shard(self._strategy, batch, gives_whole=self.sees_whole_batch, rows=kind.rows, **how)

    def _run(self, data, since: tf.Tensor, kind: LoopKind):
        """One step on every replica: returns the log values that are not metric results, and the new `since`."""
        if not self._is_replicated:
            return self._strategy.run(self.run_on_one_device, args=(data, kind.jit, kind.is_wrapped)), since
        kind.updates.begin(since)
        with self.python.step():
            values = self._strategy.run(self._run_on_replica, args=(data, kind, step_context.current().run))
        if not tf.executing_eagerly():
            found = traffic.collectives_of(tf.compat.v1.get_default_graph())
            self.collectives = found / len(self._strategy.extended.worker_devices)
        return values, kind.updates.follow(since)

    def run_on_one_device(self, data, jit: bool, is_wrapped: bool = False) -> list[tf.Tensor]:
        """One step without other replicas."""
        step = self.xla_step() if jit else self._step
        context = step_context.scope(draws_as_xla=not jit and row_draws.are_as_xla(self._model))
        with context, trace_choices.shared(self._choices), self._log_reader.recording() as results:
            logs = self.step_wrapper.run(step, data) if is_wrapped else step(data)
            logs = tree.map_structure(tf.convert_to_tensor, logs)
        return self._log_reader.other_values(logs, results, lambda leaf: leaf)

    def _run_on_replica(self, data, kind: LoopKind, run: "step_context.Run | None") -> list[tf.Tensor]:
        """One step on this replica's rows."""
        given = data
        data, local, place = batch_sharding.rows_and_range(given)
        index_origin.mark(data, alike=False)
        facts = batch_rows.begin_step(
            local,
            place,
            jit=kind.jit,
            has_added_shapes=kind.rows is not None,
            local_updates=kind.updates.are_local,
            local_forward=kind.updates.has_local_forward,
        )
        with (
            self._meter.tracing(kind.updates),
            self.python.on_replica(),
            replica_attributes.of_model(self._model),
            step_context.scope(run=run, step=facts, batch_rows=self.batch_rows),
            step_context.scope(draws_as_xla=row_draws.are_as_xla(self._model)),
            step_context.xla_scope(facts),
            trace_choices.shared(self._choices),
            draw_sizes.known(draw_sizes.kept(self._model, self._step_name)),
            self._log_reader.recording() as results,
        ):
            step = self._step if step_context.surely_has_rows() else self._step_on_stand_in
            if self.sees_whole_batch and not kind.updates.are_local:
                step, data = functools.partial(whole_batch.run, self._step), given
            logs = self.step_wrapper.run(step, data) if kind.is_wrapped else step(data)
            self.varying[kind] = self.varying.get(kind, False) or facts.has_varying_shapes
            self._own_variables |= facts.own_variables
            kind.updates.note(facts)
            return self._log_reader.other_values(
                logs, results, lambda leaf: step_context.times_share(tf.cast(leaf, tf.float32))
            )

    def _step_on_stand_in(self, data):
        """Runs the step, and undoes its effect on the metrics if this replica has only a stand-in row.

        The mean of an empty batch is NaN, and oneDNN ends the process on an empty pooling gradient.
        """
        variables = [v for metric in self._model.metrics for v in metric.variables]
        with step_context.outside_xla():
            before = [tf.identity(v.value) for v in variables]
        with metric_logs.begun_with(zip(variables, before, strict=True)):
            logs = self._step(data)
        with step_context.outside_xla():
            for variable, value in zip(variables, before, strict=True):
                variable.assign(tf.where(step_context.has_rows(), variable.value, value))
        return logs

    def to_optional(self, values: list[tf.Tensor], last):
        """A step's values as the loop carries them: in an optional, which is empty before the first step.

        Args:
            values: the log values that are not metric results.
            last: the previous step's optional, which is returned if the logs hold no such values.
        """
        if not self._log_reader.specs:
            return last
        return self._strategy.run(lambda values: tf.raw_ops.OptionalFromValue(components=values), args=(values,))

    def from_optional(self, last) -> list[tf.Tensor]:
        """The last step's values; if no step ran, zeros, which nothing reads."""
        specs = self._log_reader.specs
        if not specs:
            return []
        return tf.cond(
            tf.raw_ops.OptionalHasValue(optional=last),
            lambda: tf.raw_ops.OptionalGetValue(
                optional=last, output_types=[s.dtype for s in specs], output_shapes=[s.shape for s in specs]
            ),
            lambda: [tf.zeros([size or 0 for size in s.shape], s.dtype) for s in specs],
        )

    def _finish(self, values, ballot: tf.Tensor):
        """The logs, and the result of the workers' vote."""
        if not self._is_replicated:
            return self._log_reader.read(values), ballot
        found = self._strategy.run(self._finish_on_replica, args=(values, ballot))
        return tree.map_structure(lambda value: self._strategy.experimental_local_results(value)[0], found)

    def _finish_on_replica(self, values, ballot: tf.Tensor):
        with self._meter.tracing(None):
            values, state, result = self._log_reader.summed(values, ballot, list(self._own_variables.values()))
        return self._log_reader.read(values, state), result


@contextlib.contextmanager
def _state_waits_for(batch) -> Iterator[None]:
    """Makes operations of the block that change state (`iterations`, a seed, a metric) wait for the batch.

    If the data fails, the state is then that of the last whole step. Operations that need the batch wait for it anyway;
    making all others wait too, constants and variable reads included, takes a fifth of a small model's step.
    """
    if tf.executing_eagerly():  # `tf.config.run_functions_eagerly`: the order is Python's
        yield
        return
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
            private.add_control_inputs(op, sources)
            waiting.add(op.name)
