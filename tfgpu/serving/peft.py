"""Adapters as Hugging Face's PEFT keeps them, for models that KerasHub converts from Hugging Face's.

PEFT adds `scale * B @ A` to a weight (outputs, inputs), with A (rank, inputs) and B (outputs, rank). Keras's
EinsumDense adds `scale * a @ b` to a kernel of any shape, where `b` works along the last axis alone. The converter says
which number of the weight each number of the kernel is; so it is known which axes of the kernel are inputs and which
outputs. Where the last axis is all of its side, the matrices are the same but for their order. Where it is not (the
heads of a query come before it), each position along the other axes gets `rank` rows of its own: rank times heads.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import safetensors.numpy

from tfgpu.checkpoint import lora
from tfgpu.compat import keras_hub
from tfgpu.compat.layers import KernelOf
from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError
from tfgpu.parallel import weight_files

FILES = ("adapter_config.json", "adapter_model.safetensors")
_ROOT = "base_model.model."
_PREFIXES = {"gpt2": "transformer.", "bert": "bert.", "roberta": "roberta.", "distilbert": "distilbert."}
"""What a model with a head calls its backbone, for files that name the backbone's weights alone."""
_TASKS = {"ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForSequenceClassification": "SEQ_CLS"}


@dataclass(frozen=True)
class Factors:
    """The adapter of one weight, as PEFT has it.

    Attributes:
        a: (rank, inputs).
        b: (outputs, rank).
        alpha: the scale is `alpha / rank`.
    """

    a: np.ndarray
    b: np.ndarray
    alpha: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]


def contents(model: keras.Model, found: Sequence[lora.LoraLayer], base: Path) -> dict[str, bytes]:
    """The files of a folder for PEFT, by their names.

    Args:
        model: of KerasHub, or with a backbone of its.
        found: the layers with LoRA.
        base: the folder of Hugging Face.

    Raises:
        InputError: KerasHub does not convert the folder to the model; something else than LoRA trains; a layer is an
            embedding, or no weight of the folder.
    """
    biases = _trained_biases(model, found)
    config_file = base / "config.json"
    if not config_file.is_file():
        raise InputError(
            f"{base} has no config.json. Give the folder of Hugging Face that the model was converted from."
        )
    config = json.loads(config_file.read_text())
    arrays = weight_files.open_safetensors(weight_files.safetensors_in(base))
    named = _named(model, found, biases, config_file, arrays)
    kernels, modules, whole = {id(each.layer): each for each in found}, {}, {}
    for kernel, key, hook in named:
        if isinstance(kernel, KernelOf):
            # GPT-2's weights are (inputs, outputs).
            is_turned = config.get("model_type") == "gpt2"
            factors = _factors(kernels[id(kernel.layer)], kernel, hook, arrays[key].shape, is_turned)
            modules.setdefault(_module(key, config), []).append(factors)
        else:
            name = f"{_module(key.removesuffix('.bias'), config)}.base_layer.bias"
            array = whole.setdefault(name, np.array(arrays[key]))
            places = _places(array.shape, hook, kernel.shape)
            array.reshape(-1)[places.reshape(-1)] = np.asarray(kernel.numpy(), array.dtype).reshape(-1)
    return _files({name: _joined(several) for name, several in modules.items()}, whole, config, base)


def _named(model: keras.Model, found: Sequence[lora.LoraLayer], biases: Sequence, config: Path, arrays: Mapping):
    """The kernels and biases with their names in the folder."""
    converter = keras_hub.converter_of(model, config)
    if converter is None:
        raise InputError(
            f"{model.name!r} is not the KerasHub model that {config.parent} converts to. Give the folder that it "
            "was converted from, or use format='keras'."
        )
    if any(each.names[0] != "lora_kernel_a" for each in found):
        raise InputError(
            "PEFT keeps adapters of embeddings in another way. Use format='keras', or LoRA on other layers."
        )
    pairs = [(each.layer, *each.variables()) for each in found]
    kernels = [KernelOf(layer, (*a.shape[:-1], b.shape[-1])) for layer, a, b in pairs]
    try:
        named = keras_hub.names_of(*converter, config, arrays, kernels, biases)
    except (KeyError, ValueError) as error:
        raise InputError(
            f"{config.parent} does not match {model.name!r}: {error}. Give the folder that it was converted from."
        ) from error
    known = {id(each) for each, _, _ in named}
    absent = [kernel.layer.path for kernel in kernels if id(kernel) not in known]
    absent += [bias.path for bias in biases if id(bias) not in known]
    if absent:
        raise InputError(
            f"KerasHub's converter names no weight for {absent[0]!r}. Use format='keras', or LoRA elsewhere."
        )
    return named


