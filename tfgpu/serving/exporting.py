"""From a model, a `.keras` file or a run directory to a file that other programs run, with the same outputs."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from tfgpu.errors import InputError, MachineError, unknown
from tfgpu.serving.formats import FORMATS, Format, computes_in, write
from tfgpu.serving.running import run

ROWS = 4
OTHER_LENGTH = 16  # of an axis that may have any length
TOLERANCE = {"float32": 1e-4, "float16": 2e-2, "bfloat16": 5e-2}


@dataclass(frozen=True)
class Exported:
    """What was written.

    Args:
        path: the file, or a SavedModel's folder.
        format: a name in `FORMATS`.
        bytes: its size on the disk.
        inputs: shape and type of each input by name; the first axis, of the rows, may have any length.
        difference: the largest difference of its outputs from the model's, relative to the largest output where that is
            above 1; `None` where it was not checked.
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
    """Writes a model for other programs, runs it there, and compares its outputs with the model's.

    The model is taken as one device's: what lies on replicas, in parts or in stages is brought together first. It is
    written aside and renamed, so a failure leaves nothing behind.

    Args:
        model: a built Keras model, a `.keras` file, or a run directory of `tfgpu train`.
        path: where to; the format's ending (`.onnx`, `.tflite`) is added where it is missing.
        format: `"savedmodel"` (TensorFlow Serving, C++, Java), `"onnx"` (ONNX Runtime, TensorRT), `"litert"` (phones).
        example: arrays `[rows, ...]` in the structure that the model takes, to be compared on; `None` draws 4 rows.
            Needed for a subclassed model.
        check: run what was written in a process of its own, and compare.
        overwrite: replace what is there.

    Returns:
        The facts of what was written.

    Raises:
        InputError: an unknown format, no model, a library that is not installed, something that the format lacks.
        MachineError: the outputs differ by more than 1e-4 (2e-2 where the model computes in float16, 5e-2 in bfloat16).

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
    if path.exists() and not overwrite:
        raise InputError(f"{path} exists. Choose another place, or give overwrite=True (--overwrite).")
    with tempfile.TemporaryDirectory() as folder:
        alone = _on_one_device(model, Path(folder))
        inputs = _inputs(alone, example)
        expected = _outputs(alone, inputs, example)
        made = Path(folder, path.name)
        write(alone, form, made, None if getattr(alone, "inputs", None) else _signature(example))
        difference = _difference(alone, made, form, inputs, expected) if check else None
        if overwrite and path.exists():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(made, path)
    shapes = {name: ((None, *value.shape[1:]), str(value.dtype)) for name, value in inputs.items()}
    return Exported(path, format, _size(path), shapes, difference)


def _on_one_device(model: keras.Model | str | os.PathLike[str], folder: Path) -> keras.Model:
    if isinstance(model, keras.Model):
        if not model.built:
            raise InputError(f"{model.name!r} is not built. Call it on a batch, or fit it, before you export it.")
        file = folder / "model.keras"
        model.save(file)
    else:
        file = Path(model)
        file = file / "model.keras" if file.is_dir() else file
        if not file.is_file():
            raise InputError(f"There is no model at {str(model)!r}. Give a .keras file or a run directory.")
    import tfgpu.models  # noqa: F401  registers the layers that our builders use

    try:
        return keras.models.load_model(file, compile=False)
    except Exception as error:
        if isinstance(model, keras.Model) and not getattr(model, "inputs", None):
            return model  # of a class of one's own that does not say how it is made
        raise InputError(_why_not(file, error)) from error


def _why_not(file: Path, error: Exception) -> str:
    """Says what to do about a file that Keras does not load."""
    said = str(error).strip()
    reason = said.splitlines()[0] if said else type(error).__name__
    if "safe_mode" in said or "`Lambda`" in said:
        return (
            f"{file} holds code (a Lambda layer, or one that loads another model), which is not run. If you trust it, "
            "load it yourself by `keras.models.load_model(file, safe_mode=False)`, and give `tfgpu.export` the model."
        )
    return f"{file} cannot be loaded: {reason} Import the module of its layers first."


def _inputs(model: keras.Model, example: object) -> dict[str, np.ndarray]:
    """Rows to compare on, by the name that the exported model has for each input."""
    if example is not None:
        given = keras.tree.flatten(example)
        names = _names(model, len(given))
        return {name: np.asarray(value) for name, value in zip(names, given, strict=True)}
    if not getattr(model, "inputs", None):
        raise InputError(f"{model.name!r} does not say what it takes. Give `example`: arrays as it is called with.")
    random = np.random.default_rng(0)
    found = {}
    for tensor in model.inputs:
        shape = (ROWS, *(OTHER_LENGTH if size is None else size for size in tensor.shape[1:]))
        if tensor.dtype == "string":
            raise InputError(f"{model.name!r} takes text. Give `example`: some texts to compare on.")
        if "int" in tensor.dtype or tensor.dtype == "bool":
            found[tensor.name] = random.integers(0, 2, shape).astype(tensor.dtype)
        else:
            found[tensor.name] = random.normal(size=shape).astype(tensor.dtype)
    return found


def _names(model: keras.Model, count: int) -> list[str]:
    if getattr(model, "inputs", None):
        return [tensor.name for tensor in model.inputs]
    return ["args_0" if at == 0 else f"args_0_{at}" for at in range(count)]


def _signature(example: object) -> object:
    return keras.tree.map_structure(
        lambda value: keras.InputSpec(shape=(None, *np.shape(value)[1:]), dtype=str(np.asarray(value).dtype)), example
    )


def _outputs(model: keras.Model, inputs: dict[str, np.ndarray], example: object) -> list[np.ndarray]:
    """The model's own; Keras's ONNX asks that a loaded model has been called once."""
    if example is None:
        values = [*inputs.values()]
        example = values[0] if len(values) == 1 else keras.tree.pack_sequence_as(model.input, values)
    return [keras.ops.convert_to_numpy(each) for each in keras.tree.flatten(model(example, training=False))]


def _difference(
    model: keras.Model, made: Path, form: Format, inputs: dict[str, np.ndarray], expected: list[np.ndarray]
) -> float:
    received = run(made, inputs)
    if len(expected) != len(received):
        raise MachineError(f"The {form.name} has {len(received)} outputs, the model {len(expected)}.")
    largest = 0.0
    for mine, theirs in zip(expected, received, strict=True):
        mine, theirs = mine.astype("float64"), theirs.astype("float64")
        if mine.shape != theirs.shape:
            raise MachineError(f"The {form.name} gives the shape {theirs.shape}, the model {mine.shape}.")
        if mine.size:
            largest = max(largest, float(np.abs(mine - theirs).max() / max(1.0, np.abs(mine).max())))
    allowed = max(TOLERANCE.get(each, 1e-4) for each in computes_in(model))
    if not largest <= allowed:
        raise MachineError(
            f"The {form.name}'s outputs differ from the model's by {largest:.1e}, more than {allowed:.0e}. Nothing was "
            "written. Give check=False (--no-check) if that is small enough for you."
        )
    return largest


def _size(path: Path) -> int:
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())
