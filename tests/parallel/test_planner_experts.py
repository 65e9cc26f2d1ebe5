"""The planner along `expert`: numbers worked out by hand, and what `Mesh(expert=n)` holds and sends."""

import keras
import pytest

import tfgpu
from tfgpu.cli import _execute
from tfgpu.errors import InputError
from tfgpu.parallel import Mesh, apply
from tfgpu.parallel.planning import footprint, layouts, planner, pretrained, traced
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Block, Workload

# 10 parameters, 8 of them of 4 experts; 12 bytes an example are kept, and 6 for each pass, 4 of them of experts.
BLOCK = Block("block", split=8, whole=2, experts=8, kept_whole=12, casts=6, casts_experts=4, spreads=5, exchanges=32)
MIXTURE = Workload("mixture", (BLOCK,) * 2, outputs=4, experts=4)


def memory(layout, batch=16):
    return footprint.memory(MIXTURE, MIXTURE.stages(1), layout, batch=batch, slots=2)


def sent(layout, batch=16):
    return footprint.sent(MIXTURE, MIXTURE.stages(1), layout, batch=batch)


def test_memory_by_hand():
    whole, spread = memory(Layout(data=4)), memory(Layout(data=2, expert=2))
    assert (whole.parameters, whole.slots, whole.gradients) == (80, 160, 80)
    assert (spread.parameters, spread.slots, spread.gradients) == (48, 96, 48)  # 2 x (2 + 8 / 2) x 4
    assert whole.activations - spread.activations == 2 * 4 / 2  # two blocks' copies of experts


def test_bytes_sent_by_hand():
    assert (sent(Layout(data=4)).data, sent(Layout(data=4)).expert) == (2 * 3 / 4 * 80, 0)
    both = sent(Layout(data=2, expert=2))
    assert both.data == 2 * (3 / 4 * 4 * 4 + 1 / 2 * 4 * 16 / 2)  # 4 numbers of all devices, 16 of experts over groups
    assert both.expert == 4 * 2 * (1 * 10 + 1 / 2 * 64)  # 4 rows, two passes
    assert both.total == both.data + both.expert
    assert sent(Layout(expert=4)).data == 2 * 3 / 4 * 4 * 4  # no two devices have the same experts


def test_the_axis_divides_the_experts_and_goes_with_data_alone():
    found = {each.expert for each in layouts.candidates(12, 12, stages={1: 1}, loss="batch", experts=8)}
    assert found == {1, 2, 4}
    assert all(each.devices == 12 for each in layouts.candidates(12, 12, stages={1: 1}, loss="batch", experts=8))
    for other in ({"tensor": 2}, {"pipeline": 2}, {"zero": 1}, {"recompute": True}):
        with pytest.raises(InputError, match="`expert` goes with `data` alone"):
            Layout(expert=2, **other)
    with pytest.raises(InputError, match="divides 4, its number of experts"):
        planner.predict(MIXTURE, Layout(expert=3), batch=3)
    with pytest.raises(InputError, match="divides 1, its number of experts"):
        planner.predict(pretrained.known("llama3-8b").workload(128), Layout(expert=2), batch=8)


@pytest.mark.parametrize(("name", "count"), [("mixtral-8x7b", 46_702_792_704), ("qwen3-30b-a3b", 30_532_122_624)])
def test_a_mixture_has_the_published_number_of_weights(name, count):
    decoder = pretrained.known(name)
    assert decoder.parameters == decoder.workload(128).parameters == count


def test_experts_let_a_mixture_fit():
    work = pretrained.known("mixtral-8x7b").workload(512, lora=8, weights="int8")
    alone = planner.predict(work, Layout(data=8), batch=8, device="a100-80")
    spread = planner.predict(work, Layout(expert=8), batch=8, device="a100-80")
    assert alone.memory.parameters > 4 * spread.memory.parameters
    assert spread.memory.peak < alone.memory.peak


def test_the_command_shows_the_axis(capsys):
    asked = ["plan", "--pretrained", "mixtral-8x7b", "--sequence", "512", "--lora", "8", "--weights", "int8"]
    assert _execute([*asked, "--devices", "8", "--limit", "90"]) == 0
    assert "ex-" in capsys.readouterr().out


def mixture():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    x = keras.layers.Dense(8)(inputs)
    x = x + tfgpu.layers.MixtureOfExperts(4, 12, top_k=2, use_bias=False)(x)
    return keras.Model(inputs, keras.layers.Dense(3)(x))


@pytest.mark.slow
def test_a_model_of_keras_is_planned_as_it_is_spread():
    work = traced.workload(mixture())
    found = planner.predict(work, Layout(expert=2), batch=8, optimizer="adam")
    model = apply(mixture(), Mesh(expert=2, devices=["CPU:0", "CPU:1"]))
    sizes = tfgpu.parallel.memory_by_device(model)
    assert {held["weights"] for held in sizes.values()} == {found.memory.parameters}
    assert work.experts == 4
    block = next(each for each in work.blocks if each.experts)
    assert block.experts == 4 * 2 * 8 * 12
    assert (block.spreads, block.exchanges) == (0, 2 * 2 * 6 * 8 * 4)  # each token twice, there and back
