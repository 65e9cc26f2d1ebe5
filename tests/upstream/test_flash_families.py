"""`enable_flash_attention` in KerasHub's layers, where it is installed: the same weights, no square of the length."""

import keras
import numpy as np
import pytest
import tensor_families as families
import tensorflow as tf
from test_sequence_families import MORE

import tfgpu
from benchmarks import finetune_models as models
from benchmarks.finetune_models import GROUPED, causal
from tfgpu.attention import blockwise
from tfgpu.finetuning import graph
from tfgpu.parallel import Mesh, apply, hub_attention

pytestmark = [pytest.mark.slow]
pytest.importorskip("keras_hub")
BLOCK = 4
NO_DROPOUT = {"dropout": 0.0}
PLAIN = {
    "gemma, no dropout": causal("Gemma", **GROUPED, head_dim=4, **NO_DROPOUT),
    "gpt2, no dropout": causal("GPT2", num_heads=2, max_sequence_length=11, **NO_DROPOUT),
    "gpt_neo_x, no dropout": causal("GPTNeoX", num_heads=2, max_sequence_length=11, **NO_DROPOUT),
    "gpt2": causal("GPT2", num_heads=2, max_sequence_length=11),
    "gpt_neo_x": causal("GPTNeoX", num_heads=2, max_sequence_length=11),
}
SOFT_CAPS = {"attention_logit_soft_cap": 2.0, "final_logit_soft_cap": 3.0}
WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 3}
PLAIN["gemma2, no dropout"] = causal("Gemma", **GROUPED, **WINDOW, **SOFT_CAPS, head_dim=4, **NO_DROPOUT)
BY_THEIR_OWN_CODE = (
    *("gemma, no dropout", "gemma2, no dropout", "gpt_neo_x, no dropout", "gpt_oss", "llama", "llama3", "mistral"),
    *("mistral, window", "mixtral", "phi3", "qwen, window", "qwen3", "qwen3_moe", "qwen_moe", "smollm3"),
)


@pytest.fixture(autouse=True)
def blocks(monkeypatch):
    """Three blocks of queries, of which the last is not full; the blocks that were traced."""
    found, stock = [], hub_attention._Blocks._block

    def block(self, *args):
        found.append(type(self._layer).__name__)
        return stock(self, *args)

    monkeypatch.setattr(blockwise, "BLOCK", BLOCK)
    monkeypatch.setattr(hub_attention._Blocks, "_block", block)
    monkeypatch.setattr(models, "LENGTH", 11)
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | MORE | PLAIN)
    yield found
    keras.config.disable_flash_attention()


def trained(family, spread=lambda model: model, *, flash=True, kind="full"):
    tfgpu.repair_keras()
    (keras.config.enable_flash_attention if flash else keras.config.disable_flash_attention)()
    model, data = families.made(family, kind)
    model = spread(model)
    return model, families.trained(model, data, kind)


def check(one, other):
    assert families.weights_apart(one[0], other[0]) < 1e-5
    for name, values in one[1].items():
        np.testing.assert_allclose(other[1][name], values, atol=1e-5)


@pytest.mark.parametrize("family", [*BY_THEIR_OWN_CODE, "gpt2, no dropout"])
def test_it_learns_what_it_learns_without(family, blocks, caplog):
    expected = trained(family, flash=False)
    assert not blocks
    check(expected, trained(family))
    assert bool(blocks) == (family in BY_THEIR_OWN_CODE)  # GPT-2 has Keras's layer
    assert "by its own code" not in caplog.text


def zero3(model):
    return apply(model, Mesh(data=2, devices=["CPU:0", "CPU:1"]), zero=3)


def along(**axes):
    def spread(model):
        mesh = Mesh(**axes, devices=[f"CPU:{at}" for at in range(Mesh(**axes).size)])
        return apply(model, mesh)

    return spread


SPREAD = {
    "replicas": along(data=2),
    "zero3": zero3,
    "tensor": along(tensor=2),
    "data x tensor": along(data=2, tensor=2),
    "sequence": along(sequence=2),
}
LAYOUTS = [
    *((family, "replicas") for family in ("gemma", "gemma2", "gpt2", "gpt_oss", "mixtral", "qwen_moe", "qwen3")),
    *((family, "zero3") for family in ("gemma", "gpt_oss", "gpt_neo_x", "llama3", "qwen, window")),
    *((family, "tensor") for family in ("bert", "gemma", "gemma, one key head", "gpt2", "llama", "mistral", "qwen3")),
    *((family, "data x tensor") for family in ("gemma", "llama3")),
]


@pytest.mark.parametrize(("family", "layout"), LAYOUTS, ids=map(", ".join, LAYOUTS))
def test_a_layout_learns_what_one_device_learns(family, layout, blocks):
    """With dropout; of scores it is drawn by blocks."""
    expected = trained(family)
    count = len(blocks)
    check(expected, trained(family, SPREAD[layout]))
    assert len(blocks) > count or family in ("bert", "gpt2")  # those have Keras's layer


def test_along_a_sequence_parts_stay_whole(monkeypatch):
    monkeypatch.setattr(models, "LENGTH", 10)
    check(trained("llama3", flash=False), trained("llama3", SPREAD["sequence"]))


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt_oss"])
def test_lora_and_recomputation(family, blocks):
    expected = trained(family, flash=family != "llama", kind="LoRA")
    check(expected, trained(family, lambda model: tfgpu.parallel.recompute(model, "layers"), kind="LoRA"))
    assert blocks


