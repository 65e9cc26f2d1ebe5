"""Remote steps: the coordinator schedules closures, a few steps each, which the workers run on the batches they get."""

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.compat.tensorflow import is_op_determinism_enabled
from tfgpu.core import step_blocks, step_loop
from tfgpu.errors import InputError
from tfgpu.parameter_server.exact_counts import MetricState, count_per_closure, counting
from tfgpu.parameter_server.scheduled_closures import ScheduledClosures, unique
from tfgpu.parameter_server.worker_data import WorkerIterator

_log = logging.getLogger(__name__)

CLOSURES_PER_WORKER = 2
"""Unfinished closures per worker: one runs while the batches of the next one are sent."""
CLOSURE_BYTES = 1 << 25
"""The largest size of a closure's batches, unless a single batch is larger."""


@dataclass(frozen=True)
class ClosureInput:
    """The batches of one closure.

    Attributes:
        key: closures with equal keys share one compiled function.
        arguments: what the coordinator sends to the function.
        count: the number of batches.
        batch_at: in the function, returns a batch by its number, from 0, and the arguments.
        count_of: in the function, returns the number of batches by the arguments.
        signature: the specs of the arguments; None if each call may have other ones.
    """

    key: tuple
    arguments: list
    count: int
    batch_at: Callable
    count_of: Callable
    signature: list | None = None


def of_batches(batches: list) -> ClosureInput:
    """Stacks batches of equal shapes; a ragged or sparse batch comes alone and is sent as it is."""
    leaves = [_leaves(batch) for batch in batches]
    is_stacked = _can_stack(leaves[0])
    arguments = [tf.stack(column) for column in zip(*leaves, strict=True)] if is_stacked else leaves[0]

    def batch_at(at, *arguments):
        values = iter([v[at] for v in arguments] if is_stacked else arguments)
        return tf.nest.map_structure(lambda v: None if v is None else next(values), batches[0])

    def count_of(*arguments):
        return tf.shape(arguments[0])[0] if is_stacked else 1

    signature = [tf.TensorSpec([None, *v.shape[1:]], v.dtype) for v in arguments] if is_stacked else None
    return ClosureInput((repr(_specs(batches[0])), is_stacked), arguments, len(batches), batch_at, count_of, signature)


def of_worker_data(data: WorkerIterator, coordinator, count: int) -> ClosureInput:
    """Lets the worker that runs the closure read the batches itself."""
    key, arguments = (repr(data.element_spec), "on workers"), [data.on_workers(coordinator), tf.constant(count)]
    return ClosureInput(key, arguments, count, lambda at, data, count: data.get_next(), lambda data, count: count)


def next_batches(iterator, count: int) -> list:
    """Reads the next batches, at most `count`, as tensors."""
    batches: list = []
    with contextlib.suppress(StopIteration, tf.errors.OutOfRangeError):
        while len(batches) < count:
            batches.append(tf.nest.map_structure(_tensor, next(iterator)))
    return batches


def group_by_shape(batches: list) -> list[list]:
    """Groups successive batches of equal shapes; ragged and sparse ones get a group each."""
    groups: list[list] = []
    previous = None
    for batch in batches:
        specs = repr(_specs(batch)) if _can_stack(_leaves(batch)) else None
        if groups and specs is not None and specs == previous:
            groups[-1].append(batch)
        else:
            groups.append([batch])
        previous = specs
    return groups


def byte_size(batch) -> int:
    """The size of a batch in bytes, at least 1."""
    parts = [v for v in tf.nest.flatten(batch, expand_composites=True) if v is not None]
    return max(1, sum(int(tf.size(v)) * v.dtype.size for v in parts))


def _leaves(batch) -> list:
    return [v for v in tf.nest.flatten(batch) if v is not None]


def _tensor(value):
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


def _specs(batch):
    return tf.nest.map_structure(lambda v: None if v is None else tf.type_spec_from_value(v), batch)


def _can_stack(leaves: list) -> bool:
    return bool(leaves) and all(isinstance(v, tf.Tensor) for v in leaves)


def set_max_staleness(strategy: tf.distribute.Strategy, max_staleness: int | None) -> None:
    """Makes a closure start only once all but this many closures just before it are finished; None sets no bound."""
    slots.of(strategy).max_staleness = max_staleness


