"""Splits a sequence of costs into consecutive parts that are as equal as possible."""

import itertools
from collections.abc import Sequence

from tfgpu.errors import InputError


def cut(costs: Sequence[float], parts: int, places: Sequence[int] | None = None) -> list[int]:
    """Splits costs into consecutive parts so that the most expensive part is as cheap as possible. No part is empty.

    By dynamic programming over (place, parts): exact, in `parts * len(places)**2` steps.

    Args:
        costs: from 0, in order.
        parts: how many, from 1.
        places: where a cut may be: the positions of the costs that may begin a part; None allows all.

    Returns:
        Where the second and later parts begin, ascending.

    Raises:
        InputError: there are fewer places than cuts.

    Example:
        >>> cut([1, 1, 1, 3, 2, 2], 3)
        [3, 4]
    """
    places = sorted({at for at in (range(len(costs)) if places is None else places) if 0 < at < len(costs)})
    if parts - 1 > len(places):
        raise InputError(f"{parts} parts need {parts - 1} places to cut at; there are {len(places)}. Use fewer parts.")
    ends = [0, *places, len(costs)]
    before = [0, *itertools.accumulate(costs)]
    # best[k]: of what ends at ends[k], the lowest maximum cost, and where its last part begins (a position in `ends`).
    best = {k: (before[end], 0) for k, end in enumerate(ends)}
    choices = []
    for part in range(2, parts + 1):
        choices.append(best)
        best = {
            k: min((max(choices[-1][j][0], before[ends[k]] - before[ends[j]]), j) for j in range(part - 1, k))
            for k in range(part, len(ends))
        }
    found, k = [], len(ends) - 1
    for table in [best, *reversed(choices[1:])] if parts > 1 else []:
        k = table[k][1]
        found.append(ends[k])
    return found[::-1]
