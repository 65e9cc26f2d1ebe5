"""Parts of KerasHub that have no public function: weights of Hugging Face's, and how its blocks attend."""

import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat.keras import StatelessScope
from tfgpu.compat.layers import KernelOf, named_kernels

_TRANSFORMERS = "keras_hub.src.utils.transformers"
BALANCE = "compute_load_balancing_loss"
"""The function with which the modules of mixtures make the loss that balances experts."""
_ATTENTION = "_compute_attention"
_MASKS = ("_compute_self_attention_mask", "_compute_attention_mask")
_ATTENTIONS = dict.fromkeys(
    "CachedMistralAttention CachedMixtralAttention GptOssAttention LlamaAttention Phi3Attention Qwen3Attention "
    "Qwen3MoeAttention QwenAttention QwenMoeAttention SmolLM3Attention".split()
) | {
    "CachedGemmaAttention": "dropout_layer",
    "CachedGemma3Attention": "dropout_layer",
    "GPTNeoXAttention": "_attn_dropout_layer",
}
"""Layers whose `_compute_attention(query, key, value, mask, ...)` takes a chunk of the queries and all keys, with the
name of the Dropout that it applies to the scores."""
_WIPES = frozenset({"CachedGemmaAttention", "CachedGemma3Attention"})
"""Layers whose `call` asks of the mask which queries see any key."""
_WINDOW = "_mask_sliding_window"


def converter_of(model: keras.Model, config: Path) -> tuple[keras.Model, ModuleType] | None:
    """The converter for a folder of Hugging Face.

    Args:
        model: a backbone of KerasHub, or a task with one.
        config: the folder's `config.json`.

    Returns:
        The backbone and its converter; None without KerasHub, for any other model, or for a folder that KerasHub does
        not know or whose models are of another class.
    """
    if not type(model).__module__.startswith("keras_hub.") and importlib.util.find_spec("keras_hub") is None:
        return None
    hub = importlib.import_module("keras_hub")
    backbone = model if isinstance(model, hub.models.Backbone) else getattr(model, "backbone", None)
    if not isinstance(backbone, hub.models.Backbone):
        return None
    loader = importlib.import_module(f"{_TRANSFORMERS}.preset_loader").TransformersPresetLoader
    try:
        converter = loader(str(config.parent), json.loads(config.read_text())).converter
    except (ValueError, KeyError):
        return None
    return (backbone, converter) if isinstance(backbone, converter.backbone_cls) else None


def names_of(
    backbone: keras.Model,
    converter: ModuleType,
    config: Path,
    arrays: Mapping,
    kernels: Sequence[KernelOf],
    others: Sequence[keras.Variable],
) -> list[tuple[KernelOf | keras.Variable, str, Callable | None]]:
    """What a folder of Hugging Face calls the kernels of some layers and some other variables.

    Args:
        backbone, converter: of `converter_of`.
        config: the folder's `config.json`.
        arrays: by their name in the folder's files.
        kernels: of layers within the backbone.
        others: variables within the backbone.

    Returns:
        For each that KerasHub's converter names: the kernel or variable, the array's name, and what makes the array its
        value (takes the array and the shape), or None.
    """
    found, wanted = [], {id(each) for each in others}

    def note(variable, name_of, hook) -> None:
        if isinstance(variable, KernelOf) or id(variable) in wanted:
            found.append((variable, name_of(), hook))

    # In the scope nothing is assigned: some converters assign parts of arrays by themselves.
    with StatelessScope(), named_kernels(kernels):
        _convert(backbone, converter, config, arrays, note)
    return found


def convert(
    backbone: keras.Model,
    converter: ModuleType,
    config: Path,
    arrays: Mapping,
    assign: Callable[[object, object], None],
) -> None:
    """Gives a backbone its weights as KerasHub's converter maps them.

    Args:
        backbone, converter: of `converter_of`.
        config: the folder's `config.json`.
        arrays: by their name in the folder's files; each is read when it is converted to a NumPy array.
        assign: called with a variable and its value, which is one of `arrays` where nothing has to be changed.
    """

    def port(variable, name_of, hook) -> None:
        found = arrays[name_of()]
        assign(variable, found if hook is None else hook(np.asarray(found), list(variable.shape)))

    _convert(backbone, converter, config, arrays, port)


