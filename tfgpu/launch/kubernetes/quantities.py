"""Amounts of CPU and memory as Kubernetes writes them: `500m`, `4`, `16Gi`."""

import re
from decimal import Decimal

from tfgpu.errors import InputError

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?)([A-Za-z]*)")
_BINARY = {f"{letter}i": 1024**power for power, letter in enumerate("KMGTPE", start=1)}
_DECIMAL = {letter: 1000**power for power, letter in enumerate("kMGTPE", start=1)}
_LEAST_BYTES = 1024**2


def cores(name: str, text: str) -> Decimal:
    """Reads an amount of CPU, in cores.

    Args:
        name: the setting's name, for error messages.
        text: such as `"4"`, `"0.5"` or `"500m"` (thousandths of a core).

    Raises:
        InputError: it is not such an amount, or it is zero.

    Example:
        >>> cores("cpu", "1500m")
        Decimal('1.5')
    """
    number, suffix = _split(text)
    if number is None or suffix not in ("", "m") or not number or (suffix and number % 1):
        raise InputError(f"`{name}` must be a number of cores above 0, such as '4' or '500m'. Received: {text!r}.")
    return number / 1000 if suffix else number


def memory_bytes(name: str, text: str) -> int:
    """Reads an amount of memory, in bytes.

    Kubernetes reads `"16"` as sixteen bytes and `"512m"` as half a byte; both are valid and never intended.
    Here an amount is at least 1 MiB.

    Args:
        name: the setting's name, for error messages.
        text: such as `"16Gi"` (binary) or `"16G"` (decimal).

    Raises:
        InputError: it is not such an amount, or it is below 1 MiB.

    Example:
        >>> memory_bytes("memory", "1.5Gi")
        1610612736
    """
    number, suffix = _split(text)
    factor = {"": 1, **_BINARY, **_DECIMAL}.get(suffix)
    if number is None or factor is None or number * factor < _LEAST_BYTES:
        raise InputError(
            f"`{name}` must be at least 1Mi, such as '16Gi' or '500M'. Received: {text!r}.{_hint(number, suffix)}"
        )
    return int(number * factor)


def _split(text: str) -> tuple[Decimal | None, str]:
    match = _NUMBER.fullmatch(text) if isinstance(text, str) else None
    return (Decimal(match[1]), match[2]) if match else (None, "")


def _hint(number: Decimal | None, suffix: str) -> str:
    if not number:
        return ""
    unit = {"": "Gi", "m": "Mi"}.get(suffix) or {"K": "Ki", "k": "k"}.get(suffix[:1], suffix[:1].upper() + "i")
    return f" Did you mean '{number}{unit}'?" if unit in _BINARY or unit in _DECIMAL else ""
