"""The CPUs and GPUs of this machine, without TensorFlow."""

import re
import subprocess
from collections.abc import Mapping

from tfgpu.sensors.machine import cores

_GPU = re.compile(r"GPU (?P<number>\d+): .*?(\(UUID: (?P<uuid>GPU-[^)\s]+)\))?$")


def cpus() -> int:
    """Counts the CPUs that this process may use, by its affinity and its container's quota."""
    return max(1, int(cores()))


def gpus(environ: Mapping[str, str]) -> list[str]:
    """Lists the GPUs as CUDA_VISIBLE_DEVICES names them; by UUID where it is not set.

    CUDA's numbers may differ from the driver's, and a lost GPU has a number but cannot be used.

    Args:
        environ: if it has CUDA_VISIBLE_DEVICES, its entries up to the first invalid one are used, as in CUDA.

    Example:
        >>> gpus({"CUDA_VISIBLE_DEVICES": "2,GPU-8f2a,-1,3"})
        ['2', 'GPU-8f2a']
    """
    outer = environ.get("CUDA_VISIBLE_DEVICES")
    if outer is None:
        return _installed()
    names = []
    for name in (part.strip() for part in outer.split(",")):
        if not name or name.startswith("-") or name == "NoDevFiles":
            break
        names.append(name)
    return names


def _installed() -> list[str]:
    """The GPUs that answer, by UUID; by number if one has MIG slices, of which CUDA takes one by number."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = [_GPU.match(line.rstrip()) for line in done.stdout.splitlines()]
    found = [(line["number"], line["uuid"]) for line in lines if line]
    is_cut = re.search(r"(?m)^\s+MIG ", done.stdout)
    return [number if is_cut or not uuid else uuid for number, uuid in found]