def _convert(backbone: keras.Model, converter: ModuleType, config: Path, arrays: Mapping, port: Callable) -> None:
    """Runs KerasHub's converter; `port` takes a variable, what tells its array's name, and what makes its value."""
    stock = importlib.import_module(f"{_TRANSFORMERS}.safetensor_utils").SafetensorLoader

    class Loader(stock):
        def get_tensor(self, hf_weight_key):
            return np.asarray(arrays[self.get_prefixed_key(hf_weight_key, arrays)])

        def port_weight(self, keras_variable, hf_weight_key, hook_fn=None):
            port(keras_variable, lambda: self.get_prefixed_key(hf_weight_key, arrays), hook_fn)

    with Loader(str(config.parent)) as loader:
        converter.convert_weights(backbone, loader, json.loads(config.read_text()))


def attention_method(kind: type) -> tuple[type, str] | None:
    """The class and the name of the method with which a layer of KerasHub's attends, if it takes a chunk of queries."""
    for owner in kind.__mro__:
        if _is_hub(owner) and owner.__name__ in _ATTENTIONS and _ATTENTION in vars(owner):
            return owner, _ATTENTION
    return None


def score_dropout(layer: keras.layers.Layer) -> keras.layers.Dropout | None:
    """The Dropout that a layer of `attention_method` applies to its scores."""
    owner, _ = attention_method(type(layer))
    name = _ATTENTIONS[owner.__name__]
    return getattr(layer, name) if name else None


def window_method(kind: type) -> tuple[type, str] | None:
    """The class and the name of a method that adds a window of `sliding_window_size` to a mask of queries and keys."""
    found = attention_method(kind)
    return (found[0], _WINDOW) if found is not None and _WINDOW in vars(found[0]) else None


def is_mask_asked(kind: type) -> bool:
    """Whether the `call` of a layer of `attention_method` asks of the mask which queries see any key."""
    found = attention_method(kind)
    return found is not None and found[0].__name__ in _WIPES and "call" in vars(found[0])


def balances(kind: type) -> bool:
    """Whether a class of KerasHub's is in a module that has the loss which balances experts."""
    return _is_hub(kind) and hasattr(sys.modules[kind.__module__], BALANCE)


@dataclass(frozen=True)
class MaskArguments:
    """The arguments of a method of `mask_methods`.

    Attributes:
        signature: of the method.
        sequence: the name of the first argument, whose length the mask has.
        others: the names of those after it.
        cache, start: of them, the cache, and the position in it of the first query.
    """

    signature: inspect.Signature
    sequence: str
    others: tuple[str, ...]
    cache: str
    start: str


def mask_arguments(owner: type, name: str) -> MaskArguments:
    """What a method of `mask_methods` takes."""
    signature = inspect.signature(getattr(owner, name))
    _, sequence, *others = signature.parameters
    cache, start = (next(each for each in others if each.endswith(end)) for end in ("cache", "cache_update_index"))
    return MaskArguments(signature, sequence, tuple(others), cache, start)


def mask_methods(kind: type) -> list[tuple[type, str]]:
    """The classes and names of the methods that make the mask of a block's queries and keys, also for a cache."""
    found = []
    for owner in filter(_is_hub, kind.__mro__):
        for name in filter(vars(owner).__contains__, _MASKS):
            takes = [*inspect.signature(getattr(owner, name)).parameters]
            if all(any(each.endswith(end) for each in takes) for end in ("cache", "cache_update_index")):
                found.append((owner, name))
    return found


def cache_of(owner: type, length: int) -> object:
    """A cache of no rows with this many positions, as a block's method asks it for its shape."""
    if owner.__name__ == "Gemma3DecoderBlock":
        return (tf.zeros([0, length]),) * 2
    return tf.zeros([0, 2, length])


def _is_hub(kind: type) -> bool:
    return kind.__module__.startswith("keras_hub.")
