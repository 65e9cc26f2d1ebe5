"""The formulas, compared with hand-computed numbers, published ones and simulation."""

import math
import random
import statistics

import pytest

from benchmarks.scaling_model import (
    Link,
    daly_s,
    fit_link,
    hierarchical_s,
    lost_fraction,
    mtbf_s,
    ring_s,
    slowest_s,
    tree_s,
    young_s,
)
from tfgpu.errors import InputError

LINK = Link(bandwidth_bytes_s=1000.0, latency_s=0.5)
FAST = Link(bandwidth_bytes_s=10_000.0, latency_s=0.01)


@pytest.mark.parametrize(
    "workers, seconds",
    [
        (1, 0.0),
        (2, 2.0),  # 2 rounds of 500 bytes: 2 * (0.5 + 0.5)
        (4, 4.5),  # 6 rounds of 250 bytes: 6 * (0.25 + 0.5)
        (10, 10.8),  # 18 rounds of 100 bytes: 18 * (0.1 + 0.5)
    ],
)
def test_ring(workers, seconds):
    assert ring_s(1000, workers, LINK) == pytest.approx(seconds)


@pytest.mark.parametrize("workers, seconds", [(1, 0.0), (2, 3.0), (8, 5.0), (9, 6.0), (1024, 12.0)])
def test_tree(workers, seconds):
    assert tree_s(1000, workers, LINK) == pytest.approx(seconds)  # 2 * (1 + depth * 0.5)


def test_hierarchical():
    # Within: 6 rounds of 250 bytes, 6 * (0.025 + 0.01) = 0.21. Across: 2 rounds of 125 bytes, 2 * (0.125 + 0.5) = 1.25.
    assert hierarchical_s(1000, 2, 4, FAST, LINK) == pytest.approx(1.46)
    assert hierarchical_s(1000, 1, 4, FAST, LINK) == pytest.approx(ring_s(1000, 4, FAST))
    assert hierarchical_s(1000, 4, 1, FAST, LINK) == pytest.approx(ring_s(1000, 4, LINK))


@pytest.mark.parametrize(
    "workers, deviations",
    [(1, 0), (2, math.pi**-0.5), (3, 1.5 * math.pi**-0.5), (10, 1.53875), (100, 2.50759), (1000, 3.24144)],
)
def test_the_slowest_of_normal_times(workers, deviations):
    """The order statistics of the normal distribution; from 10 on, Harter 1961."""
    assert slowest_s(5.0, 2.0, workers) == pytest.approx(5 + 2 * deviations, abs=2e-4)


@pytest.mark.parametrize("tail", ["normal", "lognormal"])
def test_the_slowest_of_drawn_times(tail):
    draw = random.Random(1)
    spread = math.sqrt(math.log1p(0.3**2))

    def one() -> float:
        return draw.gauss(1, 0.3) if tail == "normal" else draw.lognormvariate(-(spread**2) / 2, spread)

    steps = [max(one() for _ in range(64)) for _ in range(4000)]
    assert slowest_s(1.0, 0.3, 64, tail=tail) == pytest.approx(statistics.fmean(steps), rel=0.01)


def test_one_worker_does_not_wait():
    assert slowest_s(1.0, 0.3, 1, tail="lognormal") == pytest.approx(1.0, rel=1e-4)
    assert slowest_s(1.0, 0.0, 10_000) == pytest.approx(1.0)


def test_time_between_failures():
    gpu_s = 54 * 86_400 * 16_384 / 419  # Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs
    assert gpu_s / 86_400 / 365 == pytest.approx(5.785, abs=0.001)  # years
    assert mtbf_s(gpu_s, 16_384) / 3600 == pytest.approx(3.093, abs=0.001)  # hours


@pytest.mark.parametrize("hours, minutes, digits", [(24, 117, 0), (6, 57, 0), (0.25, 9.1, 1)])
def test_intervals_that_daly_published(hours, minutes, digits):
    """Figures 3 to 5 of the paper: a checkpoint takes 5 minutes."""
    assert round(daly_s(300, hours * 3600) / 60, digits) == minutes


