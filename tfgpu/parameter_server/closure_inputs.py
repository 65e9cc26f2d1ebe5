"""What a closure gets: batches that the coordinator sends, or the place of the data that a worker reads."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.parameter_server.worker_data import WorkerIterator


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
    return ClosureInput(
        (repr(data.element_spec), "on workers"),
        [data.on_workers(coordinator), tf.constant(count)],
        count,
        lambda at, data, count: data.get_next(),
        lambda data, count: count,
    )


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
