"""Tiny pretrained models in folders, and data to fine-tune them on."""

import importlib
import json
from pathlib import Path

import keras

SPECIAL = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>")


MERGES = ["q q"]  # tensorflow-text, where it is installed, takes no tokenizer without merges


def alphabet() -> dict[str, int]:
    """A byte-level vocabulary: each byte and `MERGES` are tokens, in the letters that GPT-2 writes bytes with."""
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printed]
    letters = [chr(byte) for byte in printed] + [chr(256 + at) for at in range(len(others))]
    return {letter: at for at, letter in enumerate([*SPECIAL, *letters, "qq"])}


def llama3(folder: Path, *, layers: int = 2, width: int = 16) -> Path:
    """Saves a preset of KerasHub with random weights."""
    models = importlib.import_module("keras_hub").models
    keras.utils.set_random_seed(0)
    vocabulary = alphabet()
    backbone = models.Llama3Backbone(
        len(vocabulary), layers, 2, width, 2 * width, num_key_value_heads=1, layer_norm_epsilon=1e-5
    )
    tokenizer = models.Llama3Tokenizer(vocabulary, MERGES)
    task = models.Llama3CausalLM(backbone, models.Llama3CausalLMPreprocessor(tokenizer, sequence_length=64))
    task.save_to_preset(str(folder))
    return folder


def gemma(folder: Path):
    """A model whose blocks take no mask: its sequences are not packed. It borrows Llama's tokenizer."""
    models = importlib.import_module("keras_hub").models
    keras.utils.set_random_seed(0)
    backbone = models.GemmaBackbone(
        len(alphabet()), 2, num_query_heads=2, num_key_value_heads=1, head_dim=8, hidden_dim=16, intermediate_dim=32
    )
    return models.GemmaCausalLM(backbone, preprocessor=None)


def pairs(path: Path, count: int = 40) -> Path:
    """Questions with answers of different lengths."""
    lines = [
        {"prompt": f"{at % 7} + {at % 5} =", "response": str(at % 7 + at % 5) * (1 + at % 4)} for at in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path
