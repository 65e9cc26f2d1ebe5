"""The axes along which a model is spread over devices, and which device stands where.

No device is asked for here: a mesh for 64 GPUs can be made, and planned with, on a laptop.
"""

import itertools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from tfgpu.errors import InputError, unknown

AXES = ("data", "pipeline", "tensor")
"""From the outermost to the innermost: neighbours along `tensor` talk most, and are devices that lie side by side."""

_NAME = re.compile(r"(?:([0-9]+)/)?(CPU|GPU):([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Mesh:
    """How many ways a model is spread along each axis.

    The devices are counted with `tensor` innermost, then `pipeline`, then `data`: with two of each, the devices 0 and 1
    share the tensors of one stage, 2 and 3 those of the next, and 4 to 7 are the second copy of the model.

    Args:
        data: copies of the model, each of which learns from its part of the batch.
        pipeline: stages that each copy is cut into.
        tensor: parts that a stage's large layers are cut into.
        devices: the names in that order, such as `("GPU:0", "GPU:1")`, with the number of the process before it on a
            cluster (`"1/GPU:0"`); None takes what is there when the mesh is used.

    Raises:
        InputError: a size is no whole number from 1, the sizes do not multiply to the number of devices, or a name is
            none or stands there twice.

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

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise InputError(f"`{axis}` must be a whole number from 1. Received: {size!r}.")
        if self.devices is not None:
            object.__setattr__(self, "devices", _named(self.devices))
            self.check(len(self.devices))

    @property
    def size(self) -> int:
        """How many devices it takes."""
        return self.data * self.pipeline * self.tensor

    def check(self, count: int) -> None:
        """Refuses a number of devices that the sizes do not multiply to, and names the sizes that would fit.

        Raises:
            InputError: as said.

        Example:
            >>> Mesh(data=3, pipeline=2).check(8)
            Traceback (most recent call last):
            tfgpu.errors.InputError: Mesh(data=3, pipeline=2, tensor=1) takes 6 devices; there are 8. What fits: data=4.
        """
        if self.size != count:
            raise InputError(f"{self} takes {self.size} devices; there are {count}. What fits: {self._fitting(count)}.")

    def on(self, devices: Iterable[str]) -> "Mesh":
        """The same sizes on devices of these names.

        Raises:
            InputError: their number does not fit, or this mesh has other devices already.
        """
        found = Mesh(self.data, self.pipeline, self.tensor, tuple(devices))
        if self.devices not in (None, found.devices):
            raise InputError(f"This mesh has its devices already: {', '.join(self.devices)}.")
        return found

    def device(self, data: int = 0, pipeline: int = 0, tensor: int = 0) -> str:
        """The name of the device at a place.

        Args:
            data: which copy of the model, from 0; `pipeline` and `tensor` alike.

        Raises:
            InputError: the mesh has no devices yet, or no such place.
        """
        if self.devices is None:
            raise InputError(f"{self} has no devices yet. Give `devices=[...]`, or call `mesh.on(names)`.")
        place = 0
        for axis, at in zip(AXES, (data, pipeline, tensor), strict=True):
            size = getattr(self, axis)
            if not 0 <= at < size:
                raise InputError(f"{self} has {axis} from 0 to {size - 1}. Received: {axis}={at}.")
            place = place * size + at
        return self.devices[place]

    def along(self, axis: str) -> tuple[tuple[str, ...], ...]:
        """The groups of devices that differ in one axis alone: each of them shares, sums or hands on something.

        Args:
            axis: `"data"`, `"pipeline"` or `"tensor"`.

        Raises:
            InputError: there is no such axis, or the mesh has no devices yet.
        """
        if axis not in AXES:
            raise unknown("axis", axis, AXES)
        others = [name for name in AXES if name != axis]
        places = itertools.product(*(range(getattr(self, name)) for name in others))
        return tuple(
            tuple(
                self.device(**dict(zip(others, place, strict=True)), **{axis: at}) for at in range(getattr(self, axis))
            )
            for place in places
        )

    def __str__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={getattr(self, axis)}' for axis in AXES)})"

    def _fitting(self, count: int) -> str:
        """The sizes that differ from these in one axis, or else all that multiply to a number of devices."""
        sizes = {axis: getattr(self, axis) for axis in AXES}
        others = {axis: self.size // size for axis, size in sizes.items()}
        found = [f"{axis}={count // other}" for axis, other in others.items() if count % other == 0]
        if not found:
            shapes = itertools.product(_divisors(count), repeat=len(AXES))
            fit = (shape for shape in shapes if math.prod(shape) == count)
            nearest = sorted(
                fit, key=lambda shape: sum(abs(math.log(a / b)) for a, b in zip(shape, sizes.values(), strict=True))
            )
            found = [
                f"({', '.join(f'{axis}={at}' for axis, at in zip(AXES, shape, strict=True))})" for shape in nearest[:3]
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
            raise InputError(f"A device's name is 'GPU:0', or '1/GPU:0' of process 1. Received: {device!r}.")
        process, kind, number = match.groups()
        found.append(("" if process is None else f"{int(process)}/") + f"{kind.upper()}:{int(number)}")
    twice = sorted({name for name in found if found.count(name) > 1})
    if twice:
        raise InputError(f"A device can stand at one place of a mesh. Named twice: {', '.join(twice)}.")
    return tuple(found)
