"""What NCCL refuses is refused; what it takes passes, with the same sum."""

import contextlib

import fake_nccl
import pytest
import run_order
import tensorflow as tf
from fake_nccl import NcclError
from flat_graph import Expansion, Node
from gpu_way import gpu_way
from step_facts import Collective, StepFacts

import tfgpu
from tfgpu.compat import distribute
from tfgpu.core import replication
from tfgpu.core.replication import replica_context


def summed(dtype, value=2.0, devices=("CPU:1", "CPU:2")):
    """The sum over replicas by TensorFlow's all-reduce, as on GPUs; the package's own sends no such dtypes."""
    strategy = tfgpu.strategy("mirrored", devices=devices)  # whose collectives have keys of their own

    @tf.function
    def step():
        def sum_of_replicas():
            return tf.distribute.get_replica_context().all_reduce("sum", tf.cast(tf.fill([3], value), dtype))

        return strategy.run(sum_of_replicas)

    return strategy.experimental_local_results(step())[0].numpy().tolist()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int64"])  # int32 meets on one device
def test_dtypes_of_nccl_are_summed(dtype):
    with gpu_way(), fake_nccl.fake_nccl() as nccl:
        assert summed(dtype) == [4, 4, 4]
    assert [asked[1:] for (asked,) in nccl.calls.values()] == [("all-reduce", dtype, "(3,)", "nccl")] * 2


@pytest.mark.parametrize("dtype", ["bfloat16", "uint8"])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(NcclError, match=f"all-reduce of {dtype}.*NCCL takes no {dtype}"):
        with gpu_way(), fake_nccl.fake_nccl():
            summed(dtype)


def test_nothing_is_left_of_the_layer():
    with gpu_way():
        assert summed("bfloat16") == [4, 4, 4]


def test_a_group_of_one_needs_no_nccl():
    with gpu_way(), fake_nccl.fake_nccl() as nccl:
        assert summed("bfloat16", devices=["CPU:1"]) == [2, 2, 2]
    assert not nccl.calls


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("all-to-all", "float32", "nccl", 2), "loses the others' parts"),
        (("all-to-all", "float32", "nccl", 1), None),
        (("all-to-all", "float32", "auto", 2), None),
        (("permute", "float32", "nccl"), "no permutation"),
        (("all-reduce", "int32", "auto", 2), "on the CPU"),
        (("all-reduce", "int64", "auto", 2), None),
        (("reduce-scatter", "float32", "auto", 2), "NCCL alone"),
        (("reduce-scatter", "float32", "nccl", 2), None),
        (("all-gather", "bool", "nccl"), "takes no bool"),
    ],
)
def test_what_fails_between_gpus(asked, why):
    found = fake_nccl.refusal(*asked)
    assert found is None if why is None else why in found


def test_a_step_between_machines_that_does_not_ask_for_nccl_is_named():
    reduce = Collective("all-reduce", "float32", "auto", 8, 2, 1, "GPU:0")
    facts = StepFacts(collectives={"GPU:0": [reduce], "CPU:0": [reduce]})
    assert fake_nccl.refusals(facts, machines=2) == ["all-reduce float32: the hint 'auto' means gRPC, not NCCL"]


def test_a_device_that_waits_for_one_without_the_collective_is_named():
    reduce = Collective("all-reduce", "float32", "nccl", 8, 2, 1, "GPU:0")
    facts = StepFacts(collectives={"GPU:0": [reduce]})
    assert facts.has_one_order and fake_nccl.refusals(facts, machines=2) == []
    assert fake_nccl.refusals(facts) == ["a device waits for one that does not take part"]
    with pytest.raises(NcclError, match="Group 1 has 2 devices here, but 1 were asked"):
        fake_nccl.Nccl({"GPU:0": [(1, "a")]}, sizes={1: 2}).check_order()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_reduce_scatter_is_seen(dtype):
    def step():
        return distribute.reduce_scatter(tf.ones([2, 8], dtype), replication.replica_number(replica_context()), None)

    refused = pytest.raises(NcclError, match=f"reduce-scatter of {dtype}.*takes no {dtype}")
    with contextlib.nullcontext() if dtype in fake_nccl.DTYPES else refused:
        with gpu_way(), fake_nccl.fake_nccl() as nccl:
            strategy = tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"])
            tf.function(lambda: strategy.run(step)).get_concrete_function()
        assert [asked[1:] for (asked,) in nccl.calls.values()] == [("reduce-scatter", dtype, "(2, 8)", "nccl")] * 2


def collective(*conditions, waits=()):
    waits = [Expansion(list(waits))]
    return Node("", "CollectiveReduceV2", {}, "CPU:1", inputs=[], outputs=[], conditions=conditions, waits=waits)


def test_collectives_of_two_conditions_need_an_order_and_those_of_two_branches_none():
    then, other = collective("step/cond/then"), collective("step/cond/else")
    assert run_order.in_order([then, other])[1]
    assert run_order.in_order([then, collective("step/cond_1/then", waits=[then])])[1]
    assert not run_order.in_order([then, collective("step/cond_1/then")])[1]
    assert not run_order.in_order([then, collective("step/cond/then", "step/cond/then/cond/then")])[1]
    assert not run_order.in_order([then, collective()])[1]


def test_two_orders_are_refused():
    a, b, c = (1, "a"), (1, "b"), (2, "c")  # the group comes first
    with pytest.raises(NcclError, match="Collective 0"):
        fake_nccl.Nccl({"GPU:0": [a, b], "GPU:1": [b, a]}).check_order()
    with pytest.raises(NcclError, match="GPU:0 has 2 collectives, but GPU:1 1"):
        fake_nccl.Nccl({"GPU:0": [a, b], "GPU:1": [a]}).check_order()
    with pytest.raises(NcclError, match="Collective 0 is .* on GPU:1, but .* on GPU:2"):
        fake_nccl.Nccl({"GPU:0": [], "GPU:1": [a, c], "GPU:2": [c, a]}).check_order()
    fake_nccl.Nccl({"GPU:0": [a], "GPU:1": [a], "GPU:2": [c], "GPU:3": [c]}).check_order()
    fake_nccl.Nccl().check_order()


@pytest.mark.parametrize(
    ("ran", "is_one"),
    [
        ([[1, 2], [1, 2]], True),
        ([[1, 1, 1], [1, 1]], False),
        ([[1], [1], [2], [2, 2]], False),
        ([[1], [1], [2, 2], [2, 2]], True),
        ([[1, 2], [2, 1]], False),
        ([[1, 2], [1]], False),  # the second waits for nobody, the first for ever
    ],
)
def test_gpus_of_one_group_run_one_order(ran, is_one):
    facts = StepFacts(
        collectives={
            f"GPU:{at}": [Collective("all-reduce", "float32", "nccl", 8, 2, group, f"GPU:{at}") for group in groups]
            for at, groups in enumerate(ran)
        }
    )
    assert facts.has_one_order is is_one
