"""What the workers agree on: before an epoch, that all run the same blocks of steps; after a block, how long it took.

After a block they also agree whether to stop. The vote is sent with the sums of the metrics, so it costs no collective
of its own. All workers see the same result, so their next blocks have the same length, and no worker stops while
others wait for it in a collective.
"""

import zlib

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.core import collectives, replication, step_blocks, step_context
from tfgpu.core.randomness import data_order
from tfgpu.core.state import broadcast
from tfgpu.core.workers import ledger
from tfgpu.errors import InputError

_MOST_WORKERS = 4096
"""The vote counts two kinds of requests in one float32, this one's digits and those above."""


def check_same_run(strategy: tf.distribute.Strategy, length: int, *, same_data: bool) -> None:
    """Checks that all workers will run the same blocks of steps. Every worker must call it.

    If one worker has a callback that must be called after every batch, all run batch by batch.

    Args:
        strategy: a strategy of several workers.
        length: batches of this worker's dataset; negative if unknown.
        same_data: all workers have the same dataset, of which each makes whole batches or its rows of them.

    Raises:
        InputError: raised on all workers if their datasets differ in length or shuffle seed, or if some lack a callback
            that communicates with the others'.
    """
    run = step_blocks.current()
    asked = list(run.every_batch.values()) if run is not None else []
    on_all = run.on_all if run is not None else ()
    callbacks = zlib.crc32(repr(on_all).encode()) & 0xFFFFF  # whose squares can be summed without overflow
    facts = [length, callbacks, data_order.seed_mark()]
    numbers = [1, *facts, *(fact * fact for fact in facts), *map(int, asked)]
    sums = collectives.sum_over_workers(strategy, numbers).tolist()
    count, totals, squares, asking = sums[0], sums[1:4], sums[4:7], sums[7:]
    # The numbers are equal if the mean of their squares is the square of their mean.
    pairs = zip(totals, squares, strict=True)
    same_length, same_callbacks, same_seed = (total * total == count * square for total, square in pairs)
    if not same_callbacks:
        raise _different_callbacks(broadcast.texts_of_all_workers(strategy, ", ".join(on_all)))
    for meet in run.on_meeting if run is not None else ():
        meet(strategy)
    if run is not None:
        run.every_batch = {kind: bool(number) for kind, number in zip(run.every_batch, asking, strict=True)}
    if same_data and not same_length:
        raise InputError(
            "The workers have datasets of different lengths; "
            f"this one's has {length if length >= 0 else 'unknown'} batches. Give each worker the whole dataset; "
            "if each has its own data, set `experimental_distribute.auto_shard_policy` in the dataset's "
            "options to OFF."
        )
    if same_data and not same_seed:
        raise data_order.refuse_seeds(strategy)


def _different_callbacks(names: list[str]) -> InputError:
    """The error for workers with different callbacks of those that communicate: each list, and a worker that has it."""
    found = [f"worker {names.index(each)} has {each or 'none'}" for each in dict.fromkeys(names)]
    return InputError(
        "A callback that communicates with other workers must be on every worker, even if only the chief writes "
        f"files. Found: {', '.join(found)}. Give `fit` the same callbacks on each worker."
    )


def ballot(seconds: float) -> tf.Tensor:
    """This worker's vote: float32 [2].

    Args:
        seconds: how long its last block took.
    """
    run = step_blocks.current()
    is_asked = run is not None and run.stop_request is not None and run.stop_request.is_requested
    wants_to_stop = run is not None and run.wants_to_stop
    return tf.constant([seconds, is_asked + _MOST_WORKERS * wants_to_stop], tf.float32)


def share_of_ballot(ballot: tf.Tensor) -> tf.Tensor:
    """What a replica contributes to the result: the mean time, and a number above 0 if some worker wants to stop."""
    return ballot / step_context.num_replicas()


def accept(strategy: tf.distribute.Strategy, result: tf.Tensor) -> float:
    """Applies the result on every worker; returns the mean time of the last block, in seconds."""
    if not replication.spans_processes(strategy):
        return 0.0
    with ledger.waiting():
        seconds, mean = result.numpy()
    run, requests = step_blocks.current(), round(float(mean) * distribute.num_workers(strategy))
    if requests % _MOST_WORKERS and run is not None and run.stop_request is not None:
        run.stop_request.is_agreed = True
    if requests >= _MOST_WORKERS and run is not None:
        run.stops = True
    return float(seconds)
