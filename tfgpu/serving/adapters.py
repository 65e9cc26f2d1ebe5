"""Adapters (LoRA) alone, without the model that they adapt: `export_adapters` and `load_adapters`."""

import json
import os
import tempfile
from pathlib import Path

import h5py
import keras
import numpy as np

from tfgpu.checkpoint import lora
from tfgpu.errors import InputError, unknown
from tfgpu.repairs import saving
from tfgpu.serving import formats, peft

FORMATS = ("keras", "peft")
_FACTS, _ENDING = "tfgpu", ".lora.h5"


def export_adapters(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    format: str = "keras",
    base: str | os.PathLike[str] | None = None,
    overwrite: bool = False,
) -> Path:
    """Writes what LoRA has trained, and nothing of the base model. A file of the whole, merged, is `model.save`'s.

    Of a model on replicas, in stages or sharded (ZeRO), only the adapters are gathered. On several workers each must
    call it, and the chief writes.

    Args:
        model: built, with LoRA enabled on some layers.
        path: the output: a file `*.lora.h5`, or for `"peft"` a folder.
        format: `"keras"`: for `load_adapters`, and for KerasHub's `load_lora_weights` if its backbone has LoRA on the
            same layers. It also holds other weights that train. `"peft"`: a folder that Hugging Face's PEFT loads
            (`adapter_config.json`, `adapter_model.safetensors`), for models that KerasHub converts from Hugging Face's.
        base: for `"peft"`: the folder with `config.json` and safetensors from which the model was converted.
        overwrite: replace an earlier export of adapters.

    Returns:
        The path.

    Raises:
        InputError: the model has no LoRA; the path is taken; `"peft"` cannot hold the model's adapters.
        MachineError: it cannot be written.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> model.layers[0].enable_lora(2)
        >>> load_adapters(model, export_adapters(model, "style.lora.h5")).layers[0].lora_rank
        2

    Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021 (https://arxiv.org/abs/2106.09685).
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    if (base is None) == (format == "peft"):
        raise InputError(
            "`base` names the folder of Hugging Face that the model was converted from: format='peft' needs it, and "
            f"format='keras' takes none. Received: format={format!r}, base={base!r}."
        )
    path = Path(path)
    if format == "keras" and not path.name.endswith(_ENDING):
        path = path.with_name(path.name + _ENDING)
    found = lora.found_in(model)
    if not found:
        raise InputError(f"No layer of {model.name!r} has LoRA. Call `layer.enable_lora(rank)`, and train it, first.")
    _check_free(path, format, overwrite)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder, path.name)
        if format == "peft":
            contents = peft.contents(model, found, Path(base))
            made.mkdir()
            for name, content in contents.items():
                (made / name).write_bytes(content)
        else:
            _write(model, found, made)
        if saving.writes(model):
            formats.put(made, path)
    return path


def load_adapters(model: keras.Model, path: str | os.PathLike[str], *, check_base: bool = True) -> keras.Model:
    """Gives a base model the adapters of a file that `export_adapters` has written.

    LoRA is enabled on the layers that had it, unless the model has it there. Call this before `compile`.

    Args:
        model: built; the base that was adapted. Of a quantized one, the base quantized in the same way.
        path: the file, `*.lora.h5`.
        check_base: whether the model's other weights must be those that were adapted.

    Returns:
        The same model.

    Raises:
        InputError: the file cannot be read; the model is another one, has LoRA of another rank or on other layers, or
            its weights differ.

    Example:
        model = tfgpu.serving.load_adapters(base_model, "style.lora.h5")
    """
    path = Path(path)
    facts, pairs, trained = _read(path)
    others, found = lora.other_weights(model), {each.place: each for each in lora.found_in(model)}
    places, candidates = [layer["place"] for layer in facts["layers"]], lora.with_weights(model)
    if len(others) != len(facts["base"]) or max(places) >= len(candidates):
        raise InputError(
            f"{path} is for a model of {len(facts['base'])} weights, and {model.name!r} has {len(others)} besides "
            "LoRA's. Build the model that was adapted."
        )
    if check_base:
        _check_base(model, path, facts["base"], others)
    if found:
        _check_same_layers(model, path, facts["layers"], found)
    else:
        with model.distribute_strategy.scope():
            for layer in facts["layers"]:
                candidates[layer["place"]].enable_lora(layer["rank"], lora_alpha=layer["alpha"])
    for each in lora.found_in(model):
        for variable, value in zip(each.variables(), pairs[each.place], strict=True):
            if tuple(variable.shape) != value.shape:
                raise InputError(f"{path} has {value.shape} for {variable.path}, the model {tuple(variable.shape)}.")
            variable.assign(value)
    for place, value in trained.items():
        others[place].assign(value)
    return model


def _check_same_layers(model: keras.Model, path: Path, layers: list[dict], found: dict) -> None:
    """Raises an `InputError` if the model's own LoRA is not that of the file."""
    if sorted(found) != sorted(layer["place"] for layer in layers):
        raise InputError(
            f"{path} has adapters for {len(layers)} layers, and {model.name!r} has LoRA on {len(found)} others. Enable "
            "it on the same layers, or on none: `load_adapters` does it."
        )
    for layer in layers:
        have = found[layer["place"]]
        if (have.rank, have.alpha) != (layer["rank"], layer["alpha"]):
            raise InputError(
                f"{path} has LoRA of rank {layer['rank']} and alpha {layer['alpha']:g} for {have.layer.path!r}, "
                f"the model has rank {have.rank} and alpha {have.alpha:g}. Enable those of the file, or on no layer."
            )


