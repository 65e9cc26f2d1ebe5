"""How long programs take to start: whole processes, in turn, after one run of each that does not count."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.children import ROOT, Machine


def commands(machine: Machine) -> dict[str, list[str | Path]]:
    """What is started, by the name that the table shows."""
    ours, theirs = sys.executable, machine.peers_python
    found = {
        "python": [ours, "-c", "pass"],
        "import tfgpu": [ours, "-c", "import tfgpu"],
        "tfgpu --help": [ours, "-m", "tfgpu", "--help"],
        "import tensorflow": [ours, "-c", "import tensorflow"],
        "import keras (TensorFlow)": [ours, "-c", "import keras"],
    }
    if theirs:
        found["import torch"] = [theirs, "-c", "import torch"]
        found["import jax"] = [theirs, "-c", "import jax"]
    return found


def measure(machine: Machine, *, rounds: int) -> dict[str, dict]:
    """Returns for each command "seconds" and "cpu_s", a number a round, or "message" if it fails."""
    rows: dict[str, dict] = {name: {"seconds": [], "cpu_s": []} for name in commands(machine)}
    for number in range(-1, rounds):
        for name, command in list(commands(machine).items())[:: 1 if number % 2 else -1]:
            wall, cpu, code = _run(command)
            if code:
                rows[name]["message"] = f"ended with exit code {code}"
            elif number >= 0:
                rows[name]["seconds"].append(wall)
                rows[name]["cpu_s"].append(cpu)
    return rows


def _run(command: list[str | Path]) -> tuple[float, float, int]:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    began = time.perf_counter()
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, process.returncode
