"""Adapters that were trained on KerasHub's models, in Hugging Face's PEFT: the logits are those of the Keras model."""

import importlib
import importlib.util
import os
import sys

import numpy as np
import pytest

from tfgpu.errors import InputError
from tfgpu.serving import export_adapters, load_adapters

pytestmark = [pytest.mark.slow]
SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT2 = {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GPT2 |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
DENSE = ["feedforward_intermediate_dense", "feedforward_output_dense"]
KINDS = {
    "llama": ("Llama3Backbone", "LlamaForCausalLM", SIZES | {"num_key_value_heads": 2}, None),
    "mistral": (
        "MistralBackbone",
        "MistralForCausalLM",
        SIZES | {"num_key_value_heads": 2, "sliding_window": 64},
        None,
    ),
    "qwen": ("QwenBackbone", "Qwen2ForCausalLM", SIZES | {"num_key_value_heads": 2}, ["query", "value", *DENSE]),
    "gemma": (
        "GemmaBackbone",
        "GemmaForCausalLM",
        SIZES | {"num_key_value_heads": 1, "head_dim": 8},
        ["query", "key", "value", "attention_output"],
    ),
    "gpt2": ("GPT2Backbone", "GPT2LMHeadModel", GPT2, ["query", "value", "attention_output", *DENSE]),
    "bert": ("BertBackbone", "BertModel", SIZES, ["query", "key", "attention_output", *DENSE]),
}
IDS = np.random.default_rng(0).integers(1, 96, (2, 9))


@pytest.fixture(scope="module", autouse=True)
def triton():
    """Loads it, if it is there, so that it finds its own LLVM though TensorFlow came first (tensorflow#124205)."""
    if importlib.util.find_spec("triton") is None:
        return
    before = sys.getdlopenflags()
    sys.setdlopenflags(os.RTLD_NOW | os.RTLD_DEEPBIND)
    try:
        importlib.import_module("triton")
    finally:
        sys.setdlopenflags(before)


def models(kind, folder):
    """KerasHub's model and its class, and Hugging Face's."""
    hub = pytest.importorskip("keras_hub")
    pytest.importorskip("peft")
    keras_class, their_class, settings, _ = KINDS[kind]
    transformers = importlib.import_module("transformers")
    theirs = getattr(transformers, their_class)
    model = theirs(theirs.config_class(**settings)).half().float().eval()  # Mistral's converter rounds to float16
    model.save_pretrained(folder)
    return getattr(hub.models, keras_class), model


def adapt(backbone, layers):
    backbone.enable_lora(2, target_layer_names=layers)
    draw = np.random.default_rng(1)
    for layer in backbone._flatten_layers(include_self=False):
        if getattr(layer, "lora_enabled", False):
            layer.lora_kernel_b.assign(0.1 * draw.normal(size=layer.lora_kernel_b.shape))
            if layer.bias is not None and layer.bias.trainable:
                layer.bias.assign(0.1 * draw.normal(size=layer.bias.shape))


def outputs(backbone):
    given = {"token_ids": IDS, "padding_mask": np.ones_like(IDS), "segment_ids": np.zeros_like(IDS)}
    found = backbone({name: given[name] for name in backbone.input})
    return found["sequence_output"] if isinstance(found, dict) else backbone.token_embedding(found, reverse=True)


@pytest.mark.parametrize("kind", KINDS)
def test_peft_computes_what_keras_computes(kind, tmp_path):
    keras_class, theirs = models(kind, tmp_path / "base")
    peft, torch = importlib.import_module("peft"), importlib.import_module("torch")
    backbone = keras_class.from_preset(str(tmp_path / "base"))
    adapt(backbone, KINDS[kind][3])
    folder = export_adapters(backbone, tmp_path / "adapter", format="peft", base=tmp_path / "base")

    def run(model):
        found = model(torch.tensor(IDS))
        return (found.last_hidden_state if kind == "bert" else found.logits).detach().numpy()

    plain = run(theirs)
    adapted = run(peft.PeftModel.from_pretrained(theirs, str(folder)).eval())
    np.testing.assert_allclose(adapted, np.asarray(outputs(backbone)), atol=1e-4)
    assert np.abs(adapted - plain).max() > 1e-2


def test_keras_hub_loads_the_file(tmp_path):
    keras_class, _ = models("llama", tmp_path / "base")
    first, second, third = (keras_class.from_preset(str(tmp_path / "base")) for _ in range(3))
    adapt(first, None)
    file = export_adapters(first, tmp_path / "style")
    second.enable_lora(2)
    second.load_lora_weights(str(file))
    for each in (second, load_adapters(third, file)):
        np.testing.assert_array_equal(np.asarray(outputs(each)), np.asarray(outputs(first)))
    with pytest.raises(InputError, match="is not the KerasHub model that|does not match"):
        other, _ = models("gpt2", tmp_path / "other")
        backbone = other.from_preset(str(tmp_path / "other"))
        adapt(backbone, None)
        export_adapters(backbone, tmp_path / "x", format="peft", base=tmp_path / "base")
