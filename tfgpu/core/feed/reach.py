"""Whether reading from a dataset has effects, or depends on anything, outside its own iterator."""

import re

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat import tensorflow as private

_REACHING = re.compile(r"\w*(Cache|DataService|Generator|Remote|Save|Snapshot|Variant)\w*Dataset(V\d)?")
"""Datasets whose iterators write files or take part in a job, or whose effects are unknown."""
_CONTAINED = re.compile(
    r"\w*Dataset(V\d)?|DatasetToSingleElement|\w*(SeedGenerator|MemoryCache)(V\d)?"
    r"|Random\w+(V\d)?|(Parameterized)?TruncatedNormal|Multinomial|SampleDistortedBoundingBox(V2)?"
    r"|ReadVariableOp|VariableShape|VarHandleOp|ResourceGather(Nd)?|LookupTable(Find|Size)V2|\w*HashTable\w*"
    r"|Assert|CheckNumerics(V2)?|If|Case|While|StatefulPartitionedCall|TensorArray\w*|StatelessRandomGetAlg|Empty"
)
"""Operations that TensorFlow calls stateful, but that change only the iterator's own state."""
_STATE_READS = set("LookupTableFindV2 LookupTableSizeV2 ReadVariableOp ResourceGather ResourceGatherNd".split())
_DRAWING = re.compile(r"_?(Shuffle|Random)\w*")
_REPEATING = re.compile(r"_?(Repeat|\w*FlatMap|\w*Interleave)\w*")


def reaches_out(data: object) -> bool:
    """Whether an iterator of the data has side effects: calls Python, changes variables, writes files.

    `tf.numpy_function(stateful=False)` counts as having none.
    """
    try:
        kept = slots.of(data)
    except (TypeError, AttributeError):
        return True
    if not hasattr(kept, "reaches_out"):
        kept.reaches_out = _reaches_out(data)
    return kept.reaches_out


def keep_reach(data: tf.data.Dataset, source: tf.data.Dataset) -> None:
    """Notes that a dataset has side effects only if the one that it is made from has them."""
    slots.of(data).reaches_out = reaches_out(source)


def _reaches_out(data: object) -> bool:
    kind = type(data)
    if not isinstance(data, tf.data.Dataset) or not kind.__module__.startswith("tensorflow."):
        return True
    if private.is_cache(data):
        reaches = private.writes_cache(data)
    else:
        reaches = _REACHING.fullmatch(kind.__name__) is not None
    return (
        reaches
        or any(map(_operation_reaches_out, _own_operations_of(data)))
        or any(map(reaches_out, private.sources_of(data)))
    )


def _operation_reaches_out(kind: str) -> bool:
    is_unknown = _CONTAINED.fullmatch(kind) is None or _REACHING.fullmatch(kind) is not None
    return private.is_stateful(kind) and is_unknown


def reads_state(data: tf.data.Dataset) -> bool:
    """Whether what an iterator of a dataset gives depends on variables or tables, which a callback may set."""
    return not _operations_of(data).isdisjoint(_STATE_READS)


def draws_again(data: tf.data.Dataset, *, is_repeated: bool = False) -> bool:
    """Whether an iterator draws a new order while it is read, as that of `shuffle(n).repeat()` at each end.

    All iterators of such a dataset draw from one generator, so what the next one gives depends on how far this one was
    read.

    Args:
        data: the dataset.
        is_repeated: a stage after it reads it several times.
    """
    if is_repeated and _DRAWING.fullmatch(type(data).__name__):
        return True
    is_repeated = is_repeated or _REPEATING.fullmatch(type(data).__name__) is not None
    is_inner = any(re.fullmatch(r"(Shuffle|Random)\w*Dataset(V\d)?", kind) for kind in _operations_of(data))
    return is_inner or any(draws_again(source, is_repeated=is_repeated) for source in private.sources_of(data))


def _operations_of(data: tf.data.Dataset) -> set[str]:
    """The kinds of operations in the functions of a dataset's stages."""
    kept = slots.of(data)
    if not hasattr(kept, "operations"):
        kept.operations = _own_operations_of(data).union(*map(_operations_of, private.sources_of(data)))
    return kept.operations


def _own_operations_of(data: tf.data.Dataset) -> set[str]:
    return set().union(*(private.operations_of(each.function.graph) for each in private.functions_of(data)))
