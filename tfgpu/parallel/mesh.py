"""`parallel.Mesh`: the axes along which a model is spread over devices, and the position of each device.

A mesh is a description: one for 64 GPUs can be made, and planned with, on a laptop.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tfgpu.errors import InputError, unknown, whole_number

AXES = ("data", "pipeline", "expert", "sequence", "tensor")
"""From the outermost to the innermost: neighbors along `tensor` communicate most, so they are adjacent devices."""

_RARE = ("expert", "sequence")
"""Axes that are shown only where they have more than one device."""

_NAME = re.compile(r"(?:([0-9]+)/)?(CPU|GPU):([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Mesh:
    """The sizes of the axes along which a model is spread, and the devices.

    Devices are counted with `tensor` innermost, then `sequence`, `expert`, `pipeline` and `data`: with two each of
    `tensor`, `pipeline` and `data`, devices 0 and 1 share the layers of one stage, 2 and 3 those of the next, and 4 to
    7 are the second copy of the model.

    Args:
        data: copies of the model, each of which trains on its part of the batch.
        pipeline: stages that each copy is split into.
        tensor: shards that a stage's large layers are split into.
        sequence: parts that each sequence is split into; each device computes its part of the positions.
        expert: parts that the experts of a mixture are split into. Each device trains on its rows of the batch, and
            tokens go to the devices of their experts and back.
        devices: names in that order, such as `("GPU:0", "GPU:1")`, in a cluster with the number of the process
            (`"1/GPU:0"`); None takes the available devices when the mesh is used.

    Raises:
        InputError: a size is not an integer above 0, the sizes do not multiply to the number of devices, or a name
            is not a device's or is listed twice.

    Example:
        >>> mesh = Mesh(data=2, pipeline=2, devices=["GPU:0", "GPU:1", "GPU:2", "GPU:3"])
        >>> mesh.device(data=1, pipeline=0)
        'GPU:2'
        >>> mesh.along("pipeline")
        (('GPU:0', 'GPU:1'), ('GPU:2', 'GPU:3'))
    """

    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    devices: tuple[str, ...] | None = None
    sequence: int = 1
    expert: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            whole_number(axis, size)
        if self.devices is not None:
            object.__setattr__(self, "devices", _named(self.devices))
            self.check(len(self.devices))

    @property
    def size(self) -> int:
        """The number of devices that it needs."""
        return math.prod(getattr(self, axis) for axis in AXES)

    def check(self, count: int) -> None:
        """Refuses a number of devices that the sizes do not multiply to, and suggests sizes that would fit.

        Raises:
            InputError: as described.

        Example:
            >>> Mesh(data=3, pipeline=2).check(8)
            Traceback (most recent call last):
            tfgpu.errors.InputError: Mesh(data=3, pipeline=2, tensor=1) takes 6 devices; there are 8. These fit: data=4.
        """
        if self.size != count:
            raise InputError(f"{self} takes {self.size} devices; there are {count}. These fit: {self._fitting(count)}.")

    def on(self, devices: Iterable[str]) -> "Mesh":
        """The same sizes on devices of these names.

        Raises:
            InputError: their number does not fit, or this mesh has other devices.
        """
        found = dataclasses.replace(self, devices=tuple(devices))
        if self.devices not in (None, found.devices):
            raise InputError(f"This mesh already has devices: {', '.join(self.devices)}.")
        return found

    def device(self, data: int = 0, pipeline: int = 0, tensor: int = 0, sequence: int = 0, expert: int = 0) -> str:
        """The name of the device at a position.

        Args:
            data: which copy of the model, from 0; the others alike.

        Raises:
            InputError: the mesh has no devices yet, or no such position.
        """
        if self.devices is None:
            raise InputError(f"{self} has no devices yet. Give `devices=[...]`, or call `mesh.on(names)`.")
        place = 0
        for axis, at in zip(AXES, (data, pipeline, expert, sequence, tensor), strict=True):
            size = getattr(self, axis)
            if not 0 <= at < size:
                raise InputError(f"{self} has {axis} from 0 to {size - 1}. Received: {axis}={at}.")
            place = place * size + at
        return self.devices[place]

    def along(self, axis: str) -> tuple[tuple[str, ...], ...]:
        """The groups of devices that differ along one axis only.

        Args:
            axis: `"data"`, `"pipeline"`, `"expert"`, `"sequence"` or `"tensor"`.

        Raises:
            InputError: there is no such axis, or the mesh has no devices yet.
        """
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
        others = [name for name in AXES if name != axis]
        found = []
        for place in itertools.product(*(range(getattr(self, name)) for name in others)):
            group = dict(zip(others, place, strict=True))
            found.append(tuple(self.device(**group, **{axis: at}) for at in range(getattr(self, axis))))
        return tuple(found)

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={getattr(self, axis)}' for axis in self._shown())})"

    def _shown(self) -> list[str]:
        return [axis for axis in AXES if axis not in _RARE or getattr(self, axis) > 1]

    def _fitting(self, count: int) -> str:
        """Sizes that multiply to a number of devices: those that differ along one axis, or else the closest ones."""
        used = self._shown()
        sizes = {axis: getattr(self, axis) for axis in used}
        others = {axis: self.size // size for axis, size in sizes.items()}
        found = [f"{axis}={count // other}" for axis, other in others.items() if count % other == 0]
        if not found:
            shapes = itertools.product(_divisors(count), repeat=len(used))
            fit = (shape for shape in shapes if math.prod(shape) == count)
            nearest = sorted(
                fit, key=lambda shape: sum(abs(math.log(a / b)) for a, b in zip(shape, sizes.values(), strict=True))
            )
            found = [
                f"({', '.join(f'{axis}={at}' for axis, at in zip(used, shape, strict=True))})" for shape in nearest[:3]
            ]
        return " or ".join(found)


def _divisors(count: int) -> list[int]:
    return [number for number in range(1, count + 1) if count % number == 0]


def _named(devices: Iterable[str]) -> tuple[str, ...]:
    if isinstance(devices, str):
        raise InputError(f"`devices` must be names, such as ['GPU:0', 'GPU:1']. Received: {devices!r}.")
    found = []
    for device in devices:
        match = _NAME.fullmatch(device) if isinstance(device, str) else None
        if match is None:
            raise InputError(f"A device's name is like 'GPU:0', or '1/GPU:0' in process 1. Received: {device!r}.")
        process, kind, number = match.groups()
        found.append(("" if process is None else f"{int(process)}/") + f"{kind.upper()}:{int(number)}")
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise InputError(f"A device can be at one position of a mesh only. Listed twice: {', '.join(twice)}.")
    return tuple(found)
