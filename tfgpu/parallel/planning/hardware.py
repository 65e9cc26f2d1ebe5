"""Devices as the planner sees them: memory, compute and link speeds, from the makers' data sheets."""

import re
from dataclasses import dataclass
from types import MappingProxyType

from tfgpu.errors import InputError, unknown

_UNITS = {"": 1, "B": 1, **{f"{k}B": 10 ** (3 * at) for at, k in enumerate("KMGT", start=1)}}
_UNITS |= {f"{k}IB": 2 ** (10 * at) for at, k in enumerate("KMGT", start=1)}


@dataclass(frozen=True)
class Device:
    """One accelerator and its links.

    Args:
        name: such as `"a100-80"`.
        memory_bytes: its memory.
        flops: peak operations per second in dense 16-bit products.
        flops_tf32: the same with TF32, or in float32 if it has no TF32.
        flops_float32: the same in float32.
        bandwidth: bytes per second, one way, to a device of the same host.
        host_bandwidth: the same to a device of another host.
        source: where the figures come from.
        link: the link that `bandwidth` is of, `"NVLink"` or `"PCIe"`.
    """

    name: str
    memory_bytes: int
    flops: float
    flops_tf32: float
    flops_float32: float
    bandwidth: float
    host_bandwidth: float
    source: str = ""
    link: str = ""

    def flops_in(self, precision: str) -> float:
        """Peak operations per second in a precision.

        Example:
            >>> DEVICES["a100-80"].flops_in("mixed_bfloat16")
            312000000000000.0
        """
        if precision == "float32":
            return self.flops_float32
        return self.flops_tf32 if precision == "tf32" else self.flops


def _device(name: str, memory_gib: int, tera: tuple, link: tuple[str, float], host_gb: float, source: str) -> Device:
    rates = (rate * 1e12 for rate in tera)
    return Device(name, memory_gib * 2**30, *rates, link[1] * 1e9, host_gb * 1e9, source, link[0])


_PCIE_3, _PCIE_4, _PCIE_5 = ("PCIe", 16), ("PCIe", 32), ("PCIe", 64)  # 16 lanes, one way, as in the data sheets
_NVLINK_1, _NVLINK_2, _NVLINK_3 = ("NVLink", 80), ("NVLink", 150), ("NVLink", 300)
_NVLINK_4, _NVLINK_5 = ("NVLink", 450), ("NVLink", 900)
_ALONE = "25 Gb/s per host assumed"
_V100, _A100, _H100 = (125, 15.7, 15.7), (312, 156, 19.5), (989, 494, 67)
_NVL = (835, 417, 60)