def _check_base(model: keras.Model, path: Path, expected: list, others: list) -> None:
    frozen = [at for at, digest in enumerate(expected) if digest is not None]
    here = lora.digests(model, [others[at] for at in frozen])
    differ = [others[at].path for at, digest in zip(frozen, here, strict=True) if digest != expected[at]]
    if differ:
        raise InputError(
            f"{path} was trained on another base: {len(differ)} of {len(frozen)} weights differ, such as "
            f"{differ[0]!r}. Give the model the weights that were adapted, or load with check_base=False."
        )


def _write(model: keras.Model, found: list[lora.LoraLayer], path: Path) -> None:
    """Writes the file: KerasHub's layout, in which each layer has its position, and facts in an attribute."""
    others = lora.other_weights(model)
    trains = [getattr(variable, "trainable", False) for variable in others]
    kept = iter(lora.digests(model, [v for v, trained in zip(others, trains, strict=True) if not trained]))
    facts = {
        "version": 1,
        "base": [None if trained else next(kept) for trained in trains],
        "layers": [{"place": each.place, "rank": each.rank, "alpha": each.alpha} for each in found],
    }
    with h5py.File(path, "w") as file:
        file.attrs[_FACTS] = json.dumps(facts)
        file["lora/vars/rank"] = found[0].rank
        for each in found:
            for name, value in zip(each.names, each.values(), strict=True):
                file[f"lora/{each.place}/vars/{name}"] = value
        for place, (variable, trained) in enumerate(zip(others, trains, strict=True)):
            if trained:
                file[f"trained/{place}"] = np.asarray(variable.numpy(), "float32")


def _read(path: Path) -> tuple[dict, dict[int, list[np.ndarray]], dict[int, np.ndarray]]:
    """The facts of a file, the two matrices of each layer by its position, and other weights by theirs."""
    if not path.is_file():
        raise InputError(f"There is no file {str(path)!r}. Give a file of `tfgpu.serving.export_adapters`.")
    try:
        with h5py.File(path, "r") as file:
            facts = json.loads(file.attrs[_FACTS])
            pairs = {}
            for layer in facts["layers"]:
                group = file[f"lora/{int(layer['place'])}/vars"]
                pairs[layer["place"]] = [np.asarray(group[name]) for name in sorted(group)]
            trained = {int(place): np.asarray(value) for place, value in file.get("trained", {}).items()}
    except (OSError, KeyError, ValueError, TypeError) as error:
        raise InputError(
            f"{path} holds no adapters: {error}. Give a file of `tfgpu.serving.export_adapters`."
        ) from error
    return facts, pairs, trained


def _check_free(path: Path, format: str, overwrite: bool) -> None:
    """Refuses to replace anything but adapters."""
    if not (path.exists() or path.is_symlink()):
        return
    if not overwrite:
        raise InputError(f"{path} exists. Choose another path, or use overwrite=True.")
    is_folder = path.is_dir() and {each.name for each in path.iterdir()} <= set(peft.FILES)
    if not (path.is_file() and not path.is_symlink() if format == "keras" else is_folder):
        raise InputError(f"{path} is not an export of adapters, and is not replaced. Choose another path.")
