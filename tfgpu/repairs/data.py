"""How a batch is split, and in which order data is read."""

import tensorflow as tf

from tfgpu.core.dealing import sharing
from tfgpu.core.feed import by_hand, sharded_dataset
from tfgpu.core.randomness import data_order
from tfgpu.repairs.repair import Repair


def short_batch_is_split_unevenly() -> bool:
    """Whether 5 rows on four replicas are split into 2, 2, 1 and 0."""
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    (batch,) = strategy.experimental_distribute_dataset(tf.data.Dataset.range(5).batch(5))
    return min(len(part) for part in batch.values) == 0


def order_depends_on_the_process() -> bool:
    """Whether a shuffle without a seed has a new order each time it is created, and so in each worker."""
    tf.random.set_seed(None)
    orders = [list(tf.data.Dataset.range(20).shuffle(20).as_numpy_iterator()) for _ in range(2)]
    return orders[0] != orders[1]


def _shard_and_deal() -> None:
    sharded_dataset.shard_batches()
    by_hand.make_own_rows()
    sharing.share_python_data()


REPAIRS = (
    Repair(
        name="even-pieces",
        fault=("a short batch goes to the first replicas only; workers get files, so a batch holds other rows"),
        issue="https://github.com/tensorflow/tensorflow/issues/36846",
        probe=short_batch_is_split_unevenly,
        apply=_shard_and_deal,
    ),
    Repair(
        name="one-order",
        fault="without a seed each worker shuffles differently, so examples are read twice or never",
        issue="",
        probe=order_depends_on_the_process,
        apply=data_order.agree_on_data_order,
    ),
)
