"""What the planner predicts and what is there: variables and slots to the byte, activations beside a process's peak."""

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.compat import versions
from tfgpu.errors import InputError
from tfgpu.parallel import Layout, Mesh, apply, memory_by_device, plan, predict
from tfgpu.parallel.planning import footprint, traced
from tfgpu.parallel.planning.workload import Transformer

MODELS = {
    "mlp": dict(name="mlp", input_shape=(8,), classes=4, options=dict(widths=(32, 16))),
    "cnn": dict(name="cnn", input_shape=(8, 8, 1), classes=4, options=dict(filters=(4, 8))),
    "transformer": dict(
        name="transformer", input_shape=(16,), classes=20, options=dict(width=16, heads=2, depth=2, dropout=0.1)
    ),
}
OPTIMIZERS = {
    "sgd": keras.optimizers.SGD,
    "momentum": lambda: keras.optimizers.SGD(momentum=0.9),
    "rmsprop": keras.optimizers.RMSprop,
    "adagrad": keras.optimizers.Adagrad,
    "lion": keras.optimizers.Lion,
    "adam": keras.optimizers.Adam,
    "adamw": keras.optimizers.AdamW,
    "adamax": keras.optimizers.Adamax,
    "adadelta": keras.optimizers.Adadelta,
    "nadam": keras.optimizers.Nadam,
    "ftrl": keras.optimizers.Ftrl,
    "lamb": keras.optimizers.Lamb,
}


def build(which):
    return tfgpu.models.build(**MODELS[which])


def size_of(variables) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def slots(optimizer) -> list:
    """All that grows with the model: without the counter, the learning rate, and Nadam's product of momenta."""
    return [v for v in optimizer.variables if len(v.shape)]


def memory(model, layout, batch, optimizer="sgd"):
    return predict(model, layout, batch=batch, optimizer=optimizer).memory


@pytest.mark.sample("mlp-float32", "cnn-mixed_float16")
@pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
@pytest.mark.parametrize("which", MODELS)
def test_parameters_and_slots_to_the_byte(which, policy):
    with tfgpu.precision.use(policy):
        model = build(which)
    optimizer = keras.optimizers.AdamW(gradient_accumulation_steps=2)
    optimizer.build(model.trainable_variables)
    found = memory(model, Layout(accumulate=2), 8, "adamw")
    assert found.parameters == size_of(model.variables)
    assert found.slots == size_of(slots(optimizer))
    assert found.gradients == size_of(model.trainable_variables)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_what_each_optimizer_keeps(name):
    assert set(OPTIMIZERS) == set(footprint.SLOTS)
    model, optimizer = build("mlp"), OPTIMIZERS[name]()
    optimizer.build(model.trainable_variables)
    assert memory(model, Layout(), 8, name).slots == size_of(slots(optimizer))


def test_averages_are_one_more_number_a_parameter():
    model, optimizer = build("mlp"), keras.optimizers.AdamW(use_ema=True, clipnorm=1.0)
    optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    optimizer.build(model.trainable_variables)
    assert memory(model, Layout(), 8, 3).slots == size_of(slots(optimizer.inner_optimizer))


@pytest.mark.slow
def test_each_stages_variables_and_slots_lie_on_its_device():
    work = traced.workload(build("transformer"))
    stages = work.stages(4)
    cuts = [stage.blocks[0].name for stage in stages[1:]]
    model = tfgpu.parallel.pipeline(build("transformer"), 4, 4, cuts=cuts)
    with model.distribute_strategy.scope():
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    measured = dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    for variables, found in zip((model.variables, slots(optimizer)), measured, strict=True):
        for variable in variables:
            (copy,) = variable.value.values
            found[int(copy.device.rpartition(":")[2])] += size_of([variable])
    assert list(measured[0].values()) == [4 * stage.sum.parameters(1) for stage in stages]
    assert list(measured[1].values()) == [8 * stage.sum.trainable(1) for stage in stages]
    most = memory(work, Layout(pipeline=4, microbatches=4), 8, "adam")
    assert (most.parameters, most.slots) == (measured[0][most.stage], measured[1][most.stage])


