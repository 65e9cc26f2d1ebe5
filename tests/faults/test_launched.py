"""`tfgpu launch --max-restarts`: a worker that is killed in the middle changes nothing about the result."""

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_a_killed_worker_restarts_the_group_which_ends_with_the_same_bytes(tmp_path, launched, whole, same_bytes):
    cut = launched(tmp_path / "cut", "killed", "--max-restarts", "2")
    found = cut.finish()
    assert "worker 1: " in cut.said and "SIGKILL" in cut.said
    assert "Attempt 2 starts" in cut.said and len(whole["loss"]) == 4
    assert same_bytes(whole, found) and cut.begun_at(1) == 0 < cut.begun_at(2)
