"""Models of KerasHub in one level of layers: as they are, and with several sequences in a row."""

import importlib

import keras
import numpy as np
import pytest

from tfgpu.finetuning import graph

pytestmark = [pytest.mark.slow]
pytest.importorskip("keras_hub", reason="needs KerasHub: pip install keras-hub")
WORDS = 20
HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
SIZES = {"num_layers": 2, "hidden_dim": 8, "intermediate_dim": 12}
KINDS = {
    "GPT2": {"num_heads": 2, "max_sequence_length": 8},
    "Gemma": {**HEADS, "head_dim": 4},
    "Llama": HEADS,
    "Llama3": HEADS,
    "Mistral": HEADS,
    "Mixtral": {**HEADS, "num_experts": 2},
    "Qwen": HEADS,
    "Qwen3": {**HEADS, "head_dim": 4},
}


def made(kind):
    models = importlib.import_module("keras_hub").models
    keras.utils.set_random_seed(0)
    backbone = getattr(models, f"{kind}Backbone")(WORDS, **KINDS[kind], **SIZES)
    for variable in backbone.trainable_variables:  # where norms begin with 0, a mistake would not show
        variable.assign_add(keras.random.normal(variable.shape, stddev=0.3, seed=len(variable.path)))
    return getattr(models, f"{kind}CausalLM")(backbone, preprocessor=None)


def alone(task, tokens):
    tokens = np.array([tokens])
    return np.asarray(task({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))[0]


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_row_of_two_sequences_gives_what_each_gives_alone(kind):
    task = made(kind)
    names = graph.packed_inputs(task)
    first, second = [3, 5, 7], [2, 9, 4, 6]
    if kind == "Gemma":  # its blocks take no mask
        assert names is None
        given = {"token_ids": np.array([[*first, 0, 0]]), "padding_mask": np.array([[1, 1, 1, 0, 0]])}
        found = np.asarray(graph.flat(task, None)(given))[0]
        np.testing.assert_allclose(found[:3], alone(task, first), atol=1e-5)
        return
    every = {
        "token_ids": np.array([[*first, *second, 0]]),
        "segment_ids": np.array([[1] * 3 + [2] * 4 + [0]]),
        "positions": np.array([[0, 1, 2, 0, 1, 2, 3, 0]]),
    }
    model = graph.flat(task, names)
    found = np.asarray(model({name: every[name] for name in names}))[0]
    assert not any(isinstance(layer, keras.Model) for layer in model.layers)
    assert ("positions" in names) == (kind == "GPT2")
    np.testing.assert_allclose(found[:3], alone(task, first), atol=1e-5)
    np.testing.assert_allclose(found[3:7], alone(task, second), atol=1e-5)
