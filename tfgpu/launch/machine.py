"""What one machine has for the processes that it is to run: CPUs and GPUs. Nothing here starts TensorFlow."""

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def cpus() -> int:
    """Counts the CPUs that this process may use: its affinity, and its container's quota where there is one."""
    available = len(os.sched_getaffinity(0))
    try:
        quota, period = _QUOTA.read_text().split()
        return max(1, min(available, int(quota) // int(period)))
    except (OSError, ValueError):  # No such file, or "max".
        return available


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Lists the GPUs as CUDA_VISIBLE_DEVICES names them.

    Args:
        environ: where CUDA_VISIBLE_DEVICES stands, these are its entries; CUDA itself stops reading at a wrong one.

    Example:
        >>> gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-8f2a,-1,3"})
        ['2', 'GPU-8f2a']
    """
    outer = environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return [str(index) for index in range(_installed())]
    names = []
    for name in (part.strip() for part in outer.split(",")):
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        names.append(name)
    return names


def _installed() -> int:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in done.stdout.splitlines())
