"""Devices as a planner sees them: how much they hold, how fast they compute and talk. Figures of their makers."""

import re
from dataclasses import dataclass
from types import MappingProxyType

from tfgpu.errors import InputError, unknown

_UNITS = {"": 1, "B": 1, **{f"{k}B": 10 ** (3 * at) for at, k in enumerate("KMGT", start=1)}}
_UNITS |= {f"{k}IB": 2 ** (10 * at) for at, k in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class Device:
    """One accelerator, and the links that it talks by.

    Args:
        name: such as `"a100-80"`.
        memory_bytes: what it holds.
        flops: operations a second in 16-bit products, dense, at most.
        flops_tf32: the same in float32 products with TF32; where there is none, in float32.
        flops_float32: the same in float32.
        bandwidth: bytes a second, one way, to a device of the same host.
        host_bandwidth: the same to a device of another host.
        source: where the figures stand.
    """

    name: str
    memory_bytes: int
    flops: float
    flops_tf32: float
    flops_float32: float
    bandwidth: float
    host_bandwidth: float
    source: str = ""

    def flops_in(self, precision: str) -> float:
        """Operations a second in a precision.

        Example:
            >>> DEVICES["a100-80"].flops_in("mixed_bfloat16")
            312000000000000.0
        """
        if precision == "float32":
            return self.flops_float32
        return self.flops_tf32 if precision == "tf32" else self.flops


def _device(name: str, memory_gib: int, tera: tuple, bandwidth_gb: float, host_gb: float, source: str) -> Device:
    rates = (rate * 1e12 for rate in tera)
    return Device(name, memory_gib * 2**30, *rates, bandwidth_gb * 1e9, host_gb * 1e9, source)


DEVICES = MappingProxyType(
    {
        device.name: device
        for device in (
            _device("t4", 15, (65, 8.1, 8.1), 16, 3.1, "NVIDIA T4 data sheet; PCIe 3.0 x16; 25 Gb/s a host assumed"),
            _device("v100-16", 16, (125, 15.7, 15.7), 150, 6.25, "NVIDIA V100 SXM2 data sheet; DGX-1: 4 x 100 Gb/s"),
            _device("v100-32", 32, (125, 15.7, 15.7), 150, 6.25, "NVIDIA V100 SXM3 data sheet; DGX-2: 8 x 100 Gb/s"),
            _device("a100-40", 40, (312, 156, 19.5), 300, 25, "NVIDIA A100 SXM data sheet; DGX A100: 8 x 200 Gb/s"),
            _device("a100-80", 80, (312, 156, 19.5), 300, 25, "NVIDIA A100 SXM data sheet; DGX A100: 8 x 200 Gb/s"),
            _device("h100-80", 80, (989, 494, 67), 450, 50, "NVIDIA H100 SXM data sheet; DGX H100: 8 x 400 Gb/s"),
            _device("h200", 141, (989, 494, 67), 450, 50, "NVIDIA H200 SXM data sheet; DGX H200: 8 x 400 Gb/s"),
        )
    }
)


def known(name: str) -> Device:
    """A device of the table.

    Raises:
        InputError: there is none of that name.
    """
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name]


def bytes_of(size: int | float | str) -> int:
    """Bytes as a number or as text: `"80GB"` is 80 times ten to the ninth, `"80GiB"` 80 times two to the thirtieth.

    Raises:
        InputError: it says no size above 0.

    Example:
        >>> bytes_of("80GB"), bytes_of("1.5 GiB"), bytes_of(100)
        (80000000000, 1610612736, 100)
    """
    match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)\s*", str(size))
    unit = _UNITS.get(match[2].upper()) if match else None
    if isinstance(size, bool) or unit is None or float(match[1]) * unit < 1:
        raise InputError(f"A size of memory is a number with a unit, such as '80GB' or '16GiB'. Received: {size!r}.")
    return round(float(match[1]) * unit)


def shown(size: float) -> str:
    """Bytes for a person.

    Example:
        >>> shown(80e9), shown(1234567), shown(12)
        ('80.0 GB', '1.2 MB', '12 B')
    """
    for unit in ("TB", "GB", "MB", "kB"):
        if abs(size) >= 0.9995 * _UNITS[unit.upper()]:
            return f"{size / _UNITS[unit.upper()]:.1f} {unit}"
    return f"{size:.0f} B"
