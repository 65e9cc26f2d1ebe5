"""The logs of a step: which values are metric results, and what those are over all replicas.

A replica's metric result covers only its own rows. So the logs are read after a block of steps: one all-reduce sums the
metrics' variables and the other log values, and each metric is read from the sums.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import StatelessScope, TensorFlowTrainer, tree
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, replication, step_context, worker_vote
from tfgpu.core.state import layer_state

_sums = step_context.Slot("metric_logs.sums")
_begun = step_context.Slot("metric_logs.begun")  # values of metrics' variables, of a replica that may hold no rows


class LogReader:
    """Reads the logs of a model's steps.

    Args:
        model: the compiled model.

    Attributes:
        are_results: the logs hold only results of the model's metrics: the steps are Keras's own.
        specs: shapes and dtypes of what `other_values` returned when a step was last traced.
        sums_results: the step uses results besides returning them, so a replica reads those of all replicas.
    """

    sums_results = False

    def __init__(self, model: keras.Model):
        self._model = model
        names = "train_step", "test_step", "compute_metrics", "get_metrics_result"
        self.are_results = all(function_of(getattr(model, name)) is getattr(TensorFlowTrainer, name) for name in names)
        self.specs: list[tf.TensorSpec] = []
        self._logs = self._sources = None

    @property
    def is_traced(self) -> bool:
        """Whether a step has been traced, so that its logs are known."""
        return self._logs is not None

    @contextlib.contextmanager
    def recording(self) -> Iterator[dict]:
        """Records which tensors are results of which metric: `id(tensor) -> (tensor, metric, position)`.

        If the logs hold only results, the step need not read any: they are read after the block.
        """
        for cls in () if self.are_results else _classes_below(keras.Metric):
            _record_results(cls)  # a step may use metrics that the model does not track
        results = {}
        unread = self._model if self.are_results else None
        with step_context.scope(results=results, unread_model=unread), _sums.set_to(self.sums_results):
            yield results

    def other_values(self, logs, results: dict, value_of: Callable) -> list[tf.Tensor]:
        """The values in a step's logs that are not metric results; metric results are read again when needed.

        Args:
            logs: what the step returned.
            results: from `recording`.
            value_of: converts such a value to what the replicas sum.
        """
        leaves = tree.flatten(logs)
        sources = [results.get(id(leaf), (None, None, None))[1:] for leaf in leaves]
        values = [value_of(leaf) for leaf, (metric, _) in zip(leaves, sources, strict=True) if metric is None]
        self._logs, self._sources = logs, sources
        self.specs = [tf.TensorSpec(value.shape, value.dtype) for value in values]
        return values

    def summed(
        self, values: list[tf.Tensor], ballot: tf.Tensor, averaged: list[keras.Variable] | tuple = ()
    ) -> tuple[list[tf.Tensor], list[tuple], tf.Tensor]:
        """Runs one all-reduce over the replicas, from within each.

        Args:
            values: from `other_values`.
            ballot: this worker's vote; see `worker_vote`.
            averaged: variables for which every replica gets the average of all replicas' copies.

        Returns:
            The sums of the values, the metrics' variables with their sums, and the result of the vote.
        """
        metrics = self._model.metrics if self.are_results else self._metrics()
        variables = [v for metric in metrics for v in metric.variables]
        averages = [_share(v) for v in averaged]
        mine = [_contribution(v, v.value) for v in variables] + averages + list(values)
        has_vote = replication.spans_processes(self._model.distribute_strategy)
        sums = collectives.all_reduce([*mine, worker_vote.share_of_ballot(ballot)] if has_vote else mine)
        result = sums.pop() if has_vote else ballot
        state = [(v, tf.cast(total, v.dtype)) for v, total in zip(variables, sums, strict=False)]
        sums = sums[len(variables) :]
        with layer_state.assigning_alike():
            for variable, average in zip(averaged, sums, strict=False):
                variable.assign(tf.cast(average, variable.dtype))
        return sums[len(averaged) :], state, result

    def read(self, values: list[tf.Tensor], state: list[tuple] | tuple = ()):
        """The logs, from `other_values` and the metrics; `state` may stand in for the metrics' variables."""
        with StatelessScope(state_mapping=state) if state else contextlib.nullcontext():
            if self.are_results:
                return tree.map_structure(tf.convert_to_tensor, self._model.get_metrics_result())
            read = {id(metric): tree.flatten(metric.result()) for metric in self._metrics()}
        values = iter(values)
        found = [next(values) if metric is None else read[id(metric)][at] for metric, at in self._sources]
        return tree.pack_sequence_as(self._logs, [tf.convert_to_tensor(value) for value in found])

    def _metrics(self) -> list:
        """The metrics whose results are in the logs."""
        return list({id(metric): metric for metric, _ in self._sources if metric is not None}.values())


