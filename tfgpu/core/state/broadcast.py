"""What one worker has, and the others get: a collective sum to which all but the one add zeros.

TensorFlow sums whole numbers exactly, so bytes and the bits of floats travel as they are. At the end: variables of
which each replica keeps a part.
"""

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import collectives, replication

CHUNK = 1 << 24
"""Bytes that travel at once."""


def sum_from_chief(strategy: tf.distribute.Strategy, numbers) -> np.ndarray:
    """The chief's whole numbers, on every worker. Every worker must call it, with as many numbers."""
    numbers = np.asarray(numbers, "int64")
    return collectives.sum_over_workers(strategy, numbers if strategy.extended.should_checkpoint else 0 * numbers)


def bytes_from_chief(strategy: tf.distribute.Strategy, content: bytes) -> bytes:
    """The chief's bytes, on every worker. Every worker must call it; what the others give is not read."""
    (size,) = sum_from_chief(strategy, [len(content)])
    is_chief, parts = strategy.extended.should_checkpoint, []
    for at in range(0, size, CHUNK):
        length = min(CHUNK, size - at)
        words = sum_from_chief(strategy, as_words(content[at : at + length] if is_chief else bytes(length)))
        parts.append(from_words(words, length))
    return content if is_chief else b"".join(parts)


def of_all_workers(strategy: tf.distribute.Strategy, mine: np.ndarray) -> np.ndarray:
    """Every worker's array, stacked in the order of the workers, bit for bit. Every worker must call it.

    Args:
        strategy: of several workers.
        mine: this worker's array; all have one shape and dtype.
    """
    count = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
    at, content = distribute.worker_index(strategy), np.ascontiguousarray(mine).tobytes()
    parts = [[] for _ in range(count)]
    for begin in range(0, len(content), CHUNK // count):
        piece = content[begin : begin + CHUNK // count]
        words = np.zeros((count, -(-len(piece) // 4)), "int64")
        words[at] = as_words(piece)
        words = collectives.sum_over_workers(strategy, words.ravel()).reshape(words.shape)
        for worker, row in enumerate(words):
            parts[worker].append(from_words(row, len(piece)))
    found = b"".join(b"".join(worker) for worker in parts)
    return np.frombuffer(found, mine.dtype).reshape(count, *mine.shape)


def as_words(content: bytes) -> np.ndarray:
    """Bytes as int64 numbers of 32 bits each, the last filled up with zeros."""
    return np.frombuffer(content + bytes(-len(content) % 4), "uint32").astype("int64")


def from_words(words: np.ndarray, length: int) -> bytes:
    """The first `length` bytes of what `as_words` made."""
    return words.astype("uint32").tobytes()[:length]


def parts(strategy: tf.distribute.Strategy, variable) -> np.ndarray:
    """Every replica's part of a variable that has one on each, in the order of the replicas, as bits.

    On several workers that is a collective: every worker must call it.
    """
    mine = to_bits(np.stack([np.array(part.numpy()) for part in variable.values]))
    if not replication.spans_processes(strategy):
        return mine
    return of_all_workers(strategy, mine).reshape(-1, *mine.shape[1:])


def put_parts(strategy: tf.distribute.Strategy, variable, found: np.ndarray, kind: str) -> None:
    """Gives this process's replicas their parts; on another number of replicas the first one gets what all make.

    Args:
        strategy: the variable's.
        variable: has a part on each replica.
        found: what `parts` returned, perhaps on another number of replicas.
        kind: as for `as_one`.
    """
    own, count = variable.values, strategy.num_replicas_in_sync
    first = distribute.worker_index(strategy) * len(own) if len(own) < count else 0
    if len(found) != count:
        whole = as_one(found, kind)
        found = np.stack([whole] + [whole if kind == "mean" else np.zeros_like(whole)] * (count - 1))
    for part, value in zip(own, found[first : first + len(own)], strict=True):
        part.assign(value)


def as_one(found: np.ndarray, kind: str) -> np.ndarray:
    """What one device would have for the parts of several replicas: their `"sum"`, their `"mean"`, or the first."""
    if kind == "sum":
        return found.astype("float64").sum(0).astype(found.dtype) if found.dtype.kind == "f" else found.sum(0)
    return found.mean(0).astype(found.dtype) if kind == "mean" else found[0]


def to_bits(value) -> np.ndarray:
    """bfloat16 and its like as whole numbers of the same bits: safetensors reads no other form of them into NumPy."""
    value = np.asarray(value)
    return value.view(f"u{value.itemsize}") if value.dtype.kind == "V" else value


def from_bits(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """What `to_bits` was given, of this dtype."""
    return array.view(dtype) if dtype.kind == "V" else array
