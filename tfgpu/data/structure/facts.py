"""What a model learns beside one class per example: the kind, shape and classes of each target."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfgpu.data.augmentation.targets import MASKS
from tfgpu.data.structure.arrays import Structure


@dataclass(frozen=True)
class Target:
    """What a model learns under one name.

    Attributes:
        kind: `"class"`, one per example; `"numbers"`; or `"other"`: sequences, boxes, masks.
        shape: of one example's; () for a class and for one number.
        classes: the number of classes, for `"class"`, and of boxes whose classes have names.
        class_names: one name for each of them.
    """

    kind: str
    shape: tuple[int, ...] = ()
    classes: int = 0
    class_names: tuple[str, ...] = ()


def targets_of(structure: Structure | None) -> Target | Mapping[str, Target] | None:
    """The target, or the targets by name; None where the model learns classes or tokens alone.

    Example:
        >>> targets_of(Structure(targets=np.array([[0.5, 1.5]], "float32")))
        Target(kind='numbers', shape=(2,), classes=0, class_names=())
    """
    if structure is None or structure.targets is None:
        return None
    if not isinstance(structure.targets, Mapping):
        return _target(structure.targets, ())
    found = {name: _target(each, structure.class_names.get(name, ())) for name, each in structure.targets.items()}
    return found | {MASKS: Target("other")} if structure.planes else found


def _target(values: Any, class_names: tuple[str, ...]) -> Target:
    if isinstance(values, Mapping) or values.dtype == np.uint8:
        return Target("other", () if isinstance(values, Mapping) else values.shape[1:], len(class_names), class_names)
    if values.dtype.kind == "f":
        return Target("numbers", values.shape[1:])
    if values.ndim > 1 or values.min() < 0:
        return Target("other", values.shape[1:])
    classes = int(values.max()) + 1
    return Target("class", (), classes, class_names or tuple(map(str, range(classes))))