@pytest.mark.parametrize("family", ["llama3", "gpt_oss"])
def test_stages_learn_what_one_device_learns(family, blocks):
    expected = trained(family)
    count = len(blocks)
    whole, data = families.made(family, "full")
    batch = keras.tree.map_structure(lambda part: part[: families.BATCH], data[0])
    pipeline = Mesh(pipeline=2, devices=["CPU:0", "CPU:1"])
    model = apply(graph.flat(whole, None), pipeline, microbatches=2, batch=batch)
    check(expected, (whole, families.trained(model, data, "full")))
    assert len(blocks) > count


@pytest.mark.parametrize("family", ["gemma2, no dropout", "llama", "qwen, window"])
def test_xla_compiles_it(family, blocks, monkeypatch):
    stock = keras.Model.compile
    monkeypatch.setattr(keras.Model, "compile", lambda *args, **more: stock(*args, **{**more, "jit_compile": True}))
    expected = trained(family, flash=False)
    assert not blocks
    check(expected, trained(family))
    assert blocks


def squares(step, *specs):
    """The shapes of what a step computes that have the length on two axes, within functions too."""
    function = step.get_concrete_function(*specs).graph
    outputs = tf.nest.flatten(function.structured_outputs, expand_composites=True)
    needed, wait = set(), [each.op for each in outputs if each is not None]
    while wait:
        operation = wait.pop()
        if operation not in needed:
            needed.add(operation)
            wait += [each.op for each in operation.inputs] + list(operation.control_inputs)
    found = {(op.name, tuple(each.shape)) for op in needed for each in op.outputs if each.shape.rank is not None}
    for inner in function.as_graph_def(add_shapes=True).library.function:
        for node in inner.node_def:
            for shape in node.attr["_output_shapes"].list.shape:
                found.add((f"{inner.signature.name}/{node.name}", tuple(dim.size for dim in shape.dim)))
    return {(name, shape) for name, shape in found if sum(size in LENGTHS for size in shape) > 1}


LONG = 97
LENGTHS = (LONG, 100)  # and filled up to whole blocks


def gradients(model, given):
    @tf.function
    def step(given):
        with tf.GradientTape() as tape:
            outputs = [*tf.nest.flatten(model(given, training=True)), *model.losses]
            value = tf.add_n([tf.reduce_sum(tf.math.square(each)) for each in outputs])
        return tape.gradient(value, model.trainable_variables)

    return squares(step, {name: tf.TensorSpec([2, LONG], tf.int32) for name in given})


@pytest.mark.parametrize("family", [*BY_THEIR_OWN_CODE[3:], "gemma", "gemma2", "gemma3", "gpt2", "gpt_neo_x", "bert"])
def test_nothing_has_the_square_of_the_length(family, monkeypatch):
    monkeypatch.setattr(models, "LENGTH", LONG)
    for name, kind in (("gpt2", "GPT2"), ("gpt_neo_x", "GPTNeoX")):
        monkeypatch.setitem(families.FAMILIES, name, causal(kind, num_heads=2, max_sequence_length=LONG))
    tfgpu.repair_keras()
    found = {}
    for flash in (True, False):
        (keras.config.enable_flash_attention if flash else keras.config.disable_flash_attention)()
        backbone = families.made(family, "full")[0].backbone
        found[flash] = gradients(backbone, backbone.input)
    assert found[False] and not found[True], found[True]


def test_packed_sequences_need_no_square_either(monkeypatch):
    tfgpu.repair_keras()
    keras.config.enable_flash_attention()
    model, _ = families.made("llama", "full")
    packed = graph.flat(model, (graph.TOKENS, graph.SEGMENTS))
    keras.config.disable_flash_attention()
    assert gradients(packed, packed.input)
    keras.config.enable_flash_attention()
    assert not gradients(packed, packed.input)
    tokens = np.random.default_rng(0).integers(1, 30, (2, 11))
    given = {"token_ids": tokens, "segment_ids": np.repeat([[1] * 5 + [2] * 4 + [0] * 2], 2, 0)}
    found = packed(given)
    keras.config.disable_flash_attention()
    np.testing.assert_allclose(found, packed(given), atol=1e-6)


def test_what_cannot_is_named_once(caplog):
    for family in ("bloom", "bloom", "llama"):
        trained(family)
    named = [record.args[0] for record in caplog.records if "by its own code" in record.msg]
    assert named == ["BloomAttention"]


def test_generation_with_a_cache_is_the_same():
    tfgpu.repair_keras()
    model, _ = families.made("gemma, no dropout", "full")
    prompt = {"token_ids": np.tile(np.arange(1, 12), (2, 1)), "padding_mask": np.ones((2, 11), "int32")}
    prompt["padding_mask"][:, 9:] = 0
    found = []
    for switch in (keras.config.disable_flash_attention, keras.config.enable_flash_attention):
        switch()
        model.make_generate_function()
        model.generate_function = None
        found.append(model.generate_step({key: tf.constant(value) for key, value in prompt.items()}, [0])["token_ids"])
    np.testing.assert_array_equal(*found)
