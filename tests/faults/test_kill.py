"""A training that is killed at random moments, and started again, ends with the bytes of one that never was."""

import json
import random

import numpy as np
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(3600)]

WORKERS = {"workers": 2, "workers-trainer": 2}
# Twenty kills and more; a slow disk makes it likely that one falls into a save.
CASES = {
    "fit": {"slow_disk": 0.05},
    "trainer": {},
    "multi-step": {"every_steps": None},
    "accumulate": {"slow_disk": 0.05},
    "mixed": {},
    "mirrored": {"slow_disk": 0.05},
    "workers": {},
    "workers-trainer": {"slow_disk": 0.05, "every_steps": 2, "own_disk": True},  # only the chief's has checkpoints
}
KILLS = 3


@pytest.mark.parametrize("variant", CASES)
def test_killed_at_random_moments(variant, tmp_path, group, result):
    workers, rng = WORKERS.get(variant, 1), random.Random(variant)
    whole = group(tmp_path / "whole", variant, workers=workers, **CASES[variant])
    assert whole.wait() == [0] * workers, whole.said()
    length, moments, kills = len(whole.progress()), [], 0
    while True:
        folder = tmp_path / "cut"
        cut = group(folder, variant, workers=workers, **CASES[variant])
        if kills == KILLS:
            break
        at = len(cut.progress()) + rng.randint(1, length // 2)
        rank, delay = rng.randrange(workers), rng.uniform(0, 0.05)
        if not cut.kill_at(at, rank=rank, delay_s=delay):
            break
        kills += 1
        cut.end()
        saving = bool(list(folder.glob("checkpoints*/.epoch-*")))
        moments.append({"at": at, "rank": rank, "delay_s": round(delay, 3), "saving": saving})
    assert cut.wait() == [0] * workers, cut.said()
    arrays, history = result(tmp_path / "whole")
    found, found_history = result(tmp_path / "cut")
    differences = sum(a.tobytes() != b.tobytes() for a, b in zip(arrays, found, strict=True))
    print(json.dumps({"variant": variant, "length": length, "kills": moments, "differences": differences}))
    assert kills > 0
    assert differences == 0 and found_history == history
    counts = arrays[0]
    assert np.array_equal(counts, np.full_like(counts, counts[0])) and counts[0] > 0
