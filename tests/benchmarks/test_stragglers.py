"""The arithmetic of benchmarks.stragglers and benchmarks.failures on numbers made by hand, and a tiny run of each."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import failures, stragglers
from benchmarks.scaling_model import lost_fraction

ROOT = Path(__file__).parents[2]
FACTS = {"device": "Some CPU", "all_cores": 2, "versions": {"Python": "3"}, "date": "2026-01-01"}


def waits(*durations, starts):
    """One worker's steps: what was drawn, when the wait began and when it ended."""
    return [(one, at, at + one) for one, at in zip(durations, starts, strict=True)]


# Two workers. Step k begins at 10, 12, 15 and 19; the longest waits are 9 (before what counts), 1.5, 2.5 and 0.5.
ONE = waits(9.0, 1.5, 1.0, 0.5, starts=(0, 10, 12, 15))
OTHER = waits(1.0, 0.5, 2.5, 0.5, starts=(0, 10, 12, 15))


def test_a_step_is_compared_with_the_longest_wait():
    assert stragglers.summary([ONE, OTHER], 1) == {"step_s": 2.5, "longest_s": 2.0, "steps": 2}


def test_steps_that_do_not_wait_for_all_are_no_measurement():
    early = waits(1.0, 0.5, 2.5, 0.5, starts=(0, 10, 11.4, 15))
    with pytest.raises(SystemExit, match="before the one before had ended on all"):
        stragglers.summary([ONE, early], 1)


def run(workers: int, step_s: float, longest_s: float, *, is_even: bool = False, load: float = 1.0) -> dict:
    found = {"workers": workers, "step_s": step_s, "longest_s": longest_s, "is_even": is_even}
    return {**found, "steps": 4 if is_even else 7, "load": [load, 2.0]}


def test_the_table_of_stragglers_by_hand():
    runs = [run(1, 1.02, 1.0, is_even=True), run(1, 1.01, 0.99), run(1, 1.03, 1.01, load=0.5)]
    runs += [run(2, 1.03, 1.0, is_even=True, load=3.0), run(2, 1.05, 1.0, is_even=True)]
    runs += [run(2, 1.12, 1.05), run(2, 1.14, 1.07)]
    results = {"facts": {**FACTS, "mean_s": 1.0, "deviation_s": 0.1 * math.sqrt(math.pi)}, "runs": runs}
    one, two, _, words = [line.strip("| ").split(" | ") for line in stragglers.table(results)[2:]]
    assert one[1:5] == ["1020.0 ms", "0.0 ms", "0.0 ms", "1020.0 ms"]
    assert one[5:] == ["1020.0 ms (1010.0 ms to 1030.0 ms)", "1.000", "1.000"]
    # The slowest of two: 1 + deviation / sqrt(pi).
    assert two[1:5] == ["1040.0 ms", "100.0 ms", "60.0 ms", "1140.0 ms"]
    assert two[5:] == ["1130.0 ms (1120.0 ms to 1140.0 ms)", "1.009", "0.991"]
    assert words[0].startswith("2 repeats of 7 steps") and "Load 0.5 to 3.0. Some CPU, 2 cores, Python 3" in words[0]


def steps(process: int, numbers: range, begin: float, every: int, save_s: float) -> list[list[float]]:
    """Steps of one second; after each checkpoint the next one ends later."""
    found, at = [], begin
    for number in numbers:
        at += 1.0 + (save_s if found and (number - 1) % every == 0 else 0.0)
        found.append([at, process, number])
    return found


def test_what_a_killed_run_did_by_hand():
    # A checkpoint every 4 steps, of half a second. The first process makes steps 1 to 6, the second 5 to 10, the third
    # dies before its first one, the fourth makes 9 and 10.
    first, second, fourth = (
        steps(process, numbers, begin, 4, 0.5)
        for process, numbers, begin in ((1, range(1, 7), 0.0), (2, range(5, 11), 10.0), (4, range(9, 11), 30.0))
    )
    assert (first[-1][0], second[-1][0]) == (6.5, 16.5)
    found = failures.summary([*first, *second, *fourth], [7.0, 17.0, 25.0], 4)
    assert found["kept"] == [4, 8, 8] and found["restarts_s"] == [3.0, None, 5.0]
    assert (found["kills"], found["wall_s"], found["mtbf_s"]) == (2, 18.0, 9.0)
    assert (found["step_s"], found["save_s"], found["interval_s"]) == (1.0, 0.5, 4.0)
    assert (found["steps_run"], found["steps_once"]) == (6, 4)
    assert found["restart_s"] == 4.0 and found["useful"] == pytest.approx(4 / 18)


def test_a_step_that_the_chief_ends_after_the_kill_is_no_restart():
    first = steps(1, range(1, 7), 0.0, 4, 0.0)
    second, third = steps(2, range(5, 9), 10.0, 4, 0.0), steps(3, range(9, 11), 20.0, 4, 0.0)
    found = failures.summary([*first, *second, *third], [5.9, 14.5], 4)
    assert found["kept"] == [4, 8] and found["restarts_s"] == pytest.approx([4.1, 5.5])