def function_of(method):
    """The function of a method; None if something else has replaced the method."""
    return getattr(method, "__func__", None)


def read_results_once() -> None:
    """Reads the metrics once per block of steps, and not again at the epoch's end, where each costs a reduction."""

    @wrap("Trainer.get_metrics_result")
    def metrics_result(stock, self):
        return {} if step_context.current().unread_model is self else stock(self)

    @wrap("Trainer.get_metrics_result_or_logs")
    def results_or_logs(stock, self, logs):
        for steps in (self.train_function, self.test_function):
            reader = getattr(steps, "log_reader", None)
            if reader is not None and reader.are_results and logs and logs is steps.logs:
                return _as_numbers(logs)
        return stock(self, logs)


def _as_numbers(logs: dict) -> dict:
    """The logs as Keras returns them from `evaluate`: sorted, without dicts in dicts, numbers in place of scalars."""
    found = {}
    for name, value in sorted(logs.items()):
        if isinstance(value, dict):
            found |= _as_numbers(value)
        else:
            is_number = tf.is_tensor(value) and value.shape.rank == 0 and value.dtype != tf.string
            found[name] = float(value) if is_number else value
    return found


def _contribution(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """What this replica adds to the global value of a metric's variable, as the variable's `aggregation` says."""
    # identity: an all-reduce of a captured variable's own tensor fails inside a tf.function
    value = tf.identity(tf.cast(value, tf.float32 if value.dtype.is_floating else value.dtype))
    if variable.aggregation == "sum":
        return value
    if variable.aggregation == "mean":
        return value / step_context.num_replicas(value.dtype)
    return value * tf.cast(replication.replica_context().replica_id_in_sync_group == 0, value.dtype)


def _share(variable: keras.Variable) -> tf.Tensor:
    """What this replica adds to the average of all replicas' copies, in at least 32 bits."""
    dtype = tf.float64 if variable.value.dtype == tf.float64 else tf.float32
    return tf.cast(variable.value, dtype) / step_context.num_replicas(dtype)


@contextlib.contextmanager
def _of_all_replicas(metric: keras.Metric) -> Iterator[None]:
    """In the block a replica's step that uses results finds in a metric what all replicas have."""
    if not _sums.get() or step_context.step() is None or step_context.current().is_trying:
        yield
        return
    sums = collectives.all_reduce([_contribution(each, _value_by_rows(each)) for each in metric.variables])
    state = [(variable, tf.cast(total, variable.dtype)) for variable, total in zip(metric.variables, sums, strict=True)]
    with _sums.set_to(False), StatelessScope(state_mapping=state):
        yield


@contextlib.contextmanager
def begun_with(values: Iterable[tuple[keras.Variable, tf.Tensor]]) -> Iterator[None]:
    """In the block, where this replica may hold no rows, its metrics count with these values then."""
    with _begun.set_to({id(variable): value for variable, value in values}):
        yield


def _value_by_rows(variable: keras.Variable) -> tf.Tensor:
    begun = (_begun.get() or {}).get(id(variable))
    return variable.value if begun is None else tf.where(step_context.has_rows(), variable.value, begun)


def uses_results(logs: object, results: dict) -> bool:
    """Whether a step has read results of metrics that its logs do not hold; `results` as from `LogReader.recording`."""
    return bool(set(results) - set(map(id, tree.flatten(logs))))


def _classes_below(cls: type) -> Iterator[type]:
    """The subclasses of a class, those first that have none."""
    for below in cls.__subclasses__():
        yield from _classes_below(below)
        yield below


def _record_results(cls: type) -> None:
    """Makes a metric class tell the step which tensors are its results."""
    if slots.get(cls, "records_results"):
        return
    slots.of(cls).records_results = True

    @wrap(cls, "result")
    def result(stock, self, *args, **kwargs):
        with _of_all_replicas(self):
            out = stock(self, *args, **kwargs)
        results = step_context.current().results
        if results is not None and not args and not kwargs:
            results.update({id(t): (t, self, at) for at, t in enumerate(tree.flatten(out))})
        return out