class RemoteSteps(step_loop.StepRunner):
    """Schedules the steps of a model on the workers, several per closure, and adds up what they counted.

    Args:
        model: the compiled model.
        step_function: `model.train_step` or `model.test_step`.
    """

    def __init__(self, model, step_function: Callable):
        super().__init__(model, step_function)
        self._jit = False
        self._is_training = step_function == model.train_step
        self._counts_updates = self._is_training and self.log_reader.are_results
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self.strategy)
        self._workers = workers_of(self.strategy)
        self.pace = _ClosurePace(self._workers)
        self._functions: dict[tuple, Callable] = {}
        self._scheduled: ScheduledClosures | None = None

    @property
    def is_running(self) -> bool:
        """Whether closures are scheduled for which nobody has waited."""
        return self._scheduled is not None

    def __call__(self, batches):
        """Schedules the steps of a `Block` or an iterator. Outside `fit` and `evaluate`, waits for them.

        Returns:
            The logs of the closures that have finished; they may be empty at first.

        Raises:
            tf.errors.OutOfRangeError: the data has no batch left.
        """
        block = batches if isinstance(batches, step_blocks.Block) else None
        count = self._model.steps_per_execution if block is None else block.count
        inputs = self._next_inputs(batches if block is None else block.iterator, count)
        if block is not None:
            block.done = sum(each.count for each in inputs)
        if not inputs:
            raise tf.errors.OutOfRangeError(None, None, "The data has ended.")
        if self._scheduled is None:
            limit, max_staleness = self._workers * CLOSURES_PER_WORKER, slots.get(self.strategy, "max_staleness")
            checks = self._counts_updates, self._coordinator.done
            self._scheduled = ScheduledClosures(self._model, limit, max_staleness, *checks)
        for each in inputs:
            self._schedule(each)
        return self.join() if step_blocks.current() is None else self._progress()

    def join(self) -> dict:
        """Waits for all closures, adds what they counted to the metrics, and returns the logs."""
        scheduled = self._scheduled
        try:
            scheduled.wait()
            self._coordinator.join()
        except Exception:
            self.stop()
            raise
        scheduled.close()
        self._scheduled = None
        for variable, total in scheduled.totals():
            variable.assign_add(total)
        self.logs = self.log_reader.read(scheduled.parts)
        scheduled.check_updates()
        return self.logs

    def stop(self) -> None:
        """Waits until no scheduled closure runs any more, and drops their results."""
        if self._scheduled is None:
            return
        scheduled, self._scheduled = self._scheduled, None
        with contextlib.suppress(Exception):  # the first error is already on its way to the caller
            self._coordinator.join()
        scheduled.close()

    def _next_inputs(self, iterator, count: int) -> list[ClosureInput]:
        """The inputs of closures for the next `count` batches, or those that are left."""
        if isinstance(iterator, WorkerIterator):
            self.pace.batch_bytes = 1  # nothing is sent
            taken = len(iterator.take(count, self._is_training))
            return [of_worker_data(iterator, self._coordinator, taken)] if taken else []
        batches = next_batches(iterator, count)
        if batches and not self.pace.batch_bytes:
            self.pace.batch_bytes = byte_size(batches[0])
        return [of_batches(group) for group in group_by_shape(batches)]

    def _schedule(self, given: ClosureInput) -> None:
        if given.key not in self._functions:
            run = self._make_closure(given.batch_at, given.count_of)
            self._functions[given.key] = tf.function(run, autograph=False, input_signature=given.signature)
        number = self._scheduled.enter()
        remote = self._coordinator.schedule(self._functions[given.key], args=tuple(given.arguments))
        self._scheduled.follow(number, remote, given.count, self.pace)

    def _make_closure(self, batch_at: Callable, count_of: Callable) -> Callable:
        """The function that a worker runs: steps on one batch after another.

        Args:
            batch_at: as in `ClosureInput`.
            count_of: as in `ClosureInput`.
        """
        metrics = unique(self._model.metrics)
        variables = unique(v for metric in metrics for v in metric.variables)
        for metric in metrics:
            count_per_closure(type(metric))
        _refuse_metrics(variables)

        def step(batch, state):
            with counting(MetricState(variables, state)) as counted:
                parts = self.loops.run_on_one_device(batch, False)
                return [tf.ensure_shape(v, s.shape) for v, s in zip(counted.values(), state, strict=True)], parts

        def run(*arguments):
            self.loops.begin_trace()
            began = _clock()
            with tf.control_dependencies([began]):
                state = [tf.zeros(v.shape, v.dtype) for v in variables]

            def another(at, state, kept):
                state, parts = self.strategy.run(step, args=(batch_at(at, *arguments), state))
                return at + 1, state, self.loops.to_optional(parts, kept)

            begin, count = (0, state, tf.raw_ops.OptionalNone()), count_of(*arguments)
            done, state, kept = tf.while_loop(lambda at, *_: at < count, another, begin)
            parts = self.loops.from_optional(kept)
            with tf.control_dependencies([done, *state, *parts]):
                return state, parts, _clock() - began

        return run

    def _progress(self) -> dict:
        scheduled = self._scheduled
        state = scheduled.news()
        if state is not None and self.log_reader.is_traced:
            scheduled.shown = {k: v.numpy() for k, v in self.log_reader.read(scheduled.parts, state).items()}
        return scheduled.shown


class _ClosurePace(step_blocks.Pace):
    """How many steps a closure has: fewer toward the end of the data, so that no worker waits long for the last ones.

    Args:
        workers: the number of workers.

    Attributes:
        batch_bytes: the size of a batch that is sent; 0 while it is unknown.
    """

    def __init__(self, workers: int):
        super().__init__()
        self._workers, self.batch_bytes = workers, 0

    def of(self, left: float) -> int:
        most = max(1, CLOSURE_BYTES // self.batch_bytes) if self.batch_bytes else 1
        if math.isfinite(left):
            most = min(most, max(1, math.ceil(left / (CLOSURES_PER_WORKER * self._workers))))
        return min(self.steps, most)


def workers_of(strategy: tf.distribute.Strategy) -> int:
    """The number of workers of a strategy with parameter servers."""
    return max(1, distribute.num_workers(strategy))


def _refuse_metrics(variables: list) -> None:
    for variable in variables:
        if variable.aggregation != "sum":
            raise InputError(
                f"The metric's variable {variable.path!r} has aggregation={variable.aggregation!r}, but workers can "
                "only add up what each has counted. Write the metric with sums (aggregation='sum')."
            )


def _clock() -> tf.Tensor:
    """The worker's clock in seconds; NaN with op determinism, where TensorFlow refuses to read the clock."""
    return tf.constant(math.nan, tf.float64) if is_op_determinism_enabled() else tf.timestamp()
