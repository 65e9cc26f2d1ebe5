"""Reservoir sampling: which slot of a fixed-size memory each example of a stream gets."""

import numpy as np

NONE = -1
"""The slot of an example that is not kept."""
_SHIFTS = (96, 64, 32, 0)  # of the four words of a number


class _Sampler:
    """What both kinds have: the number of slots, of examples so far, and random numbers."""

    def __init__(self, capacity: int, seed: int):
        self.capacity, self.seen = capacity, 0
        self._random = np.random.Generator(np.random.PCG64(seed))

    @property
    def kept(self) -> int:
        """The number of slots in use."""
        return min(self.seen, self.capacity)

    def state(self) -> dict[str, np.ndarray]:
        """Returns the complete state as arrays."""
        state = self._random.bit_generator.state
        numbers = state["state"]["state"], state["state"]["inc"]
        words = [(number >> shift) & (2**32 - 1) for number in numbers for shift in _SHIFTS]
        random = np.array([*words, state["has_uint32"], state["uinteger"]], "uint32")
        return {"seen": np.array([self.seen], "int64"), "random": random}

    def put(self, state: dict[str, np.ndarray]) -> None:
        """Restores the result of `state`."""
        self.seen = int(state["seen"][0])
        words = state["random"].tolist()
        parts = [zip(words[at : at + 4], _SHIFTS, strict=True) for at in (0, 4)]
        number, increment = (sum(word << shift for word, shift in part) for part in parts)
        self._random.bit_generator.state = {
            "bit_generator": "PCG64",
            "state": {"state": number, "inc": increment},
            "has_uint32": words[8],
            "uinteger": words[9],
        }


class Reservoir(_Sampler):
    """Vitter's algorithm R: after n examples, each of them is kept with probability capacity / n.

    Args:
        capacity: number of slots.
        seed: of the random numbers.

    Example:
        >>> Reservoir(2, seed=0).take([0, 0]).tolist()
        [0, 1]
    """

    def take(self, labels) -> np.ndarray:
        """Returns the slots of the next examples, int64; later ones overwrite earlier ones."""
        numbers = np.arange(self.seen, self.seen + len(labels))
        self.seen += len(labels)
        drawn = numbers.copy()
        late = numbers >= self.capacity
        if late.any():
            # One double per example, without rejection, so the draws do not depend on the batches.
            drawn[late] = (self._random.random(int(late.sum())) * (numbers[late] + 1)).astype("int64")
        return np.where(drawn < self.capacity, drawn, NONE)


class Balanced(_Sampler):
    """The class-balanced reservoir, in which the largest class gives up a slot (Chrysakis and Moens, 2020).

    A class that has, or once had, the most slots while the memory was full is "full": it continues as a reservoir of
    its own examples. Any other class takes a slot from one of the largest.

    Args:
        capacity: number of slots.
        seed: of the random numbers.

    Example:
        >>> Balanced(2, seed=0).take([7, 7, 8]).tolist()[:2]
        [0, 1]
    """

    def __init__(self, capacity: int, seed: int):
        super().__init__(capacity, seed)
        self._places: dict[int, list[int]] = {}
        self._seen: dict[int, int] = {}
        self._full: set[int] = set()

    def take(self, labels) -> np.ndarray:
        """Returns the slots of the next examples, int64; later ones overwrite earlier ones."""
        return np.array([self._one(int(label)) for label in labels], "int64")

    def _one(self, label: int) -> int:
        own = self._places.setdefault(label, [])
        self._seen[label] = self._seen.get(label, 0) + 1
        place = self.kept
        self.seen += 1
        if place < self.capacity:
            own.append(place)
            return place
        most = max(map(len, self._places.values()))
        largest = [c for c, places in sorted(self._places.items()) if len(places) == most]
        self._full.update(largest)
        if label not in self._full:
            given_up = self._places[largest[self._draw(len(largest))]]
            own.append(given_up.pop(self._draw(len(given_up))))
            return own[-1]
        if self._random.random() * self._seen[label] < len(own):
            return own[self._draw(len(own))]
        return NONE

    def _draw(self, count: int) -> int:
        return int(self._random.random() * count)

    def state(self) -> dict[str, np.ndarray]:
        """Returns the complete state as arrays."""
        labels = list(self._places)
        return super().state() | {
            "labels": np.array(labels, "int64"),
            "seen_each": np.array([self._seen[c] for c in labels], "int64"),
            "full": np.array([c in self._full for c in labels]),
            "kept_each": np.array([len(self._places[c]) for c in labels], "int64"),
            "places": np.array([place for c in labels for place in self._places[c]], "int64"),
        }

    def put(self, state: dict[str, np.ndarray]) -> None:
        """Restores the result of `state`."""
        super().put(state)
        labels = state["labels"].tolist()
        ends = np.cumsum(state["kept_each"])
        cut = np.split(state["places"], ends[:-1]) if labels else []
        self._places = {c: places.tolist() for c, places in zip(labels, cut, strict=True)}
        self._seen = dict(zip(labels, state["seen_each"].tolist(), strict=True))
        self._full = {c for c, is_full in zip(labels, state["full"], strict=True) if is_full}
