"""Formulas for the cost of more workers: all-reduce time, the slowest worker, failures and checkpoints.

Pure functions of numbers, in seconds and bytes. docs/measured/scale.md compares them with measurements.

Example:
    >>> ethernet = Link(bandwidth_bytes_s=1.25e9, latency_s=50e-6)
    >>> round(ring_s(100e6, 4, ethernet), 4)
    0.1203
    >>> round(daly_s(save_s=300, mtbf_s=24 * 3600) / 60)
    117
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

from tfgpu.errors import InputError

_GRID = 4_000


@dataclass(frozen=True)
class Link:
    """A connection between two workers.

    Args:
        bandwidth_bytes_s: bytes per second in each direction at the same time.
        latency_s: seconds for an empty message.

    Raises:
        InputError: the bandwidth is not positive, or the latency is negative.
    """

    bandwidth_bytes_s: float
    latency_s: float

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_s > 0 or not self.latency_s >= 0:
            raise InputError(f"A link needs a bandwidth above 0 and a latency from 0. Received: {self!r}.")


def ring_s(size_bytes: float, workers: int, link: Link) -> float:
    """Seconds of a ring all-reduce: each worker sends 1/n of the bytes, 2(n - 1) times.

    Args:
        size_bytes: bytes to reduce, on each worker.
        workers: number of workers.
        link: between neighbors.

    Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    _check(workers=workers)
    rounds = 2 * (workers - 1)
    return rounds * (size_bytes / workers / link.bandwidth_bytes_s + link.latency_s)


def tree_s(size_bytes: float, workers: int, link: Link) -> float:
    """Seconds of a pipelined all-reduce up and down two binary trees, each with half the bytes.

    The bytes take as long as around a large ring; latency grows only with the depth of the trees.

    Source: Sanders, Speck and Träff, Two-tree algorithms for full bandwidth broadcast, reduction and scan, 2009;
    NCCL since 2.4.
    """
    _check(workers=workers)
    if workers == 1:
        return 0.0
    return 2 * (size_bytes / link.bandwidth_bytes_s + math.ceil(math.log2(workers)) * link.latency_s)


def hierarchical_s(size_bytes: float, nodes: int, per_node: int, within: Link, across: Link) -> float:
    """Seconds of a hierarchical all-reduce: reduce-scatter within each node, ring across nodes, all-gather within.

    Args:
        size_bytes: bytes to reduce, on each worker.
        nodes: number of machines.
        per_node: workers (GPUs) per machine, each with its own network connection.
        within: between two workers of one machine.
        across: between two machines, per worker.
    """
    _check(nodes=nodes, per_node=per_node)
    return ring_s(size_bytes, per_node, within) + ring_s(size_bytes / per_node, nodes, across)


def slowest_s(mean_s: float, deviation_s: float, workers: int, *, tail: str = "normal") -> float:
    """The mean time of a step that waits for its slowest worker.

    Args:
        mean_s: mean time of one worker's step.
        deviation_s: standard deviation of one worker's step, independent of the others.
        workers: number of workers.
        tail: `"normal"`, or `"lognormal"` where some steps are much slower.

    Returns:
        The expected maximum, integrated numerically over the distribution of the maximum.

    Example:
        >>> round(slowest_s(1.0, 0.1, 2), 4)  # 1 + 0.1 / sqrt(pi)
        1.0564
    """
    _check(workers=workers)
    if not mean_s > 0 or not deviation_s >= 0 or tail not in ("normal", "lognormal"):
        raise InputError(
            "`mean_s` must be above 0, `deviation_s` from 0, `tail` 'normal' or 'lognormal'. "
            f"Received: {mean_s!r}, {deviation_s!r}, {tail!r}."
        )
    if tail == "lognormal":
        spread = math.sqrt(math.log1p((deviation_s / mean_s) ** 2))
        middle = math.log(mean_s) - spread**2 / 2
        return _of_maximum(workers, lambda z: math.exp(middle + spread * z))
    return _of_maximum(workers, lambda z: mean_s + deviation_s * z)


