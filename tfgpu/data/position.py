"""Where a training run is: the epoch counter, the order of an epoch, and its random numbers.

All three depend on the seed, the epoch and the place in the epoch alone. So a run that was resumed, or that
has another number of replicas, sees the same examples, in the same order, augmented in the same way.
"""

from concurrent.futures import ThreadPoolExecutor

import tensorflow as tf

_ORDER, _NUMBERS = 1, 2  # keeps the order's random stream apart from the augmentation's


def counter() -> tf.Variable:
    """Makes the variable that says which epoch the next iteration of the training data is.

    It lives on the CPU, and is a plain variable even under `strategy.scope()`: a strategy's scope belongs
    to the thread that entered it, so the variable is made in another one.

    Returns:
        An int64 variable that holds 0.
    """

    def make() -> tf.Variable:
        with tf.device("CPU:0"):
            return tf.Variable(0, dtype=tf.int64, trainable=False, name="epoch")

    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(make).result()


def order(indices: tf.Tensor, *, seed: int, epoch: tf.Tensor) -> tf.Tensor:
    """Shuffles a whole epoch's indices, as a function of `(seed, epoch)` alone.

    Args:
        indices: int64 [n].
        seed: the run's seed.
        epoch: int64 scalar.

    Returns:
        int64 [n], a permutation of `indices`.
    """
    return tf.random.experimental.stateless_shuffle(indices, seed=_key(seed, _ORDER, epoch))


class Numbers:
    """Random numbers for consecutive places in an epoch, the same however it is cut into batches.

    The generator (Philox) is counter-based: the numbers of place p are drawn at counter p times the count
    that an example needs, so a batch that starts at place p gets exactly the rows that the whole epoch
    would have there.

    Args:
        seed: the run's seed.
        epoch: int64 scalar.
        start: int64 scalar, the place of the first example in the epoch.
        count: int32 scalar, how many examples.

    Example:
        >>> one = Numbers(seed=1, epoch=tf.constant(0, tf.int64), start=tf.constant(0, tf.int64), count=4)
        >>> two = Numbers(seed=1, epoch=tf.constant(0, tf.int64), start=tf.constant(2, tf.int64), count=2)
        >>> bool(tf.reduce_all(one.uniform(3, stream=0)[2:] == two.uniform(3, stream=0)))
        True
    """

    _PER_COUNT = 4  # one Philox counter makes four 32-bit numbers
    _PHILOX = 1

    def __init__(self, *, seed: int, epoch: tf.Tensor, start: tf.Tensor, count: tf.Tensor | int):
        self.count = tf.cast(count, tf.int32)
        self._start = tf.cast(start, tf.uint64)
        key, _ = tf.raw_ops.StatelessRandomGetKeyCounter(seed=_key(seed, _NUMBERS, epoch))
        self._philox_key = key

    def uniform(self, width: int, *, stream: int) -> tf.Tensor:
        """Draws float32 [count, width] in [0, 1); `stream` keeps one use apart from the others."""
        return self._draw(tf.raw_ops.StatelessRandomUniformV2, width, stream)

    def normal(self, width: int, *, stream: int) -> tf.Tensor:
        """Draws float32 [count, width] with mean 0 and standard deviation 1."""
        return self._draw(tf.raw_ops.StatelessRandomNormalV2, width, stream)

    def _draw(self, operation, width: int, stream: int) -> tf.Tensor:
        groups = -(-width // self._PER_COUNT)
        first = self._start * tf.constant(groups, tf.uint64)
        drawn = operation(
            shape=tf.stack([self.count, groups * self._PER_COUNT]),
            key=self._philox_key,
            counter=tf.stack([first, tf.constant(stream, tf.uint64)]),
            alg=self._PHILOX,
        )
        return drawn[:, :width]


def _key(seed: int, use: int, epoch: tf.Tensor) -> tf.Tensor:
    base = tf.constant([seed, use], tf.int64)
    return tf.random.experimental.stateless_fold_in(base, tf.cast(epoch, tf.int64))
