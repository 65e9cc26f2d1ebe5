"""Values are summed on the devices where they are, or on the replicas' own where those cannot be a group."""

import gpu_way
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.compat import device_groups
from tfgpu.core import collectives, replication
from tfgpu.core.row_mixing import row_sums
from tfgpu.parallel import device_placement

OWN = ["CPU:0", "CPU:1"]


def summed(held, dtype=tf.float32, **options):
    """The sums of 1 and 2 in values on some devices, and for each replica: where they end, where collectives run."""
    with gpu_way.gpu_way():
        strategy, ends = tfgpu.strategy("mirrored", OWN, **options), [[] for _ in held]
        device_placement.mark_placed(strategy)

        def step():
            number = replication.replica_number(replication.replica_context())
            values = []
            for at, devices in enumerate(held):
                with tf.device(devices[number]):
                    values.append(tf.fill([4 + at], tf.cast(1 + number, dtype)))
            with device_placement.colocate_with_inputs():
                sums = collectives.sum_gradients(values)
            for end, total in zip(ends, sums, strict=True):
                end.append(total.device[-5:])
            return sums

        run = tf.function(lambda: strategy.run(step), autograph=False).get_concrete_function()
        sums = [[each.numpy().tolist() for each in strategy.experimental_local_results(value)] for value in run()]
    made = [each for each in run.graph.get_operations() if each.type == "CollectiveReduceV2"]
    return sums, ends, [(each.device[-5:], each.inputs[0].shape.num_elements()) for each in made]


@pytest.mark.sample("bfloat16")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_of_one_group_share_a_collective_there(dtype):
    held = [OWN, ["CPU:2", "CPU:3"], ["CPU:2", "CPU:3"], OWN]
    sums, ends, made = summed(held, tf.as_dtype(dtype))
    assert sums == [[[3] * (4 + at)] * 2 for at in range(4)]
    assert ends == held
    assert sorted(made) == [("CPU:0", 11), ("CPU:1", 11), ("CPU:2", 11), ("CPU:3", 11)]


@pytest.mark.sample("overlapping")
@pytest.mark.parametrize(
    "devices", [["CPU:1", "CPU:0"], ["CPU:2", "CPU:2"], ["CPU:0", "CPU:2"]], ids=["crossed", "shared", "overlapping"]
)
def test_devices_that_cannot_be_a_group_send_to_the_replicas_own(devices):
    """Two groups with a common device might run their collectives in two orders."""
    sums, ends, made = summed([devices, OWN])
    assert sums == [[[3] * 4] * 2, [[3] * 5] * 2]
    assert ends == [devices, OWN]
    assert sorted(made) == [("CPU:0", 9), ("CPU:1", 9)]


def test_packs_of_a_group_have_the_strategys_size():
    _, _, made = summed([["CPU:2", "CPU:3"]] * 4, bytes_per_pack=20)
    assert made == [(device, size) for device in ("CPU:2", "CPU:3") for size in (7, 6, 5 + 4)]


def test_replicas_of_one_device_each_have_no_groups():
    assert device_groups.of(tfgpu.strategy("mirrored", OWN)) is None
    device_groups.use(reduced := tfgpu.strategy("mirrored", OWN, all_reduce="reduction_to_one_device"))
    assert device_groups.of(reduced) is None


def test_moments_and_slices_meet_there_and_packs_come_before_what_they_do_not_need():
    others, rows = ["CPU:2", "CPU:3"], 1 << 17
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", OWN)
        device_placement.mark_placed(strategy)

        def step():
            number = replication.replica_number(replication.replica_context())
            with tf.device(others[number]):
                x = tf.fill([2], 1.0 + number)
                table = tf.IndexedSlices(tf.fill([rows, 2], 1.0 + number), tf.range(rows) + number, tf.constant([9, 2]))
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    (total,) = row_sums.over_replicas([x])
                gradient = tape.gradient(total, x, total)
            with device_placement.colocate_with_inputs(), collectives.as_packs():
                (dense,) = collectives.sum_gradients([x])
                (slices,) = collectives.all_reduce([table], in_groups=True)
            return total, gradient, dense, slices.values[:: rows // 2, 0], slices.indices[::rows]

        run = tf.function(lambda: strategy.run(step), autograph=False).get_concrete_function()
        found = [[part.numpy().tolist() for part in strategy.experimental_local_results(each)] for each in run()]
    assert found == [[[3, 3]] * 2, [[6, 6]] * 2, [[3, 3]] * 2, [[1, 1, 2, 2]] * 2, [[0, 1]] * 2]
    made = [each for each in run.graph.get_operations() if each.type.startswith("Collective")]
    for device in others:
        here = [each for each in made if each.device.endswith(device)]
        moments, of_gradient, pack = [each for each in here if each.type == "CollectiveReduceV2"]
        assert pack in moments.control_inputs and moments in of_gradient.control_inputs
        assert [each.type for each in here].count("CollectiveGatherV2") == 2  # the counts, and the slices
        made = [each for each in made if each not in here]
    assert made == []
