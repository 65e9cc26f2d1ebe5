"""Broadcasts between workers, by all-reduces: the sender contributes its numbers, all others zeros.

TensorFlow sums integers exactly, so bytes and the bits of floats arrive unchanged.
"""

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.core import collectives
from tfgpu.core.workers import ledger

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


def texts_of_all_workers(strategy: tf.distribute.Strategy, text: str) -> list[str]:
    """Every worker's text, in the order of the workers. Every worker must call it."""
    content = text.encode()
    sizes = of_all_workers(strategy, np.array([len(content)], "int64")).reshape(-1)
    padded = np.frombuffer(content.ljust(int(sizes.max()), b"\0"), "uint8")
    rows = of_all_workers(strategy, padded)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def blocks_of_all_workers(strategy: tf.distribute.Strategy, mine: np.ndarray) -> np.ndarray:
    """Every worker's 32-bit integers, stacked in the order of the workers: an all-gather. Every worker must call it.

    Args:
        strategy: of several workers.
        mine: int32; all have one length.
    """
    count = strategy.num_replicas_in_sync // len(strategy.extended.worker_devices)
    kept = slots.of(strategy)
    if not hasattr(kept, "gather_blocks"):

        @tf.autograph.experimental.do_not_convert
        def each(values):
            """A row is marked with its worker's number; the other replicas of the worker have rows marked 0."""
            replica = tf.distribute.get_replica_context().replica_id_in_sync_group
            is_first = tf.cast(replica % len(strategy.extended.worker_devices) == 0, values.dtype)
            return collectives.all_gather(values * is_first)

        kept.gather_blocks = tf.function(
            lambda values: strategy.run(each, args=(values,)), autograph=False, reduce_retracing=True
        )
    marked = np.concatenate([np.array([distribute.worker_index(strategy) + 1], "int32"), mine])
    with ledger.waiting():
        found = kept.gather_blocks(tf.constant(marked))
        rows = strategy.experimental_local_results(found)[0].numpy()
    by_worker = {int(row[0]) - 1: row[1:] for row in rows if row[0]}
    return np.stack([by_worker[worker] for worker in range(count)])


def as_words(content: bytes) -> np.ndarray:
    """Bytes as 32-bit words, each in an int64; the last is padded with zeros."""
    return np.frombuffer(content + bytes(-len(content) % 4), "uint32").astype("int64")


def from_words(words: np.ndarray, length: int) -> bytes:
    """The inverse of `as_words`, for `length` bytes."""
    return words.astype("uint32").tobytes()[:length]
