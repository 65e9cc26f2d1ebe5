"""The position of a training run in its data: the epoch counter, the order of an epoch, and its random numbers.

All three depend only on the seed, the epoch and the position in the epoch. A resumed run, or one with another number
of replicas, therefore sees the same examples in the same order with the same augmentation.
"""

import copy
import threading

import numpy as np
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.errors import InputError, whole_number

_ORDER, _NUMBERS, _BATCHES = 1, 2, 3  # each use has separate random numbers
_EPOCH_BITS = 31  # of a position: the others hold the first batch


def on_cpu(values, dtype: tf.DType | None = None) -> tf.Tensor:
    """A constant on the CPU, where input pipelines run."""
    with tf.device("CPU:0"):
        return tf.constant(values, dtype)


class Counter:
    """Counts the epochs.

    Attributes:
        next: the epoch of the next iteration of the training data, from 0.
        step: the first batch of the next iteration; later iterations begin with batch 0.
        begins_anywhere: whether iterations can begin with a later batch, without reading the earlier ones.
    """

    def __init__(self):
        self.next = self.step = 0
        self.begins_anywhere = False
        self._one_at_a_time = threading.Lock()

    def take(self) -> int:
        """Returns the next iteration's epoch and first batch as one number (see `parted`), and advances."""
        with self._one_at_a_time:
            epoch, step = self.next, self.step
            self.next, self.step = self.next + 1, 0
            return epoch | step << _EPOCH_BITS

    def positions(self) -> tf.data.Dataset:
        """Like `epochs`, for sources that are read by place: iterations can begin with any batch (see `parted`)."""
        self.begins_anywhere = True
        return self.epochs()

    def epochs(self) -> tf.data.Dataset:
        """Makes a dataset of one element, the number of the epoch that starts with this iteration.

        A variable's `assign_add` would do, but under `tf.config.experimental.enable_op_determinism`, which
        `tfgpu train --deterministic` uses, tf.data turns off all parallel calls and prefetching of a dataset that has
        one stateful operation (TensorFlow's make_deterministic.cc). A Python function that is declared stateless avoids
        this. That is safe: it runs once, when an iteration starts. Its unused argument keeps it from being folded into
        a constant.
        """

        def take(_) -> np.int64:
            return np.int64(self.take())

        def start(n: tf.Tensor) -> tf.Tensor:
            return tf.ensure_shape(tf.numpy_function(take, [n], tf.int64, stateful=False), [])

        return tf.data.Dataset.range(1).map(start)


