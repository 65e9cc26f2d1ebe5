"""One order for all workers: where no seed says how to shuffle, the chief decides for everybody.

Every worker makes the whole batch and keeps its part. Workers that shuffle differently would keep parts of different
batches: some examples would be read twice in an epoch, others never.
"""

import random
import zlib

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, training
from tfgpu.compat.keras import as_sliceable, sparse_rows, tree
from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, replication
from tfgpu.errors import InputError

_MOST_NAMED = 8
_agreed: list[int] = []
_randoms: dict[int, random.Random] = {}


def agree_on_orders() -> None:
    """Gives all workers one seed where the script sets none, when they join.

    `Dataset.shuffle` and Keras's own shuffling of arrays follow it, and so do Python's and NumPy's generators where the
    workers' differ; a seed that the script sets, before or afterwards, takes its place. (TensorFlow lets no data set be
    made before the workers have joined.)
    """

    @wrap("tf.distribute.MultiWorkerMirroredStrategy.__init__")
    def init(stock, self, *args, **kwargs):
        stock(self, *args, **kwargs)
        if replication.spans_processes(self) and not _is_seeded_on_all(self):
            _agreed[:] = [_from_chief(self, random.SystemRandom().randrange(2**31))]
            tf.random.set_seed(_agreed[0])
            # Data that shuffles itself, and Keras's shuffling of a PyDataset, use these; a script may have seeded them.
            if not _is_same_on_all(self, random.getstate()):
                random.seed(_agreed[0])
            if not _is_same_on_all(self, np.random.get_state()[1].tolist()):
                np.random.seed(_agreed[0])

    @wrap("random_seed.get_seed")
    def get_seed(stock, op_seed):
        seed, number = stock(op_seed)
        ctx = replication.replica_context()
        if op_seed is None and number is not None and ctx is not None and replication.spans_processes(ctx.strategy):
            # Workers trace the same operations, so `tf.random.normal` would draw the same numbers on each.
            number = (number + 7919 * distribute.worker_index(ctx.strategy)) % (2**31 - 1)
        return seed, number

    @wrap("ArrayDataAdapter.get_tf_dataset")
    def get_tf_dataset(stock, self):
        # Under a seed, Keras shuffles arrays alike in every epoch; a script without one expects new orders.
        if training.shuffles(self) is not True or not _agreed or distribute.global_seed() != _agreed[0]:
            return stock(self)
        return _shuffled_anew(self)


def agreed_random() -> random.Random | None:
    """Random numbers that all workers draw alike where the script sets no seed; None elsewhere."""
    if not _agreed or distribute.global_seed() != _agreed[0]:
        return None
    return _randoms.setdefault(_agreed[0], random.Random(_agreed[0]))


def is_seeded() -> bool:
    """Whether the script has set TensorFlow's global seed, so that another process can draw the same."""
    seed = distribute.global_seed()
    return seed is not None and seed not in _agreed


def facts() -> dict[str, str]:
    """What `preflight.join` compares of the seed that the script has set."""
    seed = distribute.global_seed()
    if seed is None:
        return {"seed before the strategy": "not set"}
    return {"seed before the strategy": "set", "seeds": str(seed)}


def seed_mark() -> int:
    """A number below 2**20 that tells whether two workers have the same seed."""
    return zlib.crc32(str(distribute.global_seed()).encode()) % 2**20


def refuse_seeds(strategy: tf.distribute.Strategy) -> InputError:
    """The error that says which worker has which seed. Every worker must call it."""
    seeds = _by_worker(strategy, distribute.global_seed() or 0)
    told = "; ".join(f"{seed} on {name}" for name, seed in list(seeds.items())[:_MOST_NAMED])
    return InputError(
        f"The workers have set different seeds: {told}{'; ...' if len(seeds) > _MOST_NAMED else ''}. Every worker "
        "makes the whole batch and keeps its part, so they must shuffle alike: else rows would be lost, others seen "
        "twice. Set the same seed on every worker; where each has data of its own, set "
        "`experimental_distribute.auto_shard_policy` in the data set's options to OFF."
    )


def _is_seeded_on_all(strategy: tf.distribute.Strategy) -> bool:
    """Whether the script has set a seed. Every worker must call it.

    Raises:
        InputError: it has on some workers only.
    """
    mine = int(distribute.global_seed() is not None)
    workers, seeded = collectives.sum_over_workers(strategy, [1, mine])
    if seeded not in (0, workers):
        lacking = [name for name, has in _by_worker(strategy, mine).items() if not has]
        more = ", ..." if len(lacking) > _MOST_NAMED else ""
        raise InputError(
            f"A seed is set on {seeded} of {workers} workers, and not on {', '.join(lacking[:_MOST_NAMED])}{more}. Set "
            "the same seed on every worker before the strategy is made, or on none."
        )
    return bool(seeded)


def _by_worker(strategy: tf.distribute.Strategy, number: int) -> dict[str, int]:
    """Each worker's number, by the worker's name. Every worker must call it."""
    workers, mine = int(collectives.sum_over_workers(strategy, [1])[0]), distribute.worker_index(strategy)
    found = collectives.sum_over_workers(strategy, [number * (rank == mine) for rank in range(workers)])
    chief = int("chief" in strategy.cluster_resolver.cluster_spec().jobs)
    names = ["chief"] * chief + [f"worker {rank}" for rank in range(workers - chief)]
    return {name: int(each) for name, each in zip(names, found, strict=True)}


def _is_same_on_all(strategy: tf.distribute.Strategy, state) -> bool:
    """Whether all workers have an equal state."""
    mine = zlib.crc32(repr(state).encode()) % 2**20
    count, total, squares = collectives.sum_over_workers(strategy, [1, mine, mine**2])
    return total * total == count * squares


def _from_chief(strategy: tf.distribute.Strategy, number: int) -> int:
    return int(collectives.sum_over_workers(strategy, [number if strategy.extended.should_checkpoint else 0])[0])


def _shuffled_anew(adapter) -> tf.data.Dataset:
    """The adapter's batches, in another order each time that they are read."""
    rows = training.rows_of(adapter)
    inputs = as_sliceable(training.arrays_of(adapter))

    def batch_of(places, inputs):
        def part(value):
            if (found := sparse_rows(value, places)) is not None:
                return found
            if isinstance(value, (list, tuple, dict)):
                return None
            return tf.gather(value, places) if tf.is_tensor(value) else value

        return tree.traverse(part, inputs)

    seeds = tf.data.Dataset.random(seed=_agreed[0], rerandomize_each_iteration=True).take(1)
    orders = seeds.map(lambda seed: tf.random.experimental.stateless_shuffle(tf.range(rows), [seed, 0]))
    batches = orders.flat_map(tf.data.Dataset.from_tensor_slices).batch(training.batch_size_of(adapter))
    with_inputs = tf.data.Dataset.zip((batches, tf.data.Dataset.from_tensors(inputs).repeat()))
    return with_inputs.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
