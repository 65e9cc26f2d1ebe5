"""A training that is killed at random moments, and started again, ends with the bytes of one that never was."""

import random
import time
from collections import Counter

import numpy as np
import pytest

from tfgpu.checkpoint import storage

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

KINDS = ["start", "mid-epoch", "validation", "between epochs", "save"]
LATEST_S = {"start": 0.1, "mid-epoch": 0.2, "validation": 0.1, "between epochs": 0.1, "save": 0.15}
# Of one run, which goes on to the next kill: each kind as often as the others. Two workers start slowly: fewer.
KILLS = {
    "fit": 20,
    "trainer": 20,
    "mirrored-mixed": 20,
    "workers": 10,
    "workers-mixed": 10,
    "multi-step": 5,
    "accumulate": 5,
    "mixed": 5,
    "mirrored": 5,
    "workers-trainer": 5,
}
OPTIONS = {
    "multi-step": {"every_steps": None},
    "workers-trainer": {"every_steps": 2, "own_disk": True},
}


def kill_again_and_again(variant: str, kinds: list[str], folder, group, result, *, first: int = 1) -> None:
    """Kills one run once in each of these kinds of moments; its end must be that of one that is left alone."""
    workers, rng = 2 if variant.startswith("workers") else 1, random.Random(variant)
    rng.shuffle(kinds)
    moments = [(kind, rng.randint(first, 2), rng.uniform(0, LATEST_S[kind])) for kind in kinds]
    options = {"epochs": 6 + 2 * len(kinds), "patience": 99, "slow_disk": 0.01, **OPTIONS.get(variant, {})}
    whole = group(folder / "whole", variant, workers=workers, **options)
    found_in, began = [], time.monotonic()
    for number, (kind, nth, delay_s) in enumerate(moments):
        rank, nth = number % workers, nth if kind != "start" else 1
        hold = (kind, nth, 0 if kind == "save" else rank)
        cut = group(folder / "cut", variant, workers=workers, hold=hold, **options)
        found_in.append(cut.kill_in(kind, nth=nth, rank=rank, delay_s=delay_s))
        assert found_in[-1] is not None, cut.said()
        time.sleep(rng.choice([0, 0.3]) if workers > 1 else 0)  # the other worker finds out, or does not
        cut.end()
        check_disks(folder / "cut", own="own_disk" in options)
    cut = group(folder / "cut", variant, workers=workers, **options)
    assert cut.wait() == [0] * workers, cut.said()
    assert whole.wait() == [0] * workers, whole.said()
    arrays, history = result(folder / "whole")
    found, found_history = result(folder / "cut")
    differences = sum(a.tobytes() != b.tobytes() for a, b in zip(arrays, found, strict=True))
    reads = np.load(folder / "cut" / "reads.npy").reshape(options["epochs"], -1, arrays[1].shape[1])
    each_once = bool((reads.sum(axis=1) == 1).all())
    table(variant, Counter(found_in), f"{differences} of {len(arrays)}", found_history == history, each_once)
    starts = [int(step) for step in (folder / "cut" / "began0").read_text().split()]
    print(f"begun at the steps {starts} of {len(reads) * reads.shape[1]}")
    assert set(found_in) == set(kinds) and all(found_in.count(kind) >= kinds.count(kind) - 1 for kind in kinds)
    assert starts == sorted(starts) and starts[-1] > 0  # it resumed, and did not start over
    assert differences == 0 and found_history == history and len(history["loss"]) == options["epochs"]
    assert each_once
    assert reads.tobytes() == np.load(folder / "whole" / "reads.npy").tobytes()
    print(f"{(time.monotonic() - began) / (len(kinds) + 1):.1f} s a start")


def check_disks(folder, *, own: bool) -> None:
    """Each checkpoint is whole; where each worker has a disk, at least the newest, whose files they have together."""
    if not own:
        for path in storage.found(folder / "checkpoints"):
            storage.read(path)
        return
    for path in storage.found(folder / "checkpoints0")[:1]:
        other, files = folder / "checkpoints1" / path.name, storage.read_facts(path).files
        assert (other / storage.FACTS).read_bytes() == (path / storage.FACTS).read_bytes()
        for name, at in zip(sorted(files), (path, other), strict=True):
            assert storage.why_not_whole(at / name, files[name]) is None


def table(variant: str, kills: Counter, differences: str, same_history: bool, each_once: bool) -> None:
    print("\n| variant | killed in | kills | arrays that differ | same history | each example once an epoch |")
    for kind in KINDS:
        if kills[kind]:
            print(f"| {variant} | {kind} | {kills[kind]} | {differences} | {same_history} | {each_once} |")


@pytest.mark.slow
@pytest.mark.parametrize("variant", KILLS)
def test_killed_at_random_moments(variant, tmp_path, group, result):
    kill_again_and_again(variant, KINDS * (KILLS[variant] // len(KINDS)), tmp_path, group, result)


def test_killed_in_an_epoch_in_a_save_and_in_a_validation(tmp_path, group, result):
    kill_again_and_again("fit", ["mid-epoch", "save", "validation"], tmp_path, group, result, first=2)
