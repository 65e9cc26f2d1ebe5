"""What a model learns besides one class per example: the kind, shape and classes of each target."""

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
        kind: `"class"`, one per example; `"places"`, a class at each place of a sequence or a mask; `"numbers"`; or
            `"other"`, such as boxes.
        shape: for one example; () for a class and for one number.
        classes: the number of classes, also of boxes if their labels are known; 0 for masks in files, which are not all
            read to count them.
        class_names: one name for each of them.
    """

    kind: str
    shape: tuple[int, ...] = ()
    classes: int = 0
    class_names: tuple[str, ...] = ()


def targets_of(structure: Structure | None, shape: Any = ()) -> Target | Mapping[str, Target] | None:
    """The target, or the targets by name; None where the model learns classes or tokens alone.

    Args:
        structure: of the examples.
        shape: of one example's inputs.

    Example:
        >>> targets_of(Structure(targets=np.array([[0.5, 1.5]], "float32")))
        Target(kind='numbers', shape=(2,), classes=0, class_names=())
    """
    if structure is None or structure.targets is None:
        return None
    if not isinstance(structure.targets, Mapping):
        return _target(structure.targets, ())
    found = {name: _target(each, structure.class_names.get(name, ())) for name, each in structure.targets.items()}
    return found | {MASKS: Target("places", tuple(shape[:2]))} if structure.planes else found


def _target(values: Any, class_names: tuple[str, ...]) -> Target:
    if isinstance(values, Mapping):
        labels = values.get("labels")
        found = int(labels.max()) + 1 if isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" else 0
        return Target("other", (), len(class_names) or max(found, 0), class_names)
    if values.dtype.kind == "f":
        return Target("numbers", values.shape[1:])
    if values.min() < 0:
        return Target("other", values.shape[1:])
    classes = int(values.max()) + 1
    if values.ndim > 1:
        return Target("places", values.shape[1:], classes)
    return Target("class", (), classes, class_names or tuple(map(str, range(classes))))