def spread(which, sizes, zero=0):
    """A model of which layers lie in parts, with its optimizer, ready for a step."""
    model = apply(build(which), Mesh(**sizes), zero=zero)
    with model.distribute_strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.AdamW(), loss, jit_compile=False)
        model.optimizer.build(model.trainable_variables)
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("which", "sizes", "zero"),
    [
        ("mlp", {"tensor": 2}, 0),
        ("mlp", {"tensor": 4}, 0),
        ("mlp", {"data": 2, "tensor": 2}, 1),
        ("cnn", {"tensor": 2}, 0),
        ("cnn", {"data": 2, "tensor": 2}, 0),
        ("transformer", {"tensor": 2}, 0),
        ("transformer", {"data": 2, "tensor": 2}, 1),
    ],
)
def test_layers_in_parts_to_the_byte(which, sizes, zero):
    found = memory(build(which), Layout(**sizes, zero=zero), 8, "adamw")
    held = memory_by_device(spread(which, sizes, zero)).values()
    assert len(held) == sizes["tensor"] * sizes.get("data", 1)
    assert found.parameters == max(each["weights"] for each in held)
    counters = 8 + 4  # the step, and the learning rate
    assert found.slots + counters == max(each["optimizer"] + each["pieces"] for each in held)


def handed_over(model, rows: int) -> dict[tuple[str, str], int]:
    """Bytes that a step hands from device to device, each tensor once to each; scalars are left out."""
    strategy, found, seen = model.distribute_strategy, {}, set()
    x, y = ((rows, *tensor.shape[1:]) for tensor in (model.inputs[0], model.outputs[0]))

    @tf.function
    def step(x, y):
        return strategy.run(model.train_step, args=((x, y),))

    made = step.get_concrete_function(np.zeros(x, model.inputs[0].dtype), np.zeros(y[:-1], "int32"))
    for operation in made.graph.get_operations():
        for tensor in operation.inputs:
            way = tensor.op.device[-5:], operation.device[-5:]
            is_kept = tensor.dtype == tf.resource or tensor.shape.rank == 0 or (tensor.ref(), way) in seen
            if all(way) and way[0] != way[1] and not is_kept:
                seen.add((tensor.ref(), way))
                found[way] = found.get(way, 0) + tensor.shape.num_elements() * tensor.dtype.size
    return found


@pytest.mark.sample("mlp-4-0")
@pytest.mark.parametrize(("which", "tensor", "tolerance"), [("mlp", 2, 0), ("mlp", 4, 0), ("transformer", 2, 0.06)])
def test_what_layers_in_parts_hand_over(which, tensor, tolerance):
    """Of a transformer the loss's few numbers a row come on top, and the update of the embedding's rows."""
    predicted = predict(build(which), Layout(tensor=tensor), batch=8).sent.tensor
    found = handed_over(spread(which, {"tensor": tensor}), 8)
    sent = sum(size for (source, _), size in found.items() if source == "CPU:0")
    came = sum(size for (_, goal), size in found.items() if goal == "CPU:0")
    assert {source for source, goal in found if goal != "CPU:0"} == {"CPU:0"}
    assert predicted * (1 - 1e-9) <= sent <= predicted * (1 + tolerance + 1e-9)
    assert came <= 1.2 * sent


@pytest.mark.sample(1)
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16", "bfloat16"])
def test_sizes_say_what_the_graph_says(policy, dropout):
    """The formulas of `Transformer`, which runs nowhere, beside the traced step of one that is small."""
    sizes = Transformer(layers=2, hidden=32, heads=4, sequence=24, vocabulary=50, dropout=dropout > 0)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        options = dict(width=32, depth=2, heads=4, dropout=dropout, attention_dropout=dropout)
        model = tfgpu.models.transformer((24,), 50, **options)
    finally:
        keras.config.set_dtype_policy(before)
    ours, theirs = sizes.workload(policy), traced.workload(model)
    indices = 4 * 24  # of positions: with the repairs, embeddings keep them as int64
    kept = sum(b.kept_split + b.kept_whole for b in ours.blocks), sum(b.kept_whole for b in theirs.blocks)
    # TensorFlow 2.17 keeps one tensor more for the gradient of each GELU.
    gelu = 2 * 24 * 128 * 4 if versions.is_at_most("tensorflow", "2.17") else 0
    assert kept[0] <= kept[1] <= kept[0] + indices + gelu
    assert sum(b.split + b.whole for b in ours.blocks) == sum(b.split + b.whole for b in theirs.blocks)
    assert ours.outputs == theirs.outputs
    assert ours.flops <= theirs.flops <= 1.2 * ours.flops  # the graph has normalizations and such besides
    casts = sum(block.casts for block in ours.blocks), sum(block.casts for block in theirs.blocks)
    assert casts[0] == pytest.approx(casts[1], rel=0.01, abs=24 * 24 * 10)  # masks of positions are kept once


