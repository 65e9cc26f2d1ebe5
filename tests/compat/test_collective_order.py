"""Packs of gradients run before the collectives that they do not need, in one order on all devices."""

import fake_nccl
import gpu_way
import tensorflow as tf
import tracer

import tfgpu
from tfgpu.core import collectives, replication

DEVICES = ["CPU:1", "CPU:2", "CPU:3"]


def order_of(step, **options):
    """What a step returns on the first replica, and the sizes of its collectives in the order in which they run."""
    with gpu_way.gpu_way(), fake_nccl.fake_nccl():
        strategy = tfgpu.strategy("mirrored", DEVICES, **options)
        run = tf.function(lambda: strategy.run(step), autograph=False).get_concrete_function()
        found = [strategy.experimental_local_results(each)[0].numpy().tolist() for each in run()]
    facts = tracer.facts_of(run)
    assert facts.has_one_order
    return found, [[each.bytes // 4 for each in run_on] for run_on in facts.collectives.values()]


def summed(size, *needed):
    """A collective of a size that needs others; the sum of ones, and of what the others have first."""
    total = tf.ones([size]) + sum(each[0] for each in needed)
    return collectives.all_reduce([total])[0]


def test_a_pack_runs_after_the_last_collective_that_it_needs():
    def step():
        first = summed(1)
        second = summed(2, first)
        late = summed(3, second)
        with collectives.as_packs():
            early_pack = summed(10, first)
            pack = summed(11, second)
        after = summed(4, pack)
        return late, early_pack, pack, after

    found, orders = order_of(step)
    assert orders == [[1, 10, 2, 11, 3, 4]] * 3
    assert [each[0] for each in found] == [39, 12, 39, 120]  # first = 3, second = 12


def test_packs_stay_in_the_order_in_which_they_were_made():
    def step():
        first = summed(1)
        second = summed(2, first)
        with collectives.as_packs():
            return summed(10, second), summed(11), summed(12, first)

    assert order_of(step)[1] == [[1, 2, 10, 11, 12]] * 3


def test_a_pack_that_needs_nothing_runs_first():
    def step():
        summed(1)
        with collectives.as_packs():
            return [summed(10)]

    assert order_of(step)[1] == [[10, 1]] * 3


def test_all_devices_wait_for_what_one_of_them_needs():
    """Where the replicas' graphs differ, they still run one order."""

    def step():
        first = summed(1)
        second = summed(2)
        needed = [first, second][: replication.replica_number(replication.replica_context())]
        with collectives.as_packs():
            return [summed(10, *needed)]

    assert order_of(step)[1] == [[1, 2, 10]] * 3


def test_packs_keep_their_places_in_a_loop_of_steps():
    """A loop's body is a function of its own; what the calls around it have comes before or after."""

    def step():
        first = summed(1)
        late = summed(2, first)
        with collectives.as_packs():
            return late, summed(10, first)

    with gpu_way.gpu_way(), fake_nccl.fake_nccl():
        strategy = tfgpu.strategy("mirrored", DEVICES)

        def steps():
            def body(number, total):
                late, pack = (strategy.experimental_local_results(each)[0] for each in strategy.run(step))
                return number + 1, total + late[0] + pack[0]

            return tf.while_loop(lambda number, _: number < 2, body, (0, 0.0))[1]

        run = tf.function(steps, autograph=False).get_concrete_function()
        assert run() == 2 * (12 + 12)
    facts = tracer.facts_of(run)
    assert facts.has_one_order
    assert [[each.bytes // 4 for each in run_on] for run_on in facts.collectives.values()] == [[1, 10, 2]] * 3