def _of_maximum(workers: int, time_s) -> float:
    """The mean of `time_s` at the largest of `workers` standard normal numbers, as a Riemann sum."""
    low, high = -9.0, 9.0 + math.sqrt(2 * math.log(workers))
    cdf, width = NormalDist().cdf, (high - low) / _GRID
    total, before = 0.0, 0.0
    for step in range(_GRID):
        after = cdf(low + (step + 1) * width) ** workers
        total += (after - before) * time_s(low + (step + 0.5) * width)
        before = after
    return total


def mtbf_s(one_s: float, parts: int) -> float:
    """Mean seconds between failures of a system that fails when any of its parts does.

    Args:
        one_s: mean seconds between failures of one part; failures are independent, at a constant rate.
        parts: number of parts.
    """
    _check(parts=parts)
    return one_s / parts


def young_s(save_s: float, mtbf_s: float) -> float:
    """The checkpoint interval with the least lost time, to first order: the square root of `2 * save_s * mtbf_s`.

    Source: Young, A first order approximation to the optimum checkpoint interval, Communications of the ACM, 1974.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def daly_s(save_s: float, mtbf_s: float) -> float:
    """As `young_s`, but accurate even when failures are nearly as frequent as checkpoints.

    Args:
        save_s: seconds that a checkpoint stops training.
        mtbf_s: mean seconds between failures of the whole system.

    Source: Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, Future Generation
    Computer Systems, 2006.
    """
    if not save_s > 0 or not mtbf_s > 0:
        raise InputError(f"`save_s` and `mtbf_s` must be above 0. Received: {save_s!r}, {mtbf_s!r}.")
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_s(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def lost_fraction(interval_s: float, *, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time lost to checkpoints, repeated steps and restarts.

    Args:
        interval_s: seconds of training between checkpoints.
        save_s: seconds that a checkpoint stops training.
        restart_s: seconds from a failure until training continues; another failure may come meanwhile.
        mtbf_s: mean seconds between failures of the whole system.

    Returns:
        From 0 to 1.

    Source: Daly 2006, the expected time of a run whose failures come at a constant rate.
    """
    if not interval_s > 0 or not save_s >= 0 or not restart_s >= 0 or not mtbf_s > 0:
        raise InputError(
            "`interval_s` and `mtbf_s` must be above 0, the others from 0. "
            f"Received: {interval_s!r}, {save_s!r}, {restart_s!r}, {mtbf_s!r}."
        )
    waits, attempts = restart_s / mtbf_s, (interval_s + save_s) / mtbf_s
    if waits + attempts > 700:  # e**700 is close to the largest float: there is no progress.
        return 1.0
    return 1 - interval_s / (mtbf_s * math.exp(waits) * math.expm1(attempts))


def fit_link(sizes_bytes: list[float], collectives: list[int], times_s: list[float], *, workers: int) -> Link:
    """Fits latency and bandwidth to measured ring all-reduces by least squares of the relative error.

    Args:
        sizes_bytes: bytes reduced in each measurement.
        collectives: all-reduces in each measurement.
        times_s: seconds of each measurement.
        workers: number of workers, at least 2.

    Raises:
        InputError: there are fewer than two measurements, or they cannot separate latency from bandwidth.
    """
    if workers < 2 or len(times_s) < 2 or not all(time > 0 for time in times_s):
        raise InputError(
            "Fitting a link needs two or more times above 0 and at least two workers. "
            f"Received: {times_s!r}, workers={workers}."
        )
    rounds = 2 * (workers - 1)
    # Least squares of ((rounds * collectives) * latency + (rounds * bytes / workers) * slowness) / time.
    rows = [
        (rounds * count / time, rounds * size / workers / time)
        for size, count, time in zip(sizes_bytes, collectives, times_s, strict=True)
    ]
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant <= 1e-12 * aa * bb:
        raise InputError(
            "The measurements cannot separate latency from bandwidth: all have the same size per all-reduce."
        )
    latency, slowness = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
    if latency < 0 or slowness <= 0:
        raise InputError(f"No link fits these times: latency {latency:.3g} s, {slowness:.3g} s per byte.")
    return Link(bandwidth_bytes_s=1 / slowness, latency_s=latency)


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"`{name}` must be a whole number of at least 1. Received: {value!r}.")
