"""Pretrained language models in a folder: a preset of KerasHub, or a folder of Hugging Face that KerasHub converts."""

import importlib
import importlib.util
import json
from dataclasses import dataclass
from pathlib import Path

import keras

from tfgpu.compat import saving
from tfgpu.errors import InputError
from tfgpu.finetuning.tokens import Tokenizer
from tfgpu.parallel import loading, model_graph

_WEIGHTS = "model.weights.h5"
_MANY_WEIGHTS = "model.weights.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "assets")
INSTALL = "pip install keras-hub (or 'tfgpu[hub]')"


@dataclass(frozen=True)
class Preset:
    """A folder with a causal language model.

    Attributes:
        folder: the path.
        is_kerashub: whether KerasHub saved it; else Hugging Face's transformers did.
    """

    folder: Path
    is_kerashub: bool

    @property
    def weights(self) -> Path:
        """What `parallel.load_weights` reads."""
        if not self.is_kerashub:
            return self.folder
        one = self.folder / _WEIGHTS
        return one if one.is_file() else self.folder / _MANY_WEIGHTS


def find(folder: str | Path) -> Preset:
    """Checks a folder, without KerasHub.

    Raises:
        InputError: there is no such folder, it lacks a config, weights or a tokenizer (the message names the file), or
            it is quantized.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise InputError(
            f"There is no preset folder {str(folder)!r}. Give --preset a folder of KerasHub's save_to_preset, or a "
            "snapshot of a Hugging Face model."
        )
    config = folder / "config.json"
    if not config.is_file():
        raise InputError(f"{folder} has no config.json, so it is not a preset. Give the folder that has one.")
    try:
        facts = json.loads(config.read_text(encoding="utf-8"))
        is_kerashub = "registered_name" in facts
    except (ValueError, TypeError) as error:
        raise InputError(f"{config} is not a JSON object: {error}. Copy it again.") from None
    if not is_kerashub and "model_type" not in facts:
        raise InputError(f"{config} is from neither KerasHub nor Hugging Face's transformers. Give another folder.")
    if is_kerashub and "QuantizedDTypePolicy" in json.dumps(facts):
        raise InputError(
            f"{folder} is quantized, which `tfgpu train` does not fine-tune. Give the preset from before "
            "`quantize`, or a script that calls `quantize` and `enable_lora`, then `parallel.apply` or `shard`."
        )
    if not any((folder / name).exists() for name in _TOKENIZERS):
        raise InputError(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS[:3])}). Copy it from the same model.")
    if not is_kerashub and not any(folder.glob("*.safetensors")):
        raise InputError(f"{folder} has no *.safetensors file. Copy the model's weights there.")
    if is_kerashub and not any((folder / name).is_file() for name in (_WEIGHTS, _MANY_WEIGHTS)):
        raise InputError(f"{folder} has no {_WEIGHTS}. Save the preset again, with its weights.")
    return Preset(folder, is_kerashub)


def check_library() -> None:
    """Raises `InputError` where KerasHub is not installed."""
    if importlib.util.find_spec("keras_hub") is None:
        raise InputError(f"A pretrained model needs KerasHub, which is not installed. {INSTALL}")


def build(preset: Preset) -> keras.Model:
    """The preset's model, a `keras_hub.models.CausalLM` with a tokenizer, without the weights of the file.

    Raises:
        InputError: KerasHub is missing or cannot build a causal language model from the folder.
    """
    check_library()
    models = importlib.import_module("keras_hub").models
    try:
        task = models.CausalLM.from_preset(
            str(preset.folder), load_weights=False, compile=False, dtype=keras.config.dtype_policy()
        )
    except Exception as error:  # KerasHub's loaders raise whatever their files make them raise
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(f"KerasHub builds no causal language model from {preset.folder}: {lines[0]}") from error
    if getattr(task.preprocessor, "tokenizer", None) is None:
        raise InputError(f"{preset.folder} has no tokenizer that KerasHub reads. Save it with `save_to_preset`.")
    return task


def tokenizer(task: keras.Model) -> Tokenizer:
    """The model's tokenizer."""
    return Tokenizer(task.preprocessor.tokenizer)


def positions(task: keras.Model) -> int | None:
    """The most tokens of a sequence, of models with a table of positions; None: there is no limit."""
    return getattr(task.backbone, "max_sequence_length", None)


def add_lora(task: keras.Model, rank: int) -> None:
    """Freezes the model, and adds trainable matrices of this rank to its attention's queries and values.

    Raises:
        InputError: the model has no such layers.
    """
    task.backbone.enable_lora(rank)
    if not task.trainable_variables:
        raise InputError(f"{task.name!r} has no layers that take LoRA. Remove --lora to train all weights.")


def load(task: keras.Model, preset: Preset) -> None:
    """Gives the model the weights of the folder, array by array, wherever its variables are.

    Raises:
        InputError: the files do not match the model.
    """
    adapted = [
        layer for layer in model_graph.layers_within(task.backbone).values() if getattr(layer, "lora_enabled", False)
    ]
    if preset.is_kerashub:
        kept = [keras.ops.convert_to_numpy(layer.lora_kernel_a) for layer in adapted if _is_dense(layer)]
        loading.load_weights(task.backbone, preset.weights)
        for layer, value in zip(filter(_is_dense, adapted), kept, strict=True):  # loading sets it to 0
            layer.lora_kernel_a.assign(value)
        return
    try:  # meanwhile `kernel` is the variable, and not its sum with LoRA's product
        for layer in adapted:
            layer.lora_enabled = False
        loading.load_weights(task.backbone, preset.weights)
    finally:
        for layer in adapted:
            layer.lora_enabled = True


def _is_dense(layer: keras.layers.Layer) -> bool:
    return hasattr(layer, "lora_kernel_a")


def save(task: keras.Model, folder: Path | None) -> None:
    """Saves the trained model as a preset of KerasHub, with LoRA's products added to the kernels.

    Args:
        task: of `build`.
        folder: where; None on a worker that is not the chief, which reads what it holds of the weights.
    """
    if folder is None:
        saving.read_all(task.backbone)
    else:
        task.save_to_preset(str(folder), max_shard_size=None)
