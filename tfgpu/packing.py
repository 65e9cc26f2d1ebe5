"""Plain values and arrays as JSON beside arrays, and as one file: nothing in it can be run, and damage is found."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tensorflow as tf

from tfgpu import atomic
from tfgpu.errors import InputError

_TAG = "!"
_KIND, _FACTS, _HASH = "tfgpu", "facts", "sha256"


def to_json(value: Any, arrays: dict[str, np.ndarray], *, under: str) -> Any:
    """A value as JSON has it; arrays go to `arrays`, and what JSON does not tell apart gets a tag.

    Args:
        value: None, numbers, text, NumPy arrays and scalars, in lists, tuples and dicts.
        arrays: gets the arrays.
        under: what their names begin with.

    Example:
        >>> arrays = {}
        >>> to_json({"a": (1, np.ones(2))}, arrays, under="memory")["a"]["of"][1]["at"], list(arrays)
        ('memory/0000', ['memory/0000'])
    """
    if isinstance(value, (np.ndarray, np.generic)):
        name = f"{under}/{sum(name.startswith(under) for name in arrays):04d}"
        bits = np.ascontiguousarray(value).reshape(np.shape(value))
        arrays[name] = bits.view(f"u{bits.itemsize}") if bits.dtype.kind == "V" else bits
        kind = "number" if isinstance(value, np.generic) else "array"
        return {_TAG: kind, "at": name, "dtype": tf.as_dtype(value.dtype).name}
    if isinstance(value, tuple):
        return {_TAG: "tuple", "of": [to_json(item, arrays, under=under) for item in value]}
    if isinstance(value, list):
        return [to_json(item, arrays, under=under) for item in value]
    if isinstance(value, dict):
        if _TAG not in value and all(isinstance(key, str) for key in value):
            return {key: to_json(item, arrays, under=under) for key, item in value.items()}
        return {_TAG: "dict", "of": [[key, to_json(item, arrays, under=under)] for key, item in value.items()]}
    return value


def from_json(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """What `to_json` was given.

    Example:
        >>> from_json(to_json((1, [2]), {}, under=""), {})
        (1, [2])
    """
    if isinstance(value, list):
        return [from_json(item, arrays) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_TAG)
    if kind is None:
        return {key: from_json(item, arrays) for key, item in value.items()}
    if kind == "tuple":
        return tuple(from_json(item, arrays) for item in value["of"])
    if kind == "dict":
        return {key: from_json(item, arrays) for key, item in value["of"]}
    array, dtype = arrays[value["at"]], np.dtype(tf.as_dtype(value["dtype"]).as_numpy_dtype)
    array = array.view(dtype) if dtype.kind == "V" else array
    return array[()] if kind == "number" else array


def write(path: str | Path, kind: str, value: Any) -> None:
    """Writes a value into one file (safetensors): beside its place, flushed to the disk, and renamed.

    Args:
        path: the file; its folder exists.
        kind: what it holds, for `read`.
        value: as for `to_json`.

    Raises:
        OSError: it could not be written; what was there before is still there.

    Example:
        >>> write("memory.safetensors", "numbers", {"a": np.arange(3)})
        >>> read("memory.safetensors", "numbers")["a"].tolist()
        [0, 1, 2]
    """
    arrays: dict[str, np.ndarray] = {}
    facts = json.dumps(to_json(value, arrays, under="a"))
    content = safetensors.numpy.save(arrays, {_KIND: kind, _FACTS: facts, _HASH: _hash(facts, arrays)})
    atomic.write_bytes(path, content)


def read(path: str | Path, kind: str) -> Any:
    """Reads what `write` wrote.

    Raises:
        InputError: there is no such file, it is damaged, or it holds something else.
    """
    try:
        with safetensors.safe_open(path, "numpy") as file:
            facts = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if facts.get(_KIND) == kind and facts.get(_HASH) == _hash(facts[_FACTS], arrays):
            return from_json(json.loads(facts[_FACTS]), arrays)
        found = "damaged: its hash differs" if facts.get(_KIND) == kind else "another file"
    except (OSError, ValueError, LookupError, TypeError, AttributeError, safetensors.SafetensorError) as error:
        found = "not there" if isinstance(error, FileNotFoundError) else f"damaged, or another file ({error})"
    raise InputError(f"`path` must be a file of a {kind}. Received: {str(path)!r}, which is {found}. Use another copy.")


def _hash(facts: str, arrays: dict[str, np.ndarray]) -> str:
    whole = hashlib.sha256(facts.encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        whole.update(f"{name} {array.dtype} {array.shape}".encode())
        whole.update(array.tobytes())
    return whole.hexdigest()