# Dense peak rates in tera operations per second: 16-bit; TF32 (float32 before Ampere); float32.
DEVICES = MappingProxyType(
    {
        device.name: device
        for device in (
            _device("p100-pcie-12", 12, (18.7, 9.3, 9.3), _PCIE_3, 3.1, f"NVIDIA P100 data sheet; {_ALONE}"),
            _device("p100-pcie-16", 16, (18.7, 9.3, 9.3), _PCIE_3, 3.1, f"NVIDIA P100 data sheet; {_ALONE}"),
            _device("p100-16", 16, (21.2, 10.6, 10.6), _NVLINK_1, 6.25, "NVIDIA P100 data sheet; DGX-1: 4 x 100 Gb/s"),
            _device("t4", 15, (65, 8.1, 8.1), _PCIE_3, 3.1, f"NVIDIA T4 data sheet; {_ALONE}"),
            _device("v100-pcie-16", 16, (112, 14, 14), _PCIE_3, 3.1, f"NVIDIA V100 data sheet; {_ALONE}"),
            _device("v100-pcie-32", 32, (112, 14, 14), _PCIE_3, 3.1, f"NVIDIA V100 data sheet; {_ALONE}"),
            _device("v100s-pcie-32", 32, (130, 16.4, 16.4), _PCIE_3, 3.1, f"NVIDIA V100S data sheet; {_ALONE}"),
            _device("v100-16", 16, _V100, _NVLINK_2, 6.25, "NVIDIA V100 SXM2 data sheet; DGX-1: 4 x 100 Gb/s"),
            _device("v100-32", 32, _V100, _NVLINK_2, 6.25, "NVIDIA V100 SXM3 data sheet; DGX-2: 8 x 100 Gb/s"),
            _device("a10", 24, (125, 62.5, 31.2), _PCIE_4, 3.1, f"NVIDIA A10 data sheet; {_ALONE}"),
            _device("a10g", 24, (70, 35, 35), _PCIE_4, 3.1, f"NVIDIA A10G data sheet; {_ALONE}"),
            _device("a30", 24, (165, 82, 10.3), _PCIE_4, 3.1, f"NVIDIA A30 data sheet; {_ALONE}"),
            _device("a40", 48, (149.7, 74.8, 37.4), _PCIE_4, 3.1, f"NVIDIA A40 data sheet; {_ALONE}"),
            _device("rtx-a6000", 48, (154.8, 77.4, 38.7), _PCIE_4, 3.1, f"NVIDIA GA102 white paper; {_ALONE}"),
            _device("rtx-3090", 24, (71, 35.6, 35.6), _PCIE_4, 3.1, f"NVIDIA GA102 white paper; {_ALONE}"),
            _device("a100-pcie-40", 40, _A100, _PCIE_4, 3.1, f"NVIDIA A100 PCIe data sheet; {_ALONE}"),
            _device("a100-pcie-80", 80, _A100, _PCIE_4, 3.1, f"NVIDIA A100 PCIe data sheet; {_ALONE}"),
            _device("a100-40", 40, _A100, _NVLINK_3, 25, "NVIDIA A100 SXM data sheet; DGX A100: 8 x 200 Gb/s"),
            _device("a100-80", 80, _A100, _NVLINK_3, 25, "NVIDIA A100 SXM data sheet; DGX A100: 8 x 200 Gb/s"),
            _device("l4", 24, (121, 60, 30.3), _PCIE_4, 3.1, f"NVIDIA L4 data sheet; {_ALONE}"),
            _device("l40", 48, (181, 90.5, 90.5), _PCIE_4, 3.1, f"NVIDIA L40 data sheet; {_ALONE}"),
            _device("l40s", 48, (362, 183, 91.6), _PCIE_4, 3.1, f"NVIDIA L40S data sheet; {_ALONE}"),
            _device("rtx-6000-ada", 48, (364.2, 182.1, 91.1), _PCIE_4, 3.1, f"NVIDIA Ada white paper; {_ALONE}"),
            _device("rtx-4090", 24, (165.2, 82.6, 82.6), _PCIE_4, 3.1, f"NVIDIA Ada white paper; {_ALONE}"),
            _device("h100-pcie-80", 80, (756, 378, 51), _PCIE_5, 3.1, f"NVIDIA H100 PCIe data sheet; {_ALONE}"),
            _device("h100-nvl", 94, _NVL, _PCIE_5, 3.1, f"NVIDIA H100 NVL data sheet; {_ALONE}"),
            _device("h100-80", 80, _H100, _NVLINK_4, 50, "NVIDIA H100 SXM data sheet; DGX H100: 8 x 400 Gb/s"),
            _device("h200-nvl", 141, _NVL, _PCIE_5, 3.1, f"NVIDIA H200 NVL data sheet; {_ALONE}"),
            _device("h200", 141, _H100, _NVLINK_4, 50, "NVIDIA H200 SXM data sheet; DGX H200: 8 x 400 Gb/s"),
            _device("gh200", 96, _H100, _NVLINK_4, 50, "NVIDIA GH200 data sheet; 400 Gb/s per host assumed"),
            _device("rtx-5090", 32, (209.5, 104.8, 104.8), _PCIE_5, 3.1, f"NVIDIA RTX Blackwell white paper; {_ALONE}"),
            _device("b200", 180, (2250, 1100, 75), _NVLINK_5, 50, "NVIDIA HGX B200 data sheet; DGX B200: 8 x 400 Gb/s"),
        )
    }
)
# The driver's names, without the maker's and the family's. They must match in full: "A10-24Q" is a part of an A10,
# "A100-SXM4-80GB MIG 1g.10gb" a slice of an A100, and "RTX 4090 D" another GPU.
_NAMES = {
    r"A100-SXM\d-(40|80)GB": "a100-{}",
    r"A100-PCIE-(40|80)GB": "a100-pcie-{}",
    r"A100 80GB PCIe": "a100-pcie-80",
    r"V100-SXM\d-(16|32)GB": "v100-{}",
    r"V100-PCIE-(16|32)GB": "v100-pcie-{}",
    r"V100S-PCIE-32GB": "v100s-pcie-32",
    r"P100-SXM2-16GB": "p100-16",
    r"P100-PCIE-(12|16)GB": "p100-pcie-{}",
    r"H100 80GB HBM3": "h100-80",
    r"H100 PCIe": "h100-pcie-80",
    r"(H100|H200) NVL": "{}-nvl",
    r"GH200 (?:480GB|144G HBM3e)": "gh200",
    r"RTX 6000 Ada Generation": "rtx-6000-ada",
    r"RTX (A6000|3090|4090|5090)": "rtx-{}",
    r"(T4|A10|A10G|A30|A40|L4|L40|L40S|H200|B200)": "{}",
}


def driven(name: str) -> Device | None:
    """The device of the table with this driver name; `None` if there is none.

    Example:
        >>> driven("NVIDIA A10G").name, driven("Tesla V100-SXM2-32GB").name, driven("NVIDIA GeForce RTX 4090 D")
        ('a10g', 'v100-32', None)
    """
    own = re.sub(r"^(NVIDIA )?(Tesla |GeForce |Quadro )?", "", name.strip())
    for form, device in _NAMES.items():
        if match := re.fullmatch(form, own):
            return DEVICES[device.format(*match.groups()).lower()]
    return None


def known(name: str) -> Device:
    """A device of the table, by name.

    Raises:
        InputError: there is no device of that name.
    """
    if name not in DEVICES:
        raise unknown("device", name, DEVICES)
    return DEVICES[name]


def bytes_of(size: int | float | str) -> int:
    """Parses a number of bytes: `"80GB"` is 80 * 10**9, `"80GiB"` is 80 * 2**30.

    Raises:
        InputError: it is not a size above 0.

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
    """A number of bytes as text.

    Example:
        >>> shown(80e9), shown(1234567), shown(12)
        ('80.0 GB', '1.2 MB', '12 B')
    """
    for unit in ("TB", "GB", "MB", "kB"):
        if abs(size) >= 0.9995 * _UNITS[unit.upper()]:
            return f"{size / _UNITS[unit.upper()]:.1f} {unit}"
    return f"{size:.0f} B"
