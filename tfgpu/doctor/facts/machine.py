"""Facts of this machine, and of this process's share of it: cores, memory, limits, devices, container.

Everything is read below `root`, a folder with `proc`, `sys`, `dev` and `run`, such as `/`.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tfgpu.sensors import nvml
from tfgpu.sensors.machine import cpu_quota, memory_limit, text_of

NVIDIA = "0x10de"
_DISPLAY = "0x03"
_XID = re.compile(r"NVRM: Xid \(([^)]*)\): (\d+),?\s*(.*)")
_MOST_LINES = 20
_TOOL_S = 10
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS")
_CONTAINERS = ("docker", "containerd", "kubepods", "libpod", "lxc", "garden", "crio")
UNLIMITED = -1


def _machine(*, root: str = "/", **_) -> dict:
    import psutil

    memory, base = psutil.virtual_memory(), Path(root)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = {name: os.environ[name] for name in _THREADS if os.environ.get(name, "").strip()}
    found = {"cores": cores, "all_cores": os.cpu_count(), "quota": cpu_quota(base), "threads": threads}
    found |= {"memory_bytes": memory.total, "free_bytes": memory.available, "memory_limit_bytes": memory_limit(base)}
    found |= {"pci_gpus": pci_gpus(base / "sys/bus/pci/devices"), "container": container(base, os.environ)}
    found |= {"devices": devices(base / "dev"), "kernel_driver": kernel_driver(base)}
    found |= {"shared_memory": shared_memory(base), "limits": limits(), "disk": disk()}
    return {**found, "infiniband": len(list((base / "sys/class/infiniband").glob("*")))}


def pci_gpus(folder: Path) -> int:
    """Counts NVIDIA's display and 3D controllers among Linux's PCI devices, with or without a driver.

    Args:
        folder: `/sys/bus/pci/devices`; the count is 0 if it does not exist.
    """
    found = [device for device in folder.glob("*") if text_of(device / "vendor").strip() == NVIDIA]
    return sum(text_of(device / "class").startswith(_DISPLAY) for device in found)


def container(root: Path, environ: Mapping[str, str]) -> str:
    """The kind of container this is; `""` outside containers."""
    if environ.get("KUBERNETES_SERVICE_HOST"):
        return "kubernetes"
    if (root / ".dockerenv").exists():
        return "docker"
    if (root / "run/.containerenv").exists():
        return "podman"
    named = text_of(root / "proc/1/cgroup") + text_of(root / "run/systemd/container")
    if environ.get("APPTAINER_NAME") or environ.get("SINGULARITY_NAME"):
        return "apptainer"
    return next((name for name in _CONTAINERS if name in named), "")


def devices(folder: Path) -> dict:
    """NVIDIA's device files, and those that this process may not open."""
    nodes = [path for path in sorted(folder.glob("nvidia*")) if re.fullmatch(r"nvidia(ctl|-uvm|\d+)", path.name)]
    closed = [path.name for path in nodes if not os.access(path, os.R_OK | os.W_OK)]
    return {"gpus": sum(path.name[6:].isdecimal() for path in nodes), "closed": closed}


def kernel_driver(root: Path) -> str | None:
    """The version of the loaded NVIDIA kernel module; `None` if it is not loaded."""
    match = re.search(r"Kernel Module[^\n]*?\s(\d+\.\d+(?:\.\d+)?)\s", text_of(root / "proc/driver/nvidia/version"))
    return match[1] if match else None


def shared_memory(root: Path) -> dict:
    """The size and the free space of `/dev/shm` in bytes."""
    try:
        found = os.statvfs(root / "dev/shm")
    except OSError as error:
        return {"error": f"/dev/shm: {error.strerror}"}
    total, free = found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail
    # Below another root it is a plain folder: use the size in the mount table.
    mounts = text_of(root / "proc/mounts") if str(root) != "/" else ""
    match = re.search(r"^\S+ /dev/shm tmpfs \S*?\bsize=(\d+)([kmg]?)", mounts, re.MULTILINE)
    size = int(match[1]) * 1024 ** (" kmg".index(match[2]) if match[2] else 0) if match else None
    return {"bytes": size or total, "free_bytes": min(free, size or free)}


def limits() -> dict[str, int]:
    """The resource limits of this process; -1 means unlimited."""
    import resource

    asked = {"files": resource.RLIMIT_NOFILE, "processes": resource.RLIMIT_NPROC, "locked": resource.RLIMIT_MEMLOCK}
    asked |= {"addresses": resource.RLIMIT_AS}
    found = {}
    for name, number in asked.items():
        soft, hard = resource.getrlimit(number)
        found[name] = UNLIMITED if soft == resource.RLIM_INFINITY else soft
        found[f"most_{name}"] = UNLIMITED if hard == resource.RLIM_INFINITY else hard
    return found


def disk() -> dict:
    """Free bytes in the working directory, and whether it is writable."""
    here = os.getcwd()
    return {"folder": here, "free_bytes": shutil.disk_usage(here).free, "is_writable": os.access(here, os.W_OK)}


def _xid(**_) -> dict:
    """NVIDIA's errors in the kernel log, which only some users may read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", timeout=_TOOL_S)
    except OSError as error:
        return {"lines": [], "unread": error.strerror or str(error)}
    if done.returncode:
        return {"lines": [], "unread": (done.stderr.strip().splitlines() or ["no message"])[-1][:200]}
    return {"lines": xids(done.stdout), "unread": ""}


def xids(log: str) -> list[dict]:
    """The last Xid errors in a kernel log.

    Example:
        >>> xids("[ 7.1] NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.")
        [{'gpu': 'PCI:0000:3b:00', 'number': 79, 'text': 'pid=1234, GPU has fallen off the bus.'}]
    """
    found = [_XID.search(line) for line in log.splitlines()]
    lines = [{"gpu": each[1], "number": int(each[2]), "text": each[3][:200]} for each in found if each]
    return lines[-_MOST_LINES:]


QUESTIONS = {"machine": _machine, "xid": _xid, "driver": lambda *, root="/", **_: nvml.driver(root)}
