"""The logic of a batch size search: functions of the tries, without TensorFlow."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

WITHIN = 0.05
"""Rates that differ by at most this share count as equal."""
_DOUBLINGS = 2
_PART = 16
_MULTIPLE = 8


@dataclass(frozen=True)
class BatchTry:
    """One batch that was tried.

    Attributes:
        batch: the global batch.
        fits: whether it could be trained.
        examples_per_s: the median rate; None if it does not fit.
        spread: the slowest and the fastest measurement, in examples per second.
        step_s: seconds per step, at the median rate.
        peaks: memory peaks in bytes, with the names of `tfgpu.callbacks.Memory`.
        reason: why it does not fit.
        time_s: the duration of the try, including the start of its process.
    """

    batch: int
    fits: bool
    examples_per_s: float | None = None
    spread: tuple[float, float] | None = None
    step_s: float | None = None
    peaks: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""
    time_s: float = 0.0

    @property
    def memory_bytes(self) -> int | None:
        """The peak of the GPU with the highest peak; without GPUs, that of the process.

        Example:
            >>> BatchTry(8, True, peaks={"host_peak_bytes": 9, "gpu0_peak_bytes": 5, "gpu1_peak_bytes": 6}).memory_bytes
            6
        """
        on_gpus = [size for name, size in self.peaks.items() if name.startswith("gpu")]
        return max(on_gpus, default=self.peaks.get("host_peak_bytes"))


@dataclass(frozen=True)
class Bounds:
    """The bounds of a search.

    Attributes:
        lowest, highest: the smallest and the largest batch to try, multiples of the replicas.
        replicas: the number of replicas that share a batch.
        granularity: the precision of the largest batch that fits, in examples; None takes a sixteenth of it, or 8 per
            replica if that is more.
    """

    lowest: int
    highest: int
    replicas: int = 1
    granularity: int | None = None

    def step(self, fitting: int) -> int:
        """The precision for a batch of this size.

        Example:
            >>> Bounds(8, 4096).step(64), Bounds(8, 4096).step(1024), Bounds(8, 4096, granularity=16).step(1024)
            (8, 64, 16)
        """
        return self.granularity or max(_MULTIPLE * self.replicas, fitting // _PART)


def next_batch(tries: Sequence[BatchTry], bounds: Bounds, *, largest: bool = True) -> int | None:
    """Returns the next batch to try: doubles while batches fit, then bisects.

    Args:
        tries: the tries so far.
        bounds: the bounds of the search.
        largest: whether to search the largest that fits. If False, the search ends when the rate stops rising, or when
            a batch does not fit.

    Returns:
        A multiple of the replicas; None when the search is finished.

    Example:
        >>> fits = [BatchTry(32, True, 100.0), BatchTry(64, True, 150.0)]
        >>> next_batch(fits, Bounds(32, 4096)), next_batch([*fits, BatchTry(128, False)], Bounds(32, 4096))
        (128, 96)
    """
    if not tries:
        return bounds.lowest
    failed = min((one.batch for one in tries if not one.fits), default=None)
    fitting = max((one.batch for one in tries if one.fits), default=None)
    if fitting is None:
        return None
    if failed is None:
        is_over = fitting >= bounds.highest or (not largest and stands_still(tries))
        return None if is_over else min(2 * fitting, bounds.highest)
    if not largest or failed - fitting <= bounds.step(fitting):
        return None
    multiple = bounds.granularity or _MULTIPLE * bounds.replicas
    middle = (fitting + failed) // 2 // multiple * multiple
    return middle if middle > fitting else (fitting // multiple + 1) * multiple


def stands_still(tries: Sequence[BatchTry]) -> bool:
    """Whether the last two doublings together gained less than 5 %.

    Example:
        >>> stands_still([BatchTry(8, True, 100.0), BatchTry(16, True, 104.0), BatchTry(32, True, 101.0)])
        True
    """
    rates = [one.examples_per_s or 0.0 for one in sorted(tries, key=lambda one: one.batch) if one.fits]
    return len(rates) > _DOUBLINGS and max(rates[-_DOUBLINGS:]) <= (1 + WITHIN) * max(rates[:-_DOUBLINGS])


def fastest(tries: Sequence[BatchTry]) -> int | None:
    """The smallest batch whose rate is within 5 % of the best; larger ones only cost memory and updates.

    Example:
        >>> fastest([BatchTry(8, True, 100.0), BatchTry(16, True, 192.0), BatchTry(32, True, 200.0)])
        16
    """
    rates = {one.batch: one.examples_per_s for one in tries if one.fits and one.examples_per_s}
    best = max(rates.values(), default=0.0)
    return min((batch for batch, rate in rates.items() if rate >= (1 - WITHIN) * best), default=None)


def spread_of(tries: Sequence[BatchTry]) -> float:
    """The median relative range of the measurements of a batch, over all batches that fit.

    Example:
        >>> spread_of([BatchTry(8, True, 100.0, (90.0, 120.0)), BatchTry(16, False)])
        0.3
    """
    found = [(one.spread[1] - one.spread[0]) / one.examples_per_s for one in tries if one.spread and one.examples_per_s]
    return statistics.median(found) if found else 0.0


def largest(tries: Sequence[BatchTry]) -> int | None:
    """The largest batch that fits.

    Example:
        >>> largest([BatchTry(8, True, 100.0), BatchTry(16, True, 90.0), BatchTry(32, False)])
        16
    """
    return max((one.batch for one in tries if one.fits), default=None)
