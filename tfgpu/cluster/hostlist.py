"""Slurm's hostlist expressions, such as `gpu[01-03,7],login2`.

Source: https://slurm.schedmd.com/scontrol.html (show hostnames, show hostlist).
"""

import itertools
import math
import re

from tfgpu.errors import InputError

EXAMPLE = "gpu[01-03,7],login2"
MOST = 65536
"""Slurm's own limit on the nodes of a system; a longer list is a mistake."""
_LITERAL = r"[A-Za-z0-9_.-]++"  # possessive: an unclosed bracket would otherwise cause exponential backtracking
_ELEMENT = re.compile(rf"(?:{_LITERAL}|\[[0-9,\s-]*\])++")
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def expand(text: str) -> list[str]:
    """Expands a hostlist into names, in order.

    Args:
        text: comma-separated names; brackets hold numbers and ranges, in any number of dimensions. A range keeps the
            leading zeros of its first number.

    Returns:
        The names; duplicates are kept.

    Raises:
        InputError: the text is not a hostlist, or has more than 65,536 hosts.

    Example:
        >>> expand("gpu[01-03,7],login2")
        ['gpu01', 'gpu02', 'gpu03', 'gpu7', 'login2']
        >>> expand("r[1-2]n[01-02]")
        ['r1n01', 'r1n02', 'r2n01', 'r2n02']
    """
    elements = _split(text.strip())
    hosts: list[str] = []
    for element in map(str.strip, elements):
        if not element:
            raise _error(text, "a name is missing before or after a comma")
        if not _ELEMENT.fullmatch(element):
            raise _error(text, f"{element[:60]!r} is not a host name with closed brackets of numbers")
        parts = [_numbers(part, text) for part in re.findall(rf"{_LITERAL}|\[[^\]]*\]", element)]
        if len(hosts) + math.prod(map(len, parts)) > MOST:
            raise _error(text, f"it has more than {MOST} hosts")
        hosts += map("".join, itertools.product(*parts))
    return hosts


def _split(text: str) -> list[str]:
    """Splits at commas outside brackets, in linear time."""
    elements, begin, is_inside = [], 0, False
    for at, character in enumerate(text):
        if character in "[]":
            is_inside = character == "["
        elif character == "," and not is_inside:
            elements.append(text[begin:at])
            begin = at + 1
    return [*elements, text[begin:]]


def _numbers(part: str, text: str) -> list[str] | range:
    if not part.startswith("["):
        return [part]
    found: list[str] = []
    for each in part[1:-1].split(","):
        match = _RANGE.fullmatch(each.strip())
        if not match:
            raise _error(text, f"{each.strip()!r} in brackets is neither a number nor a range such as 01-03")
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first) or len(last) < len(first):
            raise _error(text, f"the range {match[0]} runs backwards")
        if len(found) + int(last) - int(first) >= MOST:
            raise _error(text, f"it has more than {MOST} hosts")
        found += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return found


def _error(text: str, problem: str) -> InputError:
    shown = text if len(text) <= 500 else text[:500] + "..."
    return InputError(f"{problem}. Received: {shown!r}. Expected a list such as {EXAMPLE!r}.")
