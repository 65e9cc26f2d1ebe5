"""Broadcasts between workers, by all-reduces: the sender contributes its numbers, all others zeros.

TensorFlow sums integers exactly, so bytes and the bits of floats arrive unchanged.
"""

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import collectives

CHUNK = 1 << 24
"""Bytes in one all-reduce."""


def sum_from_chief(strategy: tf.distribute.Strategy, numbers) -> np.ndarray:
    """The chief's integers, on every worker. Every worker must call it, with the same number of integers."""
    numbers = np.asarray(numbers, "int64")
    return collectives.sum_over_workers(strategy, numbers if strategy.extended.should_checkpoint else 0 * numbers)


def bytes_from_chief(strategy: tf.distribute.Strategy, content: bytes) -> bytes:
    """The chief's bytes, on every worker. Every worker must call it; the others' bytes are ignored."""
    (size,) = sum_from_chief(strategy, [len(content)])
    is_chief, received = strategy.extended.should_checkpoint, []
    for at in range(0, size, CHUNK):
        length = min(CHUNK, size - at)
        words = sum_from_chief(strategy, as_words(content[at : at + length] if is_chief else bytes(length)))
        received.append(from_words(words, length))
    return content if is_chief else b"".join(received)


def of_all_workers(strategy: tf.distribute.Strategy, mine: np.ndarray) -> np.ndarray:
    """Every worker's array, stacked in the order of the workers, bit for bit. Every worker must call it.

    Args:
        strategy: of several workers.
        mine: this worker's array; all have one shape and dtype.
    """
    count = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
    at, content = distribute.worker_index(strategy), np.ascontiguousarray(mine).tobytes()
    received = [[] for _ in range(count)]
    for begin in range(0, len(content), CHUNK // count):
        piece = content[begin : begin + CHUNK // count]
        words = np.zeros((count, -(-len(piece) // 4)), "int64")
        words[at] = as_words(piece)
        words = collectives.sum_over_workers(strategy, words.ravel()).reshape(words.shape)
        for worker, row in enumerate(words):
            received[worker].append(from_words(row, len(piece)))
    found = b"".join(b"".join(worker) for worker in received)
    return np.frombuffer(found, mine.dtype).reshape(count, *mine.shape)


def as_words(content: bytes) -> np.ndarray:
    """Bytes as 32-bit words, each in an int64; the last is padded with zeros."""
    return np.frombuffer(content + bytes(-len(content) % 4), "uint32").astype("int64")


def from_words(words: np.ndarray, length: int) -> bytes:
    """The inverse of `as_words`, for `length` bytes."""
    return words.astype("uint32").tobytes()[:length]
