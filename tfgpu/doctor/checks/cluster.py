"""Checks of the cluster: its description, and the GPUs that the scheduler has promised."""

from collections.abc import Mapping

from tfgpu.cluster import Cluster
from tfgpu.doctor.check import Check
from tfgpu.errors import InputError

_NAME = "Cluster"


def cluster(environ: Mapping[str, str]) -> Check:
    try:
        found = Cluster.from_environment(environ)
    except InputError as error:
        if environ.get("TF_CONFIG", "").strip():
            return Check(_NAME, "problem", str(error), "unset TF_CONFIG  (or correct it)", "unset TF_CONFIG")
        return Check(_NAME, "problem", str(error), "Correct the variable that it names.")
    if found.source == "none":
        return Check(_NAME, "ok", "none: one process")
    counts = ", ".join(f"{len(addresses)} {job}" for job, addresses in found.jobs().items())
    return Check(_NAME, "ok", f"{found.source}: {found.task_type} {found.task_index} of {counts}")


def gpus(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check | None:
    """Compares the GPUs that the scheduler allocated with those that TensorFlow sees."""
    promised, by = _promise(environ)
    seen = facts["tensorflow"].get("gpus")
    if promised is None or seen is None:
        return None
    text = f"{by}; TensorFlow sees {len(seen)}"
    if promised > len(seen):
        fix = "See 'GPUs' here; in Slurm, start the processes with `srun --gpus-per-task`, which assigns each its own."
        return Check("GPUs allocated", "problem", text, fix)
    return Check("GPUs allocated", "ok", text)


def _promise(environ: Mapping[str, str]) -> tuple[int | None, str]:
    """The number of GPUs allocated to this process, and the variable that says so."""
    try:
        own = Cluster.from_environment(environ).gpus
    except InputError:
        own = None
    if own is not None:
        return len(own), f"this process's share is {len(own)}"
    for name in ("SLURM_GPUS_PER_TASK", "SLURM_GPUS_ON_NODE"):
        value = environ.get(name, "").rpartition(":")[2]
        if value.isdecimal():
            return int(value), f"{name}={environ[name]}"
    value = environ.get("NVIDIA_VISIBLE_DEVICES", "").strip()
    if value and value not in ("all", "none", "void"):
        count = len(value.split(","))
        return count, f"NVIDIA_VISIBLE_DEVICES names {count}"
    return None, ""