def test_intervals_by_hand():
    assert young_s(2, 100) == pytest.approx(20)
    assert daly_s(2, 100) == pytest.approx(20 * (1 + 0.1 / 3 + 0.01 / 9) - 2)
    assert daly_s(200, 100) == 100


def test_lost_time_by_hand():
    # One failure in e: 1 - 1 / (1 * e**0 * (e**1 - 1)), with nothing for checkpoints and restarts.
    assert lost_fraction(1, save_s=0, restart_s=0, mtbf_s=1) == pytest.approx(1 - 1 / (math.e - 1))
    # Failures that never come: the checkpoint alone.
    assert lost_fraction(9, save_s=1, restart_s=5, mtbf_s=1e12) == pytest.approx(0.1)
    assert lost_fraction(1e6, save_s=1, restart_s=5, mtbf_s=1) == 1.0


def simulated_loss(interval_s: float, save_s: float, restart_s: float, mean_s: float, seed: int) -> float:
    """The same run event by event: a checkpoint each interval, failures at a steady rate, in restarts too."""
    draw = random.Random(seed)
    clock, done, intervals = 0.0, 0, 20_000
    until_failure = draw.expovariate(1 / mean_s)
    waiting = False
    while done < intervals:
        need = restart_s if waiting else interval_s + save_s
        if until_failure < need:
            clock, waiting = clock + until_failure, True
            until_failure = draw.expovariate(1 / mean_s)
            continue
        clock, until_failure = clock + need, until_failure - need
        done, waiting = done + (not waiting), False
    return 1 - intervals * interval_s / clock


@pytest.mark.parametrize("interval_s, mean_s", [(60, 600), (200, 600), (300, 3000), (1000, 3000)])
def test_lost_time_of_a_simulated_run(interval_s, mean_s):
    expected = lost_fraction(interval_s, save_s=5, restart_s=40, mtbf_s=mean_s)
    assert simulated_loss(interval_s, 5, 40, mean_s, seed=3) == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("save_s, mean_s", [(1, 10_000), (5, 600), (30, 300)])
def test_the_interval_of_daly_loses_the_least(save_s, mean_s):
    def loss(interval: float) -> float:
        return lost_fraction(interval, save_s=save_s, restart_s=40, mtbf_s=mean_s)

    best = daly_s(save_s, mean_s)
    tried = min(loss(best * (1 + step / 100)) for step in range(-90, 300))
    assert loss(best) <= tried * 1.001
    assert loss(best / 2) > loss(best) < loss(best * 2)


def test_a_link_is_found_from_times():
    sizes, counts = [1e3, 1e6, 5e7], [1, 4, 40]
    link = Link(bandwidth_bytes_s=3e8, latency_s=2e-4)
    times = [count * ring_s(size / count, 2, link) for size, count in zip(sizes, counts, strict=True)]
    found = fit_link(sizes, counts, times, workers=2)
    assert found.bandwidth_bytes_s == pytest.approx(3e8) and found.latency_s == pytest.approx(2e-4)


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: ring_s(1, 0, LINK), "`workers` must be a whole number of at least 1. Received: 0"),
        (lambda: ring_s(1, 2.0, LINK), "Received: 2.0"),
        (lambda: Link(0, 1), "bandwidth above 0"),
        (lambda: slowest_s(1, 0.1, 2, tail="heavy"), "'heavy'"),
        (lambda: slowest_s(0, 0.1, 2), "`mean_s` must be above 0"),
        (lambda: daly_s(0, 1), "must be above 0. Received: 0, 1"),
        (lambda: lost_fraction(0, save_s=1, restart_s=1, mtbf_s=1), "`interval_s`"),
        (lambda: fit_link([1.0], [1], [1.0], workers=2), "two or more times"),
        (lambda: fit_link([1.0, 2.0], [1, 2], [1.0, 2.0], workers=2), "cannot separate latency from bandwidth"),
        (lambda: fit_link([1.0, 10.0], [1, 1], [2.0, 1.0], workers=2), "No link fits these times"),
    ],
)
def test_invalid_input_is_rejected(call, words):
    with pytest.raises(InputError, match=words):
        call()