def parted(position: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The epoch and the first batch, int64, of an element of `Counter.positions`; of an epoch alone, batch 0."""
    return tf.bitwise.bitwise_and(position, (1 << _EPOCH_BITS) - 1), tf.bitwise.right_shift(position, _EPOCH_BITS)


class Epochs:
    """Base of objects whose `train` is a dataset that starts the next epoch with each iteration."""

    train: tf.data.Dataset
    _counter: Counter

    def __post_init__(self) -> None:
        kept = slots.of(self.train)  # lets a resumed `fit`, which gets only `train`, seek
        kept.epochs, kept.begins_anywhere = self._counter, self._counter.begins_anywhere

    @property
    def counter(self) -> Counter:
        """What counts the epochs, for other splits of the same training."""
        return self._counter

    def seek(self, epoch: int, step: int = 0) -> None:
        """Makes epoch number `epoch` (from 0) the next iteration of `train`, as a resumed run needs.

        With `step`, that iteration begins with batch number `step` (from 0); earlier batches are not read.

        A training loop that seeks at the start of each epoch is exact even if something has read from `train` before.

        Raises:
            InputError: `epoch` or `step` is not a whole number from 0, or the batches of this source are made in
                sequence.
        """
        epoch, step = whole_number("epoch", epoch, minimum=0), whole_number("step", step, minimum=0)
        if step and not self._counter.begins_anywhere:
            raise InputError(
                f"Batches of this source are made one after another. Received: step={step}. Skip them yourself: "
                "itertools.islice(data.train, step, None)."
            )
        self._counter.next, self._counter.step = epoch, step

    def peek(self):
        """Returns the first batch of the next epoch without advancing."""
        epoch, step = self._counter.next, self._counter.step
        batch = next(iter(self.train))
        self.seek(epoch, step)
        return batch


def order(indices: tf.Tensor, *, seed: int, epoch: tf.Tensor, of: str = "examples") -> tf.Tensor:
    """Shuffles a whole epoch's indices, as a function of `(seed, epoch)` alone.

    Args:
        indices: int64 [n].
        seed: the run's seed.
        epoch: int64 scalar.
        of: what is ordered: `"examples"` or `"batches"`; each has separate random numbers.

    Returns:
        int64 [n], a permutation of `indices`.
    """
    use = {"examples": _ORDER, "batches": _BATCHES}[of]
    return tf.random.experimental.stateless_shuffle(indices, seed=_key(seed, use, epoch))


class Numbers:
    """Random numbers for consecutive positions in an epoch, independent of how it is divided into batches.

    The generator (Philox) is counter-based: the numbers of position p start at counter p times the count per example,
    so a batch that starts at p gets the same rows as the whole epoch has there.

    Args:
        seed: the run's seed.
        epoch: int64 scalar.
        start: int64 scalar, the position of the first example in the epoch; or int64 [count], the position of each, if
            examples may overtake each other: that costs an operation per example.
        count: int32 scalar, the number of examples.

    Example:
        >>> one = Numbers(seed=1, epoch=tf.constant(0, tf.int64), start=tf.constant(0, tf.int64), count=4)
        >>> two = Numbers(seed=1, epoch=tf.constant(0, tf.int64), start=tf.constant(2, tf.int64), count=2)
        >>> bool(tf.reduce_all(one.uniform(3, stream=0)[2:] == two.uniform(3, stream=0)))
        True
    """

    _PER_COUNT = 4  # one Philox counter makes four 32-bit numbers

    def __init__(self, *, seed: int, epoch: tf.Tensor, start: tf.Tensor, count: tf.Tensor | int):
        self.count = tf.cast(count, tf.int32)
        self._start = tf.cast(start, tf.uint64)
        self._philox_key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=_key(seed, _NUMBERS, epoch))

    def uniform(self, width: int, *, stream: int) -> tf.Tensor:
        """Draws float32 [count, width] in [0, 1); different values of `stream` are independent."""
        return self._draw(tf.raw_ops.StatelessRandomUniformV2, width, stream)

    def normal(self, width: int, *, stream: int) -> tf.Tensor:
        """Draws float32 [count, width] with mean 0 and standard deviation 1."""
        return self._draw(tf.raw_ops.StatelessRandomNormalV2, width, stream)

    def at(self, rows: tf.Tensor) -> "Numbers":
        """The numbers of some of these examples: of the rows `rows` (int64) alone, in that order."""
        some = copy.copy(self)
        some.count, some._start = tf.size(rows), self._start + tf.cast(rows, tf.uint64)
        return some

    def _draw(self, operation, width: int, stream: int) -> tf.Tensor:
        groups = -(-width // self._PER_COUNT)

        def rows(start, count):
            return operation(
                shape=tf.stack([count, groups * self._PER_COUNT]),
                key=self._philox_key,
                counter=tf.stack([start * tf.constant(groups, tf.uint64), tf.constant(stream, tf.uint64)]),
                alg=tf.random.Algorithm.PHILOX.value,
            )[:, :width]

        if self._start.shape.rank == 0:
            return rows(self._start, self.count)
        one = tf.TensorSpec([width], tf.float32)
        return tf.map_fn(lambda place: rows(place, 1)[0], self._start, fn_output_signature=one)


def of_rows(values: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """The rows of a tensor of the whole batch; all if `rows` is None.

    Random numbers, and what is computed from them, are small: they are made for the whole batch, and the rows are taken
    from them. Making them for the rows alone would change bits: how TensorFlow rounds a sine or a product depends on
    its place in the tensor. Only images are made for the rows alone.
    """
    return values if rows is None else tf.gather(values, rows)


def _key(seed: int, use: int, epoch: tf.Tensor) -> tf.Tensor:
    base = tf.constant([seed, use], tf.int64)
    return tf.random.experimental.stateless_fold_in(base, tf.cast(epoch, tf.int64))
