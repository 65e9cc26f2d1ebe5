"""Tiny models of KerasHub's families with random weights, and data to train them on."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

WORDS, LENGTH = 32, 5
GROUPED = {"num_query_heads": 4, "num_key_value_heads": 2}
QWEN_MOE = {"moe_intermediate_dim": 8, "shared_expert_intermediate_dim": 12, "num_experts": 4, "top_k": 2}
QWEN3_MOE = {"moe_intermediate_dim": 8, "num_experts": 4, "top_k": 2, "head_dim": 4}


@dataclass(frozen=True)
class Size:
    """How many transformer blocks a model has, and rows its data."""

    layers: int = 1
    rows: int = 6

    @property
    def blocks(self) -> dict[str, int]:
        return {"num_layers": self.layers, "hidden_dim": 16, "intermediate_dim": 64}


Data = tuple[Any, np.ndarray, np.ndarray | None]
"""Inputs, labels and weights of rows or tokens."""


def hub() -> Any:
    return importlib.import_module("keras_hub").models


def text(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Token ids, 0 where a row has ended, and where it has not."""
    ids = np.random.default_rng(0).integers(1, WORDS, (rows, LENGTH))
    there = (np.arange(LENGTH) < 2 + np.arange(rows)[:, None] % 4).astype("int32")
    return ids * there, there


def next_words(rows: int) -> Data:
    ids, there = text(rows)
    return {"token_ids": ids, "padding_mask": there}, np.roll(ids, -1, 1), there.astype("float32")


def causal(kind: str, **sizes: float) -> Callable[[Size], tuple[keras.Model, Data]]:
    """Makes a language model with a backbone of this kind, and its data."""

    def make(size: Size) -> tuple[keras.Model, Data]:
        backbone = getattr(hub(), f"{kind}Backbone")(WORDS, **{"dropout": 0.1, **size.blocks, **sizes})
        return getattr(hub(), f"{kind}CausalLM")(backbone, preprocessor=None), next_words(size.rows)

    return make


def bert(size: Size) -> tuple[keras.Model, Data]:
    backbone = hub().BertBackbone(WORDS, num_heads=2, max_sequence_length=LENGTH, **size.blocks)
    ids, there = text(size.rows)
    positions = np.sort(np.argsort(np.random.default_rng(1).random((size.rows, LENGTH)), 1)[:, :2])
    given = {"token_ids": ids, "padding_mask": there, "segment_ids": np.zeros_like(ids), "mask_positions": positions}
    words, weights = (np.take_along_axis(each, positions, 1) for each in (ids, there))
    return hub().BertMaskedLM(backbone, preprocessor=None), (given, words, weights.astype("float32"))


def vit(size: Size) -> tuple[keras.Model, Data]:
    draw = np.random.default_rng(0)
    sizes = {"num_layers": size.layers, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 64}
    rates = {"dropout_rate": 0.1, "attention_dropout": 0.1}
    backbone = hub().ViTBackbone((16, 16, 3), (8, 8), **sizes, **rates)
    pictures = draw.normal(size=(size.rows, 16, 16, 3)).astype("float32")
    return hub().ViTImageClassifier(backbone, 3, preprocessor=None), (pictures, draw.integers(0, 3, size.rows), None)


def whisper(size: Size) -> tuple[keras.Model, Data]:
    sizes = {"num_mels": 4, "max_encoder_sequence_length": 8, "max_decoder_sequence_length": LENGTH}
    backbone = hub().WhisperBackbone(WORDS, num_heads=2, dropout=0.1, **sizes, **size.blocks)
    given, words, weights = next_words(size.rows)
    sounds = np.random.default_rng(0).normal(size=(size.rows, 8, 4)).astype("float32")
    given = {"encoder_features": sounds, "decoder_token_ids": given["token_ids"], "decoder_padding_mask": weights}
    inputs = backbone.input
    logits = backbone.token_embedding(backbone(inputs)["decoder_sequence_output"], reverse=True)
    return keras.Model(inputs, logits), (given, words, weights)


FAMILIES = {
    "gemma": causal("Gemma", **GROUPED, head_dim=4),
    "gemma, one key head": causal("Gemma", num_query_heads=4, num_key_value_heads=1, head_dim=4),
    "llama": causal("Llama", **GROUPED),
    "llama3": causal("Llama3", num_query_heads=4, num_key_value_heads=1),
    "qwen3": causal("Qwen3", **GROUPED, head_dim=4),
    "mistral": causal("Mistral", **GROUPED),
    "mixtral": causal("Mixtral", **GROUPED, num_experts=4),
    "qwen_moe": causal("QwenMoe", **GROUPED, **QWEN_MOE),
    "gpt2": causal("GPT2", num_heads=2, max_sequence_length=LENGTH),
    "bert": bert,
    "vit": vit,
    "whisper": whisper,
}
MIXTURES = {
    "mixtral": FAMILIES["mixtral"],
    "qwen_moe": FAMILIES["qwen_moe"],
    "qwen3_moe": causal("Qwen3Moe", **GROUPED, **QWEN3_MOE),
    "gpt_oss": causal("GptOss", **GROUPED, num_experts=4, head_dim=4),
}


def adapt(model: keras.Model, rank: int = 2) -> None:
    """LoRA on queries and values, as KerasHub does it, with a second matrix that is not 0.

    Else nothing would flow through the first matrix.
    """
    for layer in model._flatten_layers(include_self=False):
        layer.trainable = False
    for layer in model._flatten_layers(include_self=False):
        if layer.name in ("query", "value") and layer.weights:
            layer.trainable = True
            layer.enable_lora(rank)
            layer.lora_kernel_b.assign(np.random.default_rng(2).normal(size=layer.lora_kernel_b.shape) * 0.1)