def _trained_biases(model: keras.Model, found: Sequence[lora.LoraLayer]) -> list:
    """The biases of layers with LoRA that train with it.

    Raises:
        InputError: other weights train as well.
    """
    own = [getattr(each.layer, "bias", None) for each in found]
    biases = [bias for bias in own if bias is not None and bias.trainable]
    known = {id(sharded_variable.shard_of(bias)) for bias in biases} | {id(bias) for bias in biases}
    others = [v for v in lora.other_weights(model) if getattr(v, "trainable", False)]
    paths = [v.path for v in others if id(getattr(v, "shards", [v])[0]) not in known]
    if paths:
        raise InputError(
            f"A PEFT file holds only LoRA, but {len(paths)} other weights train, such as {paths[0]!r}. Freeze them "
            "(`backbone.enable_lora` does), or use format='keras', which holds them too."
        )
    return biases


def _module(key: str, config: Mapping) -> str:
    """The path of the module, in the class that the base's configuration names, whose weight `key` is."""
    architecture = (config.get("architectures") or [""])[0]
    is_backbone = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    prefix = "" if is_backbone else _PREFIXES.get(config.get("model_type"), "")
    name = key.removesuffix(".weight")
    return name if name.startswith(prefix) else prefix + name


def _factors(each: lora.LoraLayer, kernel: KernelOf, hook, shape: Sequence[int], is_turned: bool) -> Factors:
    """The adapter of a layer as one of the weight from which its kernel is made.

    Args:
        each: the layer.
        kernel: its kernel's shape.
        hook: makes the weight the kernel.
        shape: of the weight.
        is_turned: the weight is (inputs, outputs).
    """
    if len(shape) != 2:
        raise InputError(f"The weight of {each.layer.path!r} has shape {tuple(shape)}; PEFT's LoRA needs a matrix.")
    places = _places(shape, hook, kernel.shape)
    names = ("inputs", "outputs") if is_turned else ("outputs", "inputs")  # of the weight's axes
    coordinates = dict(zip(names, np.divmod(places, shape[1]), strict=True))
    sizes = dict(zip(names, shape, strict=True))
    axes = {name: _axes_of(each) for name, each in coordinates.items()}
    if axes["inputs"] & axes["outputs"]:
        raise InputError(
            f"The kernel of {each.layer.path!r} mixes inputs and outputs along an axis. Use format='keras'."
        )
    last = len(kernel.shape) - 1
    side, other = ("inputs", "outputs") if last in axes["inputs"] else ("outputs", "inputs")
    beside, across = sorted(axes[side] - {last}), sorted(set(range(last)) - axes[side])
    a, b = each.values()
    count, rank = int(np.prod([kernel.shape[axis] for axis in beside])), each.rank
    along = np.zeros((sizes[side], count * rank), "float32")
    rows = _only(coordinates[side], [*beside, last]).reshape(count, -1)
    for at in range(count):
        along[rows[at], at * rank : (at + 1) * rank] = b.T
    turned = np.transpose(a, [*across, *beside, last]).reshape(-1, count * rank)
    facing = np.zeros((sizes[other], count * rank), "float32")
    facing[_only(coordinates[other], across).reshape(-1)] = turned
    pair = (facing.T, along) if side == "outputs" else (along.T, facing)
    return _narrowed(*pair, each.alpha / rank, each.alpha if count == 1 else None)


