"""Example rows on which a model and its export are compared."""

import json
import zipfile
from collections.abc import Mapping
from pathlib import Path

import keras
import numpy as np

from tfgpu.errors import InputError

ROWS = 4
OTHER_LENGTH = 16  # for a dimension of any size


def inputs_of(model: keras.Model, example: object) -> dict[str, np.ndarray]:
    """Returns example rows by the input names of the exported model.

    Args:
        model: a built model.
        example: arrays in the structure of the model's inputs; `None` draws random ones.

    Returns:
        Arrays by name, in the order of the model's inputs.

    Raises:
        InputError: an example is required, or does not match the inputs.
    """
    known = getattr(model, "inputs", None)
    if example is None:
        if not known:
            fix = "Give `example` (--example FILE) with its input arrays."
            raise InputError(f"The inputs of {model.name!r} are unknown. {fix}")
        return {tensor.name: _drawn(model, tensor) for tensor in known}
    if not known:
        return {"args_0" if at == 0 else f"args_0_{at}": plain(v) for at, v in enumerate(keras.tree.flatten(example))}
    given = _given(model, known, example)
    found = {tensor.name: _held(tensor, value) for tensor, value in zip(known, given, strict=True)}
    for tensor in known:
        shape, received = tensor.shape, found[tensor.name].shape
        fits = len(shape) == len(received) and all(a in (None, b) for a, b in zip(shape, received, strict=True))
        if not fits or not received[0]:
            raise InputError(
                f"The example for {tensor.name!r} must be an array of {('rows', *shape[1:])}. Received: {received}."
            )
    rows = {name: len(array) for name, array in found.items()}
    if len(set(rows.values())) > 1:
        raise InputError(f"All inputs of the example must have the same number of rows. Received: {rows}.")
    return found


def read(path: str | Path) -> object:
    """Reads example rows from a file; its suffix selects the format.

    Args:
        path: `.txt`: one text per line, in UTF-8. `.json`: a list of rows, or such lists by the inputs' names. `.npy`:
            an array. `.npz`: an array for each input, by name. Nothing is unpickled.

    Returns:
        An `example` for `inputs_of`.

    Raises:
        InputError: the file is missing, has another suffix, has no rows, or is damaged.
    """
    path = Path(path)
    readers = {".txt": _texts, ".json": _json, ".npy": _arrays, ".npz": _arrays}
    if path.suffix not in readers:
        raise InputError(f"--example must end in {', '.join(readers)}. Received: {str(path)!r}.")
    try:
        found = readers[path.suffix](path)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except RecursionError:
        raise InputError(f"{path} cannot be parsed: its lists are nested too deeply.") from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be parsed: {error}. Write it again.") from None
    if not all(map(np.size, found.values() if isinstance(found, Mapping) else [found])) or not len(found):
        raise InputError(f"{path} has no rows. Give at least one.")
    return found


def given_to(model: keras.Model, inputs: Mapping[str, np.ndarray], example: object) -> object:
    """The rows in the structure of the model's call."""
    if not getattr(model, "inputs", None):
        return example
    values = [*map(keras.ops.convert_to_tensor, inputs.values())]
    return values[0] if len(values) == 1 else keras.tree.pack_sequence_as(model.input, values)


def plain(value: object, dtype: str | None = None) -> np.ndarray:
    """Converts to an array that can be stored; texts become UTF-8 bytes."""
    found = np.asarray(value)
    if found.dtype.kind in "OU":
        texts = [text if isinstance(text, bytes) else str(text).encode() for text in found.ravel()]
        found = np.array(texts, bytes).reshape(found.shape)
    return found if dtype in (None, "string") else found.astype(dtype)


def _held(tensor: keras.KerasTensor, value: object) -> np.ndarray:
    """Converts an example array to the type of the model's input, if that is lossless."""
    received = plain(value)
    takes = "texts" if tensor.dtype == "string" else tensor.dtype
    fault = f"The example for {tensor.name!r} must be of {takes}"
    if received.dtype.kind not in "biufVS" or (tensor.dtype == "string") != (received.dtype.kind == "S"):
        raise InputError(f"{fault}. Received: {'texts' if received.dtype.kind == 'S' else received.dtype}.")
    if tensor.dtype == "string":
        return received
    try:
        with np.errstate(invalid="ignore"):
            found = received.astype(tensor.dtype)
            same = found.dtype.kind not in "biu" or received.dtype == found.dtype or found == received
    except (ValueError, TypeError):
        raise InputError(f"{fault}. Received: {received.dtype}.") from None
    if not np.all(same):
        raise InputError(f"{fault}, which cannot represent {received[~same].flat[0]}.")
    return found


def kind(array: np.ndarray) -> str:
    """The name of an array's type."""
    return "string" if array.dtype.kind in "OSU" else str(array.dtype)


def _texts(path: Path) -> np.ndarray:
    return np.array(path.read_text(encoding="utf-8-sig").splitlines(), dtype=object)


def _json(path: Path) -> object:
    found = json.loads(path.read_text(encoding="utf-8-sig"))
    if isinstance(found, Mapping):
        return {name: _rows(rows) for name, rows in found.items()}
    return _rows(found)


def _rows(rows: object) -> np.ndarray:
    found = np.array(rows)  # refuses rows of different lengths
    if not found.ndim or found.dtype.kind not in "biufU":
        raise ValueError("rows must be lists of numbers or texts")
    if found.dtype.kind == "U":
        return found.astype(object)
    return found.astype(keras.config.floatx()) if found.dtype.kind == "f" else found


def _arrays(path: Path) -> object:
    found = np.load(path, allow_pickle=False)
    if isinstance(found, np.ndarray):
        return found
    with found:
        return {name: found[name] for name in found}


def _given(model: keras.Model, known: list, example: object) -> list:
    """The example's arrays in the order of the model's inputs."""
    names, parts = [tensor.name for tensor in known], keras.tree.flatten(example)
    if isinstance(example, Mapping) and set(example) == set(names):
        return [example[name] for name in names]
    if isinstance(example, Mapping) and len(names) == 1 < len(example):
        raise InputError(f"The only input of the model is {names[0]}. Received: {', '.join(map(str, example))}.")
    if len(names) == 1:  # a list may be a list of rows
        is_boxed = len(parts) == 1 and np.ndim(parts[0]) == len(known[0].shape)
        return [parts[0] if is_boxed else example]
    structure = model.input
    if isinstance(example, Mapping):
        is_known = isinstance(structure, Mapping) and set(structure) == set(example)
    else:
        is_known = not isinstance(structure, Mapping)
        parts = list(example) if isinstance(example, list | tuple) and len(example) == len(names) else parts
    if len(parts) != len(names) or not is_known:
        raise InputError(f"The model's inputs are {', '.join(names)}. Give `example` by these names, or in this order.")
    return parts


def _drawn(model: keras.Model, tensor: keras.KerasTensor) -> np.ndarray:
    if tensor.dtype == "string":
        raise InputError(
            f"{model.name!r} has text inputs, for which no example can be drawn. Give some texts to compare on: "
            "`tfgpu.serving.export(..., example=TEXTS)`, or `tfgpu export ... --example FILE.txt`."
        )
    random = np.random.default_rng(0)
    shape = (ROWS, *(OTHER_LENGTH if size is None else size for size in tensor.shape[1:]))
    if "int" in tensor.dtype or tensor.dtype == "bool":
        return random.integers(0, 2, shape).astype(tensor.dtype)
    return random.normal(size=shape).astype(tensor.dtype)
