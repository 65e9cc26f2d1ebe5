"""KerasHub's models along `sequence`, where it is installed: blocks in parts learn what they learn on one device."""

import numpy as np
import pytest
import tensor_families as families

from benchmarks import finetune_models as models
from benchmarks.finetune_models import GROUPED, WORDS, causal, hub, next_words
from benchmarks.sequence import HUB, hub_model, kept_bytes
from tfgpu.parallel import Mesh

pytestmark = [pytest.mark.slow]
pytest.importorskip("keras_hub")
WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 3}
LAYOUTS = {"two": {"sequence": 2}, "four": {"sequence": 4}, "two by two": {"data": 2, "sequence": 2}}


def gemma3(size):
    """Takes its arguments in another order, and no pictures."""
    sizes = size.blocks | GROUPED | WINDOW
    backbone = hub().Gemma3Backbone(WORDS, None, head_dim=4, vision_encoder=None, dropout=0.1, **sizes)
    return hub().Gemma3CausalLM(backbone=backbone, preprocessor=None), next_words(size.rows)


def smollm3(size):
    attention = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_bias": False, "attention_dropout": 0.0}
    rotary = {"rope_layer_enabled_list": [True], "rope_theta": 1e4, "partial_rotary_factor": 1.0}
    more = {"layer_types": ["attention"], "layer_norm_epsilon": 1e-5, "max_position_embeddings": 16, "mlp_bias": False}
    backbone = hub().SmolLM3Backbone(WORDS, **size.blocks, **attention, **rotary, **more)
    return hub().SmolLM3CausalLM(backbone, preprocessor=None), next_words(size.rows)


SOFT_CAPS = {"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0}
MORE = {
    "bloom": causal("Bloom", num_heads=2),
    "gemma2": causal("Gemma", **GROUPED, **WINDOW, **SOFT_CAPS, head_dim=4),
    "gemma3": gemma3,
    "gpt2": causal("GPT2", num_heads=2, max_sequence_length=8),
    "gpt_neo_x": causal("GPTNeoX", num_heads=2, max_sequence_length=8),
    "mistral, window": causal("Mistral", **GROUPED, sliding_window=3),
    "opt": causal("OPT", num_heads=2, max_sequence_length=8),
    "phi3": causal("Phi3", **GROUPED),
    "qwen, window": causal("Qwen", **GROUPED, **WINDOW),
    "smollm3": smollm3,
}
CASES = [
    *((name, "full", "two") for name in ("bert", "gemma", "gpt2", "gpt_oss", "llama3", "mixtral", "qwen3", "qwen_moe")),
    *((name, "full", "four") for name in sorted({*MORE, "qwen3_moe"} - {"bloom", "gpt2"})),
    *((name, "LoRA", "two") for name in ("bert", "gemma", "llama3", "mixtral", "qwen3")),
    *((name, "LoRA", "two by two") for name in ("gpt2", "qwen3")),
    *((name, "full", "two by two") for name in ("gemma", "gpt2", "llama", "mixtral")),
]


@pytest.fixture(autouse=True)
def even(monkeypatch):
    """A length that the devices divide."""
    monkeypatch.setattr(models, "LENGTH", 8)
    monkeypatch.setattr(families, "FAMILIES", families.FAMILIES | MORE)
    monkeypatch.setattr(families, "LAYOUTS", LAYOUTS)


@pytest.mark.parametrize(("family", "kind", "layout"), CASES, ids=[", ".join(case) for case in CASES])
def test_parts_of_a_sequence_learn_what_one_device_learns(family, kind, layout, caplog):
    one, data = families.made(family, kind)
    expected = families.trained(one, data, kind)
    model = families.spread(families.made(family, kind)[0], layout)
    history = families.trained(model, data, kind)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-5)
    assert families.weights_apart(one, model) < 1e-5
    whole = {record.args[0] for record in caplog.records if "mixes positions" in record.msg}
    assert whole == ({"MaskedLMHead"} if family == "bert" else set())  # it takes tokens by their numbers


@pytest.mark.parametrize("family", HUB)
def test_a_device_keeps_its_part_of_a_blocks_activations(family):
    devices = [f"CPU:{at}" for at in range(4)]
    (whole,) = kept_bytes(hub_model(family, 64, 32, 4, 2), Mesh(devices=devices[:1]), length=64, batch=2).values()
    parts = kept_bytes(hub_model(family, 64, 32, 4, 2), Mesh(sequence=4, devices=devices), length=64, batch=2)
    assert len(parts) == 4
    assert max(parts.values()) <= 0.3 * whole, (whole, parts)


def test_what_has_no_rule_is_computed_on_all_positions_and_named(caplog):
    """Bloom's attention makes its scores within `call`, with distances of its own."""
    one, data = families.made("bloom", "full")
    expected = families.trained(one, data, "full")
    model = families.spread(families.made("bloom", "full")[0], "two")
    history = families.trained(model, data, "full")
    np.testing.assert_allclose(history["loss"], expected["loss"], atol=1e-5)
    assert "BloomAttention" in {record.args[0] for record in caplog.records if "mixes positions" in record.msg}
