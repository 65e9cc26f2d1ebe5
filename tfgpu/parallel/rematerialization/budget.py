"""Which runs of calls are computed anew, so that what a step keeps stays within a budget and the time lost is least.

Source: Chen et al., Training deep nets with sublinear memory cost, 2016; Jain et al., Checkmate, 2020.
"""

from collections.abc import Sequence

from tfgpu.parallel.rematerialization.saved_tensors import SavedTensors

_MOST_PLACES, _MOST_CHOICES, _HALVINGS = 160, 48, 24

Segments = tuple[tuple[int, int, bool], ...]
"""All calls as (begin, end, whether they are computed anew)."""


def cheapest(kept: SavedTensors, seconds: Sequence[float], budget: int) -> Segments | None:
    """The parts that lose the least time of those whose peak stays within a budget; None where there are none.

    By dynamic programming over the places to cut at: what is kept before a place, against the time that is lost.

    Args:
        kept: what the calls keep.
        seconds: that running each call again takes.
        budget: in bytes.
    """
    whole = ((0, len(kept.calls), False),)
    if kept.peak(whole) <= budget:
        return whole
    return _Search(kept).run(seconds, budget)


def smallest(kept: SavedTensors, seconds: Sequence[float]) -> Segments:
    """The parts with the lowest peak, within one part in a thousand or so, that lose the least time."""
    search, nothing = _Search(kept), [0.0] * len(kept.calls)
    high = kept.peak(((0, len(kept.calls), False),))
    low, best = 0, None
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        found = search.run(nothing, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, kept.peak(found))
        if high - low <= high // 1000:
            break
    if best is None:
        return ((0, len(kept.calls), False),)
    return search.run(seconds, high) or best


class _Search:
    """The ways from one place to another, and what each keeps."""

    def __init__(self, kept: SavedTensors):
        self._kept = kept
        count = len(kept.calls)
        crossing = [sum(kept.taken(at, count).values()) for at in range(count)]
        chosen = sorted(range(1, count), key=lambda at: (crossing[at], at))[:_MOST_PLACES]
        self._places = [0, *sorted(chosen), count]
        self._ways = [list(self._from(number)) for number in range(len(self._places) - 1)]

    def _from(self, number: int):
        """From a place: the place that follows, whether anew, bytes kept, bytes within, and bytes that a part without
        recomputation before has kept already.
        """
        kept, places = self._kept, self._places
        before = self._own(number - 1) if number else {}
        taken, within, made = {}, {}, set()
        for after in range(number + 1, len(places)):
            for at in range(places[after - 1], places[after]):
                taken |= {name: size for name, size in kept.inputs[at].items() if name not in made}
                made |= kept.makes[at]
                within |= kept.own[at]
            if after == number + 1:
                yield after, False, _sum(within), _sum(within), _both(within, before)
            yield after, True, _sum(taken), _sum(taken | within), _both(taken, before)

    def _own(self, number: int) -> dict[str, int]:
        """What the calls from one place to the next keep."""
        found = {}
        for own in self._kept.own[self._places[number] : self._places[number + 1]]:
            found |= own
        return found

    def run(self, seconds: Sequence[float], budget: int) -> Segments | None:
        places = self._places
        before = [0.0]
        for each in seconds:
            before.append(before[-1] + each)
        # For each place and whether the part before was kept: choices (bytes kept, seconds lost, the way here).
        table: list[list[list]] = [[[], []] for _ in places]
        table[0][0].append((0, 0.0, None))
        for number, ways in enumerate(self._ways):
            for plain in (0, 1):
                choices = table[number][plain] = _undominated(table[number][plain])
                for after, anew, keeps, within, again in ways:
                    lost = before[places[after]] - before[places[number]] if anew else 0.0
                    saved = again if plain else 0
                    target = table[after][0 if anew else 1]
                    for choice in choices:
                        if choice[0] + within - saved > budget:
                            break
                        target.append((choice[0] + keeps - saved, choice[1] + lost, (number, after, anew, choice)))
        outputs, last = self._kept.outputs, self._own(len(places) - 2)
        ends = [choice for choice in table[-1][0] if choice[0] + _sum(outputs) <= budget]
        ends += [choice for choice in table[-1][1] if choice[0] + _sum(outputs) - _both(outputs, last) <= budget]
        if not ends:
            return None
        return self._way(min(ends, key=lambda choice: (choice[1], choice[0])))

    def _way(self, choice) -> Segments:
        """The parts that led to a choice; what is kept and lies side by side is one."""
        found: list[tuple[int, int, bool]] = []
        while choice[2] is not None:
            number, after, anew, choice = choice[2]
            begin, end = self._places[number], self._places[after]
            if not anew and found and not found[-1][2]:
                end = found.pop()[1]
            found.append((begin, end, anew))
        return tuple(reversed(found))


def _undominated(choices: list) -> list:
    """Those that no other one beats in both bytes and seconds, fewest bytes first; of many, some."""
    found: list = []
    for choice in sorted(choices, key=lambda one: one[:2]):
        if not found or choice[1] < found[-1][1]:
            found.append(choice)
    step = len(found) / _MOST_CHOICES
    return found if step <= 1 else [found[int(at * step)] for at in range(_MOST_CHOICES - 1)] + found[-1:]


def _both(one: dict[str, int], other: dict[str, int]) -> int:
    return sum(size for name, size in one.items() if name in other)


def _sum(tensors: dict[str, int]) -> int:
    return sum(tensors.values())