class _Places(np.ndarray):
    """Whole numbers that stay so: some converters cast what they convert to float16."""

    def astype(self, *args, **kwargs):
        return self


def _places(shape: Sequence[int], hook, wanted: Sequence[int]) -> np.ndarray:
    """Which number of an array of the folder each number of a variable is.

    Args:
        shape: of the array.
        hook: makes the array the variable's value, or None.
        wanted: the variable's shape.
    """
    found = np.arange(int(np.prod(shape))).reshape(shape).view(_Places)
    return np.asarray(found if hook is None else hook(found, list(wanted))).reshape(tuple(wanted))


def _axes_of(coordinates: np.ndarray) -> set[int]:
    """The axes along which coordinates change."""
    return {axis for axis, size in enumerate(coordinates.shape) if size > 1 and np.diff(coordinates, axis=axis).any()}


def _only(coordinates: np.ndarray, axes: Sequence[int]) -> np.ndarray:
    """Coordinates along some axes, which do not depend on the others."""
    return coordinates[tuple(slice(None) if axis in axes else 0 for axis in range(coordinates.ndim))]


def _narrowed(a: np.ndarray, b: np.ndarray, scale: float, alpha: float | None) -> Factors:
    """Factors of no more rank than a matrix of their shape has; without `alpha`, `b` takes the scale."""
    if alpha is not None and a.shape[0] <= min(a.shape[1], b.shape[0]):
        return Factors(a, b, alpha)
    b = scale * b
    if a.shape[0] > min(a.shape[1], b.shape[0]):
        product = b @ a
        is_wide = product.shape[1] <= product.shape[0]
        a, b = (np.eye(product.shape[1]), product) if is_wide else (product, np.eye(product.shape[0]))
    return Factors(a.astype("float32"), b.astype("float32"), float(a.shape[0]))


def _joined(several: Sequence[Factors]) -> Factors:
    """The sum of adapters of one weight, as of query, key and value that lie in one."""
    if len(several) == 1:
        return several[0]
    a = np.concatenate([each.a for each in several])
    b = np.concatenate([each.b * (each.alpha / each.rank) for each in several], 1)
    return _narrowed(a, b, 1.0, float(len(a)))


def _files(modules: Mapping[str, Factors], whole: Mapping, config: Mapping, base: Path) -> dict[str, bytes]:
    """The contents of the two files.

    Args:
        modules: the adapters, by the paths of the modules.
        whole: other arrays, by their names in the model of PEFT.
        config: of the base.
        base: its folder.
    """
    rank = Counter(each.rank for each in modules.values()).most_common(1)[0][0]
    alpha = Counter(each.alpha for each in modules.values() if each.rank == rank).most_common(1)[0][0]
    architecture = (config.get("architectures") or [""])[0]
    task = next((task for end, task in _TASKS.items() if architecture.endswith(end)), None)
    settings = {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": str(config.get("_name_or_path") or base),
        "r": rank,
        "lora_alpha": alpha,
        "rank_pattern": {name: each.rank for name, each in modules.items() if each.rank != rank},
        "alpha_pattern": {name: each.alpha for name, each in modules.items() if each.alpha != alpha},
        "target_modules": sorted(modules),
        "fan_in_fan_out": config.get("model_type") == "gpt2",
        "bias": "lora_only" if whole else "none",
        "lora_dropout": 0.0,
        "use_rslora": False,
        "inference_mode": True,
    }
    arrays = {f"{_ROOT}{name}.lora_A.weight": np.ascontiguousarray(each.a) for name, each in modules.items()}
    arrays |= {f"{_ROOT}{name}.lora_B.weight": np.ascontiguousarray(each.b) for name, each in modules.items()}
    arrays |= {f"{_ROOT}{name}": array for name, array in whole.items()}
    content = safetensors.numpy.save(arrays, metadata={"format": "pt"})
    return dict(zip(FILES, (json.dumps(settings, indent=2).encode(), content), strict=True))