def test_what_is_kept_by_hand():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(10, "tanh", name="first")(inputs)
    x = keras.layers.Reshape((2, 5), name="view")(x)
    x = keras.layers.Dense(3, name="second")(x)
    found = traced.workload(keras.Model(inputs, x))
    kept = {block.name: block.kept_whole for block in found.blocks}
    # The first kernel's gradient needs the inputs, tanh's and the second kernel's its result; views take nothing.
    assert kept == {"first": 4 * (6 + 10), "view": 0, "second": 0}
    assert [block.takes for block in found.blocks] == [24, 40, 40]
    assert found.blocks[2].flops == 2 * 2 * 5 * 3 + 2 * 3 and found.most_stages == 3


def test_operations_of_products_by_hand():
    """Two for each number of a kernel and each place where it is used; the rest is one a number."""
    inputs = keras.Input((4, 4, 6))
    cases = {
        keras.layers.Conv2D(5, 3, use_bias=False): 2 * 2 * 2 * (3 * 3 * 6 * 5),
        keras.layers.DepthwiseConv2D(3, use_bias=False): 2 * 2 * 2 * (3 * 3 * 6),
        keras.layers.EinsumDense("...x,xy->...y", output_shape=5): 2 * 4 * 4 * (6 * 5),
        keras.layers.EinsumDense("...x,xy->...y", output_shape=5): 2 * 4 * 4 * (6 * 5),
    }
    for layer, expected in cases.items():
        found = traced.workload(keras.Model(inputs, layer(inputs))).flops
        assert expected <= found <= expected + 2 * 4 * 4 * 6, layer.name


def test_a_model_is_cut_where_one_tensor_goes_on():
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, name="first")(inputs)
    y = keras.layers.Dense(4, name="branch")(x)
    x = keras.layers.Add(name="add")([x, y])
    shared = keras.layers.Dense(4, name="shared")
    x = keras.layers.Activation("relu", name="relu")(shared(shared(x)))
    found = traced.workload(keras.Model(inputs, keras.layers.Dense(2, name="last")(x)))
    assert [block.name for block in found.blocks] == ["first", "branch", "shared", "relu", "last"]


@pytest.mark.slow
def test_layers_that_mix_rows_are_not_cut_into_stages():
    found = plan(build("cnn"), 4, batch=16, memory="1GB")
    assert {one.layout.pipeline for one in found} == {1}
    staged = plan(build("transformer"), 4, batch=16, memory="1GB")
    assert {one.layout.pipeline for one in staged} == {1, 2, 4} and {one.layout.tensor for one in staged} == {1, 2, 4}
    assert not any(one.layout.recompute and one.layout.tensor > 1 for one in staged)


def test_what_is_one_pair_is_in_one_stage():
    work = traced.workload(build("mlp"))
    assert [block.name for block in work.blocks] == ["dense1", "activation1", "dense2", "activation2", "logits"]
    cut = work.along(2)
    assert [block.name for block in cut.blocks] == ["dense1", "activation2", "logits"]
    assert [block.split for block in cut.blocks] == [8 * 32 + 32 + 32 * 16, 0, 0]
    assert [block.whole for block in cut.blocks] == [16, 0, 16 * 4 + 4]
    assert [block.flops_whole for block in cut.blocks] == [0, 16, 2 * 16 * 4 + 4]
    kept = [(block.kept_split, block.kept_whole) for block in cut.blocks]
    assert kept == [(4 * 32, 4 * 8), (0, 4 * 16), (0, 0)]  # what relu makes in parts; the input; what relu makes
    assert cut.parameters == work.parameters
    assert work.along(3) is None
    with pytest.raises(InputError, match="for which `parallel.tensor` can split a layer"):
        predict(build("mlp"), Layout(tensor=3), batch=6)


def test_a_loop_is_warned_of(caplog):
    inputs = keras.Input((6, 8))
    with caplog.at_level(logging.WARNING):
        traced.workload(keras.Model(inputs, keras.layers.LSTM(4, name="lstm")(inputs)))
    assert "the loop of 'lstm'" in caplog.text


