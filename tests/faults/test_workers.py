"""A training that two workers began goes on with three, or with one device: same global batch, same result."""

import json
import shutil

import numpy as np
import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(400)]


def test_another_number_of_workers_goes_on_with_the_same_result(tmp_path, launched, whole):
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
