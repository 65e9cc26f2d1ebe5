"""One order of the data for all workers: if the script sets no seed, the chief chooses one.

Workers make rows of the same batches. Those that shuffle differently would make rows of different batches: some
examples would be read twice per epoch, others never.
"""

import functools
import random
import zlib
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots, training
from tfgpu.compat.keras import as_sliceable, sparse_rows, tree
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import runtime
from tfgpu.core import collectives, replication
from tfgpu.errors import InputError

_MOST_NAMED = 8


@dataclass(frozen=True)
class AgreedSeed:
    """The seed that the chief chose for all workers.

    Attributes:
        seed: TensorFlow's global seed, unless the script sets another one later.
        random: draws the same numbers on all workers.
    """

    seed: int
    random: random.Random


def agree_on_data_order() -> None:
    """Gives all workers one seed when they join, unless the script has set one.

    `Dataset.shuffle` and Keras's own shuffling of arrays use it. Python's and NumPy's generators are seeded with it too
    if the workers' states differ. A seed that the script sets later replaces it. (TensorFlow allows no dataset before
    the workers have joined.)
    """

    @wrap("tf.distribute.MultiWorkerMirroredStrategy.__init__")
    def init(stock, self, *args, **kwargs):
        stock(self, *args, **kwargs)
        if replication.spans_processes(self) and not _is_seeded_on_all(self):
            drawn = random.SystemRandom().randrange(2**31)
            (seed,) = map(int, collectives.sum_over_workers(self, [drawn * self.extended.should_checkpoint]))
            slots.of(runtime()).agreed_seed = AgreedSeed(seed, random.Random(seed))
            tf.random.set_seed(seed)
            # Data that shuffles itself, and Keras's shuffling of a PyDataset, use these; a script may have seeded them.
            if not _is_same_on_all(self, random.getstate()):
                random.seed(seed)
            if not _is_same_on_all(self, np.random.get_state()[1].tolist()):
                np.random.seed(seed)

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
        # With a seed, Keras shuffles arrays alike in every epoch; a script without one expects a new order each time.
        agreed = _agreed_seed()
        is_shuffled_here = training.shuffles(self) is True and agreed is not None
        found = _shuffle_each_epoch(self, agreed.seed) if is_shuffled_here else stock(self)
        if all(isinstance(value, np.ndarray | tf.Tensor) for value in tree.flatten(training.arrays_of(self))):
            slots.of(found).first_batch = functools.partial(_first_rows, self)
        return found


def _agreed_seed() -> AgreedSeed | None:
    """The seed that the chief chose, or None if it chose none or the script has set another one."""
    agreed = slots.get(runtime(), "agreed_seed")
    return agreed if agreed is not None and distribute.global_seed() == agreed.seed else None


def agreed_random() -> random.Random | None:
    """A generator with the same numbers on all workers, if the chief chose their seed; else None."""
    agreed = _agreed_seed()
    return None if agreed is None else agreed.random


def is_seeded() -> bool:
    """Whether the script has set TensorFlow's global seed, so that another process draws the same numbers."""
    return distribute.global_seed() is not None and _agreed_seed() is None


def facts() -> dict[str, str]:
    """The seed that the script has set, for the comparison in `rendezvous.join`."""
    seed = distribute.global_seed()
    if seed is None:
        return {"seed before the strategy": "not set"}
    return {"seed before the strategy": "set", "seeds": str(seed)}


def seed_mark() -> int:
    """A hash of the seed, below 2**20: workers with the same seed have the same hash."""
    return zlib.crc32(str(distribute.global_seed()).encode()) % 2**20


def refuse_seeds(strategy: tf.distribute.Strategy) -> InputError:
    """The error that lists each worker's seed. Every worker must call it."""
    seeds = _by_worker(strategy, distribute.global_seed() or 0)
    told = "; ".join(f"{seed} on {name}" for name, seed in list(seeds.items())[:_MOST_NAMED])
    return InputError(
        f"The workers have set different seeds: {told}{'; ...' if len(seeds) > _MOST_NAMED else ''}. Every worker "
        "makes rows of the same batches, so all must shuffle in the same way: otherwise some rows are skipped "
        "and others read twice. Set the same seed on every worker; if each has its own data, set "
        "`experimental_distribute.auto_shard_policy` in the dataset's options to OFF."
    )


def _is_seeded_on_all(strategy: tf.distribute.Strategy) -> bool:
    """Whether the script has set a seed. Every worker must call it.

    Raises:
        InputError: a seed is set on some workers only.
    """
    mine = int(distribute.global_seed() is not None)
    workers, seeded = collectives.sum_over_workers(strategy, [1, mine])
    if seeded not in (0, workers):
        lacking = [name for name, has in _by_worker(strategy, mine).items() if not has]
        more = ", ..." if len(lacking) > _MOST_NAMED else ""
        raise InputError(
            f"A seed is set on {seeded} of {workers} workers, and not on {', '.join(lacking[:_MOST_NAMED])}{more}. Set "
            "the same seed on every worker before creating the strategy, or on none."
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


def _first_rows(adapter) -> object:
    """A batch of the first rows of the arrays: enough to compare workers, which shuffle alike."""
    rows = training.batch_size_of(adapter)
    return tree.map_structure(lambda array: tf.convert_to_tensor(array[:rows]), training.arrays_of(adapter))


def _shuffle_each_epoch(adapter, seed: int) -> tf.data.Dataset:
    """The adapter's batches, in a new order in each epoch."""
    rows = training.rows_of(adapter)
    inputs = as_sliceable(training.arrays_of(adapter))

    @tf.autograph.experimental.do_not_convert
    def batch_of(places, inputs):
        def part(value):
            if (found := sparse_rows(value, places)) is not None:
                return found
            if isinstance(value, (list, tuple, dict)):
                return None
            return tf.gather(value, places) if tf.is_tensor(value) else value

        return tree.traverse(part, inputs)

    seeds = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).take(1)
    orders = seeds.map(lambda seed: tf.random.experimental.stateless_shuffle(tf.range(rows), [seed, 0]))
    batches = orders.flat_map(tf.data.Dataset.from_tensor_slices).batch(training.batch_size_of(adapter))
    with_inputs = tf.data.Dataset.zip((batches, tf.data.Dataset.from_tensors(inputs).repeat()))
    return with_inputs.map(batch_of, num_parallel_calls=tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
