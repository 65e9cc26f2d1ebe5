"""Exports a model, a `.keras` file or a run directory, and checks that the outputs are the same."""

import os
import re
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError, MachineError, unknown
from tfgpu.parallel import model_graph
from tfgpu.parallel.zero import sharding
from tfgpu.serving import examples
from tfgpu.serving.formats import FORMATS, Format, check_path, computes_in, put, run, write

TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Args:
        path: the file, or the folder of a SavedModel.
        format: a name in `FORMATS`.
        bytes: its size on disk.
        inputs: shape and type of each input by name; `None` for a dimension of any size, such as the batch.
        difference: the largest difference of its outputs from the model's, relative to the largest output if that is
            above 1; `None` if not checked.
    """

    path: Path
    format: str
    bytes: int
    inputs: Mapping[str, tuple[tuple[int | None, ...], str]]
    difference: float | None


def export(
    model: keras.Model | str | os.PathLike[str],
    path: str | os.PathLike[str],
    *,
    format: str = "savedmodel",
    example: object = None,
    check: bool = True,
    overwrite: bool = False,
) -> Exported:
    """Exports a model, runs the export, and compares its outputs with the model's.

    The model is exported as for one device: replicas, sharded variables and pipeline stages are merged first. The
    output is replaced atomically, so after a failure the previous export remains.

    Args:
        model: a built Keras model, a `.keras` file, or a run directory of `tfgpu train`.
        path: the output; the format's suffix (`.onnx`, `.tflite`) is added if missing.
        format: `"savedmodel"` (TensorFlow Serving, C++, Java), `"onnx"` (ONNX Runtime, TensorRT), `"litert"` (phones).
        example: arrays `[rows, ...]` by the inputs' names, or in the structure of the model's inputs, to compare on;
            `None` draws 4 random rows. Required for a subclassed model, and for text inputs.
        check: run the exported model in a separate process, and compare.
        overwrite: replace an existing export; nothing else is ever replaced.

    Returns:
        Facts about the exported model.

    Raises:
        InputError: the format is unknown, the model does not exist, a library is not installed, or the format does not
            support the model.
        MachineError: the outputs differ by more than 1e-4 (2e-2 if the model computes in float16, 5e-2 in bfloat16).

    Example:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> export(model, "small", format="litert").path.name
        'small.tflite'

    Source: https://keras.io/api/models/model_saving_apis/export/
    """
    if format not in FORMATS:
        raise unknown("format", format, FORMATS)
    form = FORMATS[format]
    form.check_installed(running=check)
    path = Path(path)
    if form.suffix and path.suffix != form.suffix:
        path = path.with_name(path.name + form.suffix)
    check_path(path, form, overwrite=overwrite)
    with tempfile.TemporaryDirectory() as folder:
        alone = _on_one_device(model, Path(folder))
        inputs = examples.inputs_of(alone, example)
        # Keras's ONNX export also needs a loaded model to be called once.
        returned = keras.tree.flatten(alone(examples.given_to(alone, inputs, example), training=False))
        expected = [examples.plain(keras.ops.convert_to_numpy(each)) for each in returned]
        made = Path(folder, path.name)
        write(alone, form, made, None if getattr(alone, "inputs", None) else _signature(example))
        difference = _difference(alone, made, form, inputs, expected) if check else None
        put(made, path)
    sizes = {tensor.name: tuple(tensor.shape[1:]) for tensor in getattr(alone, "inputs", None) or []}
    shapes = {name: ((None, *sizes.get(name, value.shape[1:])), examples.kind(value)) for name, value in inputs.items()}
    files = path.rglob("*") if path.is_dir() else [path]
    size = sum(file.stat().st_size for file in files if file.is_file())
    return Exported(path, format, size, shapes, difference)


def _on_one_device(model: keras.Model | str | os.PathLike[str], folder: Path) -> keras.Model:
    if isinstance(model, keras.Model):
        if not model.built:
            raise InputError(f"{model.name!r} is not built. Call it on a batch, or fit it, before exporting it.")
        file = folder / "model.keras"
        model.save(file)
    else:
        file = Path(model)
        file = file / "model.keras" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"There is no model at {str(model)!r}. Give a .keras file or a run directory.")
    import tfgpu.models  # noqa: F401  registers the layers of tfgpu's builders

    # Custom layers may be registered or not.
    within = model_graph.layers_within(model).values() if isinstance(model, keras.Model) else ()
    classes = {type(each).__name__: type(each) for each in within if not type(each).__module__.startswith("keras.")}
    try:
        return keras.models.load_model(file, compile=False, custom_objects=classes)
    except Exception as error:
        if isinstance(model, keras.Model):
            is_split = any(sharded_variable.shard_info(v) or sharding.is_fully_sharded(v) for v in model.weights)
            is_split = is_split or model.distribute_strategy.num_replicas_in_sync > 1
            if not getattr(model, "inputs", None) or not is_split:
                return model  # it contains something that cannot be serialized
        raise InputError(_why_not(file, error)) from error


def _why_not(file: Path, error: Exception) -> str:
    """The message for a file that Keras cannot load."""
    if file.suffix == ".keras" and not zipfile.is_zipfile(file):
        return (
            f"{file} is damaged, or not a Keras model: it is not a complete `.keras` archive. If its run has "
            "checkpoints, `tfgpu train --resume --output RUN` writes it again."
        )
    said = str(error).strip()
    reason = said.splitlines()[0] if said else type(error).__name__
    if "safe_mode" in said or "`Lambda`" in said:
        return (
            f"{file} contains code (a Lambda layer, or one that loads another model), which is not executed. If you "
            "trust it, load it with `keras.models.load_model(file, safe_mode=False)`, and pass the model to "
            "`tfgpu.serving.export`."
        )
    if missing := re.search(r"Could not locate (?:class|function) '([^']+)'", said):
        return (
            f"{file} uses the class {missing[1]}, which is not registered. Decorate the class with "
            "`@keras.saving.register_keras_serializable()`, import its module, load the model, and pass it to "
            "`tfgpu.serving.export`."
        )
    return f"{file} cannot be loaded: {reason} Import the modules of its layers first."


def _signature(example: object) -> object:
    def spec(value):
        array = np.asarray(value)
        return keras.InputSpec(shape=(None, *array.shape[1:]), dtype=examples.kind(array))

    return keras.tree.map_structure(spec, example)


def _difference(
    model: keras.Model, made: Path, form: Format, inputs: dict[str, np.ndarray], expected: list[np.ndarray]
) -> float:
    received = run(made, inputs)
    if len(expected) != len(received):
        raise MachineError(f"The {form.name} export has {len(received)} outputs, the model {len(expected)}.")
    largest = 0.0
    for mine, theirs in zip(expected, received, strict=True):
        if mine.shape != theirs.shape:
            raise MachineError(f"The {form.name} export returns shape {theirs.shape}, the model {mine.shape}.")
        largest = max(largest, _distance(mine, theirs))
    allowed = max(TOLERANCE.get(each, 1e-4) for each in computes_in(model))
    if not largest <= allowed:
        raise MachineError(
            f"The outputs of the {form.name} export differ from the model's by {largest:.1e}, more than {allowed:.0e}. "
            "Nothing was written. Use check=False (--no-check) if you accept the difference."
        )
    return largest


def _distance(mine: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, relative to the largest value if that is above 1; infinite if only one is NaN."""
    if not mine.size:
        return 0.0
    if mine.dtype.kind == "S":
        return 0.0 if np.array_equal(mine, examples.plain(theirs)) else float("inf")
    mine, theirs = mine.astype("float64"), theirs.astype("float64")
    same = (mine == theirs) | (np.isnan(mine) & np.isnan(theirs))
    with np.errstate(invalid="ignore"):
        apart = np.where(same, 0.0, np.abs(mine - theirs))
    finite = np.abs(mine[np.isfinite(mine)])
    largest = float(np.nan_to_num(apart, nan=np.inf).max())
    return largest / max(1.0, float(finite.max(initial=0.0)))
