"""A training resumes with another number of workers, or on one device: same global batch, same result."""

import json
import shutil

import numpy as np
import pytest

from tfgpu.checkpoint import storage

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_another_number_of_workers_resumes_with_the_same_result(tmp_path, launched, whole):
    launched(tmp_path / "two", epochs=2).finish()
    for workers in (3, 1):
        folder = tmp_path / f"then {workers}"
        shutil.copytree(tmp_path / "two", folder)
        (folder / "end.npz").unlink()
        found = launched(folder, "none", "-n", str(workers)).finish()
        assert found.keys() == whole.keys() and len(found["loss"]) == 4
        furthest = {name: float(np.max(np.abs(found[name] - whole[name]))) for name in whole}
        print(json.dumps({"workers": workers, "furthest apart": furthest}))
        assert max(furthest.values()) < 1e-5


@pytest.mark.parametrize(("begins", "ends"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("variant", ["workers", "workers-trainer"])
def test_in_the_middle_of_an_epoch_too(variant, begins, ends, tmp_path, group, result):
    def start(folder, workers):
        # Every third: in the second epoch that is between two updates, where gradients wait.
        options = {"every_steps": 3, "pause": 0.05, "patience": 99, "devices": None if workers > 1 else 1}
        return group(tmp_path / folder, variant, workers=workers, **options)

    whole = start("whole", begins)
    assert whole.wait() == [0] * begins, whole.said()
    cut = start("cut", begins)
    cut.wait_for_checkpoint("epoch-0001-step-*")
    cut.end()
    newest = storage.found(tmp_path / "cut" / "checkpoints")[0].name
    cut = start("cut", ends)
    assert cut.wait() == [0] * ends, cut.said()
    arrays, history = result(tmp_path / "whole")
    found, found_history = result(tmp_path / "cut")
    furthest = max(float(np.max(np.abs(np.float64(a) - b))) for a, b in zip(arrays, found, strict=True))
    print(f"\n| {variant} | {begins} -> {ends} workers | at {newest} | furthest apart {furthest:.1e} |")
    assert newest.startswith("epoch-0001-step-") and cut.epochs_begun() == 3
    assert furthest < 1e-5
    assert found_history.keys() == history.keys()
    for name, values in history.items():
        assert found_history[name] == pytest.approx(values, abs=1e-5), name
    assert (np.load(tmp_path / "cut" / "reads.npy") == np.load(tmp_path / "whole" / "reads.npy")).all()
