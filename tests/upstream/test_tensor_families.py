"""KerasHub's models, where it is installed: with blocks split over devices they learn what they learn on one."""

import keras
import numpy as np
import pytest
import tensor_families as families

pytestmark = [pytest.mark.slow]
pytest.importorskip("keras_hub")
CASES = [
    *((name, "full", "tensor 2") for name in families.FAMILIES),
    *((name, "LoRA", "tensor 2") for name in ("gemma, one key head", "llama3", "qwen3", "gpt2")),
    *((name, kind, "data 2 x tensor 2") for name in ("llama3", "mixtral", "whisper") for kind in ("full", "LoRA")),
]


@pytest.mark.parametrize(("family", "kind", "layout"), CASES, ids=[", ".join(case) for case in CASES])
def test_the_training_is_one_devices(family, kind, layout):
    found = families.compare(family, kind, layout)
    assert found.logs < 1e-5
    assert found.weights < 1e-5
    assert found.block_share < 0.55


EXPERTS = [
    *((name, "full", "expert 2") for name in families.MIXTURES),
    ("qwen_moe", "LoRA", "expert 2"),
    *((name, "full", "data 2 x expert 2") for name in ("mixtral", "qwen_moe")),
]


@pytest.mark.parametrize(("family", "kind", "layout"), EXPERTS, ids=[", ".join(case) for case in EXPERTS])
def test_experts_over_devices_learn_what_they_learn_on_one(family, kind, layout):
    """The balance loss is the whole batch's."""
    found = families.compare(family, kind, layout)
    assert found.logs < 1e-5
    assert found.weights < 1e-5
    assert families.expert_share(found.model, found.one) == 0.5


@pytest.mark.parametrize("family", ["gemma, one key head", "llama", "gpt2", "mixtral"])
def test_it_generates_and_saves_what_one_device_does(family, tmp_path):
    """Caches of keys and values lie in parts, or are shared."""
    one, data = families.made(family, "LoRA")
    model = families.spread(families.made(family, "LoRA")[0], "tensor 2")
    prompts = {name: value[:3] for name, value in data[0].items()}
    for each in (one, model):
        each.compile(sampler="greedy")
    expected, found = (each.generate(prompts, stop_token_ids=None) for each in (one, model))
    np.testing.assert_array_equal(found["token_ids"], expected["token_ids"])
    np.testing.assert_allclose(model.predict(prompts, verbose=0), one.predict(prompts, verbose=0), atol=1e-5)
    model.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(opened.predict(prompts, verbose=0), one.predict(prompts, verbose=0), atol=1e-5)
