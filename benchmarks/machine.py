"""The machine and versions on which a figure was measured."""

import datetime
import hashlib
import os
import platform
from importlib import metadata
from pathlib import Path

import psutil

from benchmarks.children import ROOT

_PACKAGES = ("tensorflow", "keras", "numpy")


def facts() -> dict:
    """Returns "device", "memory_gib", "system", "date" and "versions", for JSON."""
    return {
        "device": processor(),
        "all_cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "system": f"{platform.system()} {platform.machine()}",
        "date": datetime.date.today().isoformat(),
        "versions": {"Python": platform.python_version(), **{name: metadata.version(name) for name in _PACKAGES}},
    }


def processor() -> str:
    """Names the CPU; on x86 also that it lacks AVX-512, without which TensorFlow does not turn oneDNN on by itself."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith("flags")), "")
    lacks = ", without AVX-512" if flags and "avx512f" not in flags.split() else ""
    return (names[0] if names else platform.machine()) + lacks


def code() -> str:
    """Stands for the code that is measured: a digest of the package and the peers."""
    digest = hashlib.sha256()
    for path in sorted([*(ROOT / "tfgpu").rglob("*.py"), *(ROOT / "benchmarks" / "peers").glob("*.py")]):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
