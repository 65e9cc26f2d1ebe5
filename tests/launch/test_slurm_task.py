"""One task, with real processes and signals."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tfgpu.launch.slurm.task import read

WAIT = """
import os, signal, sys, time
from pathlib import Path
answer = sys.argv[1]
if answer == "deaf":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if answer == "save":
    def leave(*_):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # Python dies of one that comes while it ends
        sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
Path(os.environ["TFGPU_HEARTBEAT"]).touch()
print("ready", flush=True)
time.sleep(1000)
"""


def start(tmp_path, script, *arguments, grace=30, silence=30):
    (tmp_path / "script.py").write_text(script)
    program = (
        "import sys; from pathlib import Path; from tfgpu.launch.slurm.task import run; "
        f"sys.exit(run([sys.executable, *sys.argv[1:]], Path({str(tmp_path / 'record')!r}), "
        f"grace_period_s={grace}, heartbeat_timeout_s={silence}))"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "script.py"), *arguments]
    # A process group of its own, which gets the signals as Slurm sends them: every process of it.
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def finish(process) -> int:
    try:
        return process.wait(timeout=550)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.stdout.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", 137),
        ("import os; os.kill(os.getpid(), 11)", 139),
    ],
)
def test_the_scripts_exit_code_is_the_tasks_and_is_recorded(tmp_path, script, code):
    before = time.time()
    assert finish(start(tmp_path, script)) == code
    record = read(tmp_path / "record")
    assert (record.code, record.asked) == (code, None)
    assert before <= record.ended <= time.time()


@pytest.mark.processes
@pytest.mark.parametrize(("answer", "code"), [("save", 75), ("none", 143), ("deaf", 137)])
def test_a_task_that_was_asked_to_stop_returns_0_and_records_the_code(tmp_path, answer, code):
    process = start(tmp_path, WAIT, answer, grace=1 if answer == "deaf" else 30)
    assert process.stdout.readline() == "ready\n"
    before = time.time()
    for _ in range(2):  # Slurm asks more than once.
        os.killpg(process.pid, signal.SIGTERM)
    assert finish(process) == 0
    record = read(tmp_path / "record")
    assert record.code == code
    assert before <= record.asked <= record.ended


@pytest.mark.processes
def test_a_silent_script_is_killed_and_counts_as_124(tmp_path):
    process = start(tmp_path, WAIT, "none", silence=1)
    assert finish(process) == 124
    assert read(tmp_path / "record").code == 124


@pytest.mark.processes
def test_a_process_without_a_first_heartbeat_is_not_silent(tmp_path):
    process = start(tmp_path, "import time; time.sleep(3)", silence=1)
    assert finish(process) == 0
