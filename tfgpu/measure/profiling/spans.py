"""Arithmetic on time spans: sorted, disjoint pairs of start and end."""

from collections.abc import Iterable

Span = tuple[int, int]


def merged(spans: Iterable[Span]) -> list[Span]:
    """Sorts spans, joins those that touch, and drops empty ones.

    Example:
        >>> merged([(5, 7), (0, 2), (1, 3), (4, 4)])
        [(0, 3), (5, 7)]
    """
    found: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def without(spans: list[Span], others: list[Span]) -> list[Span]:
    """Subtracts other merged spans from merged spans.

    Example:
        >>> without([(0, 10)], [(2, 3), (8, 12)])
        [(0, 2), (3, 8)]
    """
    found, at = [], 0
    for start, end in spans:
        while at < len(others) and others[at][1] <= start:
            at += 1
        here = at
        while here < len(others) and others[here][0] < end:
            if others[here][0] > start:
                found.append((start, others[here][0]))
            start = max(start, others[here][1])
            here += 1
        if start < end:
            found.append((start, end))
    return found


def divided(claims: dict[str, Iterable[Span]], start: int, end: int) -> dict[str, list[Span]]:
    """Divides a time span among claims: each instant goes to the first claim that covers it.

    Args:
        claims: spans by name, in order of priority.
        start: the start of the time span.
        end: its end.

    Returns:
        The merged spans of each claim, by name.

    Example:
        >>> divided({"work": [(2, 4)], "wait": [(0, 3), (6, 9)], "rest": [(0, 10)]}, 0, 10)
        {'work': [(2, 4)], 'wait': [(0, 2), (6, 9)], 'rest': [(4, 6), (9, 10)]}
    """
    edges = []
    for rank, spans in enumerate(claims.values()):
        for begin, stop in merged(spans):
            if max(begin, start) < min(stop, end):
                edges.append((max(begin, start), rank))
                edges.append((min(stop, end), -rank - 1))
    found: dict[str, list[Span]] = {name: [] for name in claims}
    parts, covers = list(found.values()), [False] * len(found)
    owner, since = None, start
    for at, rank in sorted(edges):
        covers[rank if rank >= 0 else -rank - 1] = rank >= 0
        new = next((each for each, covered in enumerate(covers) if covered), None)
        if new != owner:
            if owner is not None and since < at:
                parts[owner].append((since, at))
            owner, since = new, at
    return {name: merged(spans) for name, spans in found.items()}


def clipped(spans: Iterable[Span], start: int, end: int) -> list[Span]:
    """Clips spans to a time span.

    Example:
        >>> clipped([(0, 4), (6, 9)], 3, 7)
        [(3, 4), (6, 7)]
    """
    return [(max(begin, start), min(stop, end)) for begin, stop in spans if begin < end and stop > start]


def total(spans: Iterable[Span]) -> int:
    """The total length of spans.

    Example:
        >>> total([(0, 4), (6, 9)])
        7
    """
    return sum(end - start for start, end in spans)
