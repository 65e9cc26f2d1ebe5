"""Keeps the workers' copies of a `PyDataset` alike, although each makes other batches of it.

`__getitem__` may draw random numbers, and a worker that makes fewer batches draws fewer. What `on_epoch_end` draws
then, such as a new order, would differ. So before it runs all workers take over the chief's random states: of
`random`, of `numpy.random`, and of the generators that the dataset holds. What it has changed is compared.
"""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping

import numpy as np

from tfgpu.errors import InputError

_MOST = 1 << 16
"""Elements of an array that are compared; of a larger one, as many at equal distances."""


def states(dataset: object) -> str:
    """The random states of this process and of a dataset, as a text."""
    found = {"random": random.getstate(), "numpy.random": np.random.get_state(legacy=False)}
    found |= {name: _state(generator) for name, generator in _generators(dataset)}
    return json.dumps(found, default=_plain)


def take_over(dataset: object, text: str) -> None:
    """Sets the random states that `states` has told on another worker."""
    found = json.loads(text, object_hook=_array)
    random.setstate(_as_tuple(found["random"]))
    np.random.set_state(found["numpy.random"])
    for name, generator in _generators(dataset):
        if name not in found:
            continue
        if isinstance(generator, random.Random):
            generator.setstate(_as_tuple(found[name]))
        elif isinstance(generator, np.random.RandomState):
            generator.set_state(found[name])
        else:
            generator.bit_generator.state = found[name]


def marks(dataset: object) -> dict[str, str]:
    """A hash of each attribute of a dataset that can be compared, by name."""
    return {name: _mark(value) for name, value in _attributes(dataset) if not _is_generator(value)}


def changed(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str]:
    """The hashes of attributes that are new or others."""
    return {name: mark for name, mark in after.items() if mark and before.get(name) != mark}


def check(name: str, chief: Mapping[str, str], mine: Mapping[str, str], worker: str) -> None:
    """Compares what an epoch's end has changed.

    Args:
        name: of the dataset's class.
        chief: of `changed`, on the first worker.
        mine: on this one.
        worker: this one's name.

    Raises:
        InputError: it is not the same.
    """
    for attribute in sorted({*chief, *mine}):
        if chief.get(attribute) != mine.get(attribute):
            raise InputError(
                f"`{attribute}` of `{name}` is not the same on {worker} as on the first worker after the end of an "
                "epoch, so the workers would make batches of different rows. In `on_epoch_end`, draw from `random`, "
                "from `numpy.random` or from a generator that is an attribute of the dataset, and change nothing that "
                "`__getitem__` changes too; or make whole batches on every worker with `tfgpu.strategy("
                'python_data="everywhere")`.'
            )


def _attributes(dataset: object) -> Iterator[tuple[str, object]]:
    return iter(sorted(getattr(dataset, "__dict__", {}).items()))


def _is_generator(value: object) -> bool:
    return isinstance(value, random.Random | np.random.RandomState | np.random.Generator)


def _generators(dataset: object) -> Iterator[tuple[str, object]]:
    return ((f"self.{name}", value) for name, value in _attributes(dataset) if _is_generator(value))


def _state(generator: object) -> object:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return generator.get_state(legacy=False)
    return generator.bit_generator.state


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        return {"array": value.tolist(), "dtype": str(value.dtype)}
    return value.item()  # a NumPy number


def _array(found: dict) -> object:
    return np.array(found["array"], found["dtype"]) if found.keys() == {"array", "dtype"} else found


def _as_tuple(found: object) -> object:
    return tuple(map(_as_tuple, found)) if isinstance(found, list) else found


def _mark(value: object) -> str:
    """A hash of a value; empty if it cannot be compared."""
    if hasattr(value, "to_numpy") and hasattr(value, "index"):  # a table of pandas: its order
        value = np.asarray(value.index)
    if isinstance(value, list | tuple | range):
        value = [value[at] for at in range(0, len(value), -(-len(value) // _MOST) or 1)]
        if not all(isinstance(each, str | bytes | int | float | np.number | tuple) for each in value):
            return ""
        content = repr(value).encode()
    elif isinstance(value, np.memmap):  # it may be larger than the memory, and nobody shuffles it in its place
        return ""
    elif isinstance(value, np.ndarray) and value.dtype != object:
        flat = value.reshape(-1)[:: -(-value.size // _MOST) or 1]
        content = repr((value.shape, str(value.dtype))).encode() + np.ascontiguousarray(flat).tobytes()
    elif isinstance(value, str | bytes | int | float | np.number | None):
        content = repr(value).encode()
    else:
        return ""
    return hashlib.sha256(content).hexdigest()[:16]
