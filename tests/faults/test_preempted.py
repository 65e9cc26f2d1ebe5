"""SIGTERM in mid-epoch under `tfgpu launch`: saved at its step, exit code 75, and in the end the same bytes."""

import os
import signal
import time

import pytest

from tfgpu.checkpoint import storage

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def steps(run, attempt: int = 1) -> list[int]:
    """The steps that the chief has noted in its second epoch."""
    found = (run.events(f"step {number}", attempt, 0) for number in range(13, 25))
    return [number for number, events in zip(range(13, 25), found, strict=True) if events]


def newest(run) -> tuple[int, int]:
    """Whole epochs, and the step within the next, of the newest checkpoint."""
    places = [storage.place_of(path) for path in (run.folder / "checkpoints").iterdir()]
    return max(place for place in places if place)


def test_sigterm_to_one_worker_restarts_all_at_their_step_and_spends_nothing(tmp_path, launched, whole, same_bytes):
    run = launched(tmp_path / "worker", "slow")
    os.kill(run.event("middle", rank=1)[1], signal.SIGTERM)
    asked = time.monotonic()
    left = run.said_at("was preempted and has saved (exit code 75)")
    run.said_at("Attempt 2 starts in ")
    assert "(0 of 0 restarts used)" in run.said
    run.event("start", attempt=2)
    epoch, step = newest(run)
    print(f"saved and left {left - asked:.2f} s after SIGTERM, at step {step} of {steps(run)}")
    assert epoch == 1 and step == steps(run)[-1] < 24  # in mid-epoch, and after the very last step that was done
    assert same_bytes(whole, run.finish())
    assert run.events("start", attempt=3) == []


def test_sigterm_to_the_launcher_ends_it_with_75_and_the_same_command_resumes(tmp_path, launched, whole, same_bytes):
    run = launched(tmp_path / "launcher", "slow", "--max-restarts", "3")
    run.event("middle", rank=0)
    run.process.send_signal(signal.SIGTERM)
    asked = time.monotonic()
    assert run.end() == 75, run.said
    print(f"ended {time.monotonic() - asked:.2f} s after SIGTERM")
    assert "SIGTERM: the processes have been asked to stop" in run.said and "Attempt 2" not in run.said
    epoch, step = newest(run)
    assert epoch == 1 and step == steps(run)[-1] < 24
    for pid in {pid for _, pid in run.events("start")}:
        run.gone(pid)
    again = launched(tmp_path / "launcher")
    assert same_bytes(whole, again.finish())
