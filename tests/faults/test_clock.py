"""The clock of the day jumps by a day while a training runs: it ends as it would have.

`clock.c` shifts what the processes are told, Python and C++ alike; files keep the system's times.
"""

import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from tfgpu.checkpoint import storage

pytestmark = [pytest.mark.processes, pytest.mark.slow]

DAY_S = 86400
OPTIONS = {"every_steps": 2, "pause": 0.05, "patience": 99}


@pytest.fixture
def clock(tmp_path):
    """The variables that give a process a clock of its own, and what sets that: so many seconds from the true time."""
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler, cc")
    library, shift = tmp_path / "clock.so", tmp_path / "shift"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True)
    shift.write_bytes(struct.pack("q", 0))

    def put(seconds: int) -> None:
        with open(shift, "r+b", buffering=0) as file:  # one write into the place where the processes look
            file.write(struct.pack("q", seconds))

    return {"LD_PRELOAD": str(library), "CLOCK_SHIFT": str(shift)}, put


def jumps(times: Path) -> list[int]:
    """By how many days the clock has jumped between two epochs of a process, where it did."""
    at = [float(line) for line in times.read_text().splitlines()]
    days = [round((late - early) / DAY_S) for early, late in zip(at, at[1:], strict=False)]
    return [day for day in days if day]


def test_a_killed_fit_whose_clock_jumps_resumes_with_equal_results(tmp_path, group, result, clock):
    variables, put = clock
    under = ("env", *(f"{name}={value}" for name, value in variables.items()))
    whole = group(tmp_path / "whole", "fit", **OPTIONS)
    assert whole.wait() == [0], whole.said()
    cut = group(tmp_path / "cut", "fit", under=under, **OPTIONS)
    cut.wait_for_checkpoint("epoch-0001-step-*")
    put(-DAY_S)
    cut.wait_for_checkpoint("epoch-0002-step-*")
    cut.end()
    put(-2 * DAY_S)
    cut = group(tmp_path / "cut", "fit", under=under, **OPTIONS)
    cut.wait_for_checkpoint("epoch-0003-step-*")
    put(DAY_S)
    assert cut.wait() == [0], cut.said()
    arrays, history = result(tmp_path / "whole")
    found, found_history = result(tmp_path / "cut")
    days = jumps(tmp_path / "cut" / "clock0")
    print(f"\n| fit, killed between | clock jumps by days {days} |")
    assert days[:2] == [-1, -1] and cut.epochs_begun() == 2
    assert storage.found(tmp_path / "cut" / "checkpoints")[0].name == "epoch-0004"
    assert [a.tobytes() for a in arrays] == [a.tobytes() for a in found] and history == found_history


@pytest.mark.parametrize("days", [-1, 1])
def test_two_workers_whose_clock_jumps_end_equal(days, tmp_path, launched, whole, same_bytes, clock):
    variables, put = clock
    cut = launched(tmp_path / "cut", "slow", "--heartbeat-timeout", "60", "--max-restarts", "1", environ=variables)
    workers = [cut.event("middle", rank=rank)[1] for rank in range(2)]
    assert all("clock.so" in Path(f"/proc/{pid}/maps").read_text() for pid in [cut.process.pid, *workers])
    put(days * DAY_S)
    found = cut.finish()
    attempts = 2 if "Attempt 2 starts" in cut.said else 1
    print(f"\n| two workers under a launcher | clock jumps by {days} days | attempts {attempts} |")
    # TensorFlow counts its own heartbeats by this clock: after a leap ahead it takes the other worker for dead.
    assert attempts == 1 or (days > 0 and "heartbeat" in cut.said), cut.said
    assert same_bytes(whole, found)