def test_a_model_without_a_graph_or_sizes_is_refused():
    inputs = keras.Input((None, 8))
    with pytest.raises(InputError, match="unknown size"):
        plan(keras.Model(inputs, keras.layers.Dense(4)(inputs)), 2)
    with pytest.raises(InputError, match="a model has its own"):
        plan(build("mlp"), 2, precision="float32")


@pytest.mark.slow
def test_planning_changes_nothing():
    model = build("transformer")
    before = [np.array(weight) for weight in model.get_weights()]
    plan(model, 4)
    assert all(np.array_equal(a, b) for a, b in zip(before, model.get_weights(), strict=True))
    assert not model.losses


@pytest.mark.slow
def test_the_command_builds_a_model_by_its_name(tmp_path):
    words = "plan --model mlp --model-option widths=[32,16] --input-shape 8 --classes 4 --devices 2 --precision float32"
    done = subprocess.run(
        [sys.executable, "-m", "tfgpu", *words.split(), "--json-to", tmp_path / "all.json"],
        env={**os.environ, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert "mlp: 884 parameters, batches of 16, float32, adamw" in done.stdout
    written = json.loads((tmp_path / "all.json").read_text())
    expected = plan(build("mlp"), 2)
    assert [one["memory"]["peak"] for one in written] == [one.memory.peak for one in expected]


# Activations beside a process's peak


def peak(model: dict, batch: int, *, optimizer="sgd", policy="float32", pipeline=None) -> float:
    """What a few steps take of memory, in a process of its own."""
    asked = dict(model=model, batch=batch, optimizer=optimizer, policy=policy, pipeline=pipeline)
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_MMAP_MAX_": "1000000"}
    environment["TF_ENABLE_ONEDNN_OPTS"] = "0"  # Where the CPU has AVX-512, oneDNN's allocator keeps what was freed.
    script = Path(__file__).with_name("peak.py")
    done = subprocess.run(
        [sys.executable, script, json.dumps(asked)], env=environment, capture_output=True, text=True, timeout=550
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])["bytes"]


needs_clear_refs = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc/self/clear_refs"
)
LANGUAGE = dict(name="transformer", input_shape=[256], classes=64, options=dict(width=128, depth=4, heads=4))
PICTURES = dict(name="cnn", input_shape=[64, 64, 3], classes=10)


@pytest.mark.processes
@pytest.mark.slow
@needs_clear_refs
@pytest.mark.parametrize(
    ("model", "few", "many", "tolerance"), [(LANGUAGE, 8, 24, 0.1), (PICTURES, 32, 96, 0.2)], ids=["transformer", "cnn"]
)
def test_activations_grow_with_the_rows_as_predicted(model, few, many, tolerance):
    built = tfgpu.models.build(**model)
    expected = memory(built, Layout(), many).peak - memory(built, Layout(), few).peak
    assert peak(model, many) - peak(model, few) == pytest.approx(expected, rel=tolerance)


@pytest.mark.processes
@pytest.mark.slow
@needs_clear_refs
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "gpipe-kept"])
def test_all_stages_of_a_pipeline_take_what_is_predicted(schedule):
    work = traced.workload(tfgpu.models.build(**LANGUAGE))
    layout, stages = Layout(pipeline=2, microbatches=4, schedule=schedule), work.stages(2)
    how = dict(schedule="gpipe", recompute=schedule == "gpipe") if schedule != "1f1b" else {}
    how |= dict(stages=2, microbatches=4, devices=2, cuts=[stage.blocks[0].name for stage in stages[1:]])

    def expected(batch):
        how = dict(rows=batch // layout.parts, slots=0)
        found = [footprint.of_stage(work, stage, layout, at, **how) for at, stage in enumerate(stages)]
        return sum(one.peak - one.parameters for one in found)

    grown = peak(LANGUAGE, 64, pipeline=how) - peak(LANGUAGE, 24, pipeline=how)
    assert grown == pytest.approx(expected(64) - expected(24), rel=0.25)


@pytest.mark.processes
@pytest.mark.slow
@needs_clear_refs
def test_gradients_take_what_is_predicted():
    model = dict(name="mlp", input_shape=[1024], classes=10, options=dict(widths=[2048] * 6))
    found = memory(tfgpu.models.build(**model), Layout(), 8, "adam")
    taken = peak(model, 8, optimizer="adam")  # slots lie there from the first step on
    assert taken == pytest.approx(found.peak - found.parameters - found.slots, rel=0.3)