KILLS = {"at_s": [0.0, 9.0], "restarts_s": [5.0, 5.0]}
RUN = {"interval_s": 2.0, "save_s": 0.1, "restart_s": 5.0, "mtbf_s": 30.0}


def test_the_model_gets_what_was_measured():
    assert failures.modeled(RUN) == 1 - lost_fraction(2.0, save_s=0.1, restart_s=5.0, mtbf_s=30.0)


def test_a_restart_that_was_cut_short_counts_as_longer():
    # Of three restarts one ends after 2 s and one is cut short at 3 s, so that 2/3 of all take the third one's 8 s.
    run = {"restart_s": 5.0, "at_s": [0.0, 20.0, 23.0], "restarts_s": [2.0, None, 8.0]}
    assert failures.with_cut_restarts(run)["restart_s"] == pytest.approx(2 + 2 / 3 * (8 - 2))
    assert failures.with_cut_restarts({**run, "restarts_s": [2.0, 3.0, 8.0]})["restart_s"] == pytest.approx(13 / 3)


def test_chance_is_less_with_more_kills():
    few, many = (failures.spread({**RUN, "kills": kills}, trials=500) for kills in (10, 160))
    assert many == pytest.approx(few / 4, rel=0.25)


def test_the_table_of_failures_by_hand():
    facts = {**RUN, "every": 10, "kills": 20, "steps_run": 120, "steps_once": 100, "restart_deviation_s": 0.5}
    facts |= {**KILLS, "useful": failures.modeled(RUN), "load": [0.5, 3.0]}
    text = failures.table({"facts": FACTS, "runs": [facts]})
    assert text[2].startswith("| 10 steps, 2.0 s | 20 | 30.0 s | 5.0 s ± 0.5 | 100.0 ms | 20 of 120 |")
    assert text[2].split("|")[9].strip() == "1.000" and text[-2].endswith("measured: 1.000.")
    assert "Load 0.5 to 3.0. Some CPU" in text[-1]


def test_a_run_without_progress_has_no_ratio():
    facts = {**RUN, "every": 10, "kills": 1, "steps_run": 3, "steps_once": 0, "restart_deviation_s": 0.0}
    page = failures.table({"facts": FACTS, "runs": [{**facts, **KILLS, "useful": 0.0, "load": [1.0]}]})
    row = page[2].split("|")
    assert page[-2].endswith("measured: -.") and row[7].strip() == "0.0%" and row[9].strip() == "-"
    with pytest.raises(SystemExit, match="Too few steps"):
        failures.summary([[1.0, 1, 1], [9.0, 2, 1]], [2.0], 4)


def test_a_draw_of_kills_is_the_models_own():
    """Runs that are drawn as `spread` draws them agree with the formula in the mean."""
    draw, each = random.Random(3), RUN["interval_s"] + RUN["save_s"]
    between = [draw.expovariate(1 / RUN["mtbf_s"]) for _ in range(40_000)]
    kept = sum(max(0.0, (one - RUN["restart_s"]) // each) for one in between) * RUN["interval_s"]
    assert kept / sum(between) == pytest.approx(failures.modeled(RUN), rel=0.02)


def measured(folder: Path, name: str, *options: object) -> dict:
    output = folder / "found.json"
    process = subprocess.Popen(
        [sys.executable, "-m", f"benchmarks.{name}", "--output", str(output), *map(str, options)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.wait(540) == 0
    finally:
        process.send_signal(signal.SIGINT)  # It ends what it has started.
        process.wait(500)
    return json.loads(output.read_text())


@pytest.mark.processes
@pytest.mark.slow
def test_a_tiny_run_with_stragglers(tmp_path):
    options = ("--most", 2, "--repeats", 1, "--steps", 5, "--warmup", 1, "--mean-s", 0.02, "--deviation-s", 0.01)
    found = measured(tmp_path, "stragglers", *options)
    assert [(run["workers"], run["steps"]) for run in found["runs"]] == [(1, 2), (1, 5), (2, 2), (2, 5)]
    assert all(run["step_s"] > run["longest_s"] > 0 for run in found["runs"])
    assert len(stragglers.table(found)) == 6


@pytest.mark.processes
@pytest.mark.slow
def test_a_tiny_run_with_failures(tmp_path):
    found = measured(tmp_path, "failures", "--every", 5, "--kills", 1, "--mtbf-s", 1, "--step-s", 0.05)
    (run,) = found["runs"]
    assert run["kills"] == 1 and run["restarts_s"][-1] > 0 and run["wall_s"] > 0
    assert run["kept"] == sorted(run["kept"]) and all(number % 5 == 0 for number in run["kept"])
    rows = [line for line in failures.table(found) if line.startswith("| 5 steps")]
    assert len(rows) == 1 and rows[0].count("|") == 11
