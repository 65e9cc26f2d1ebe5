"""Checks of cores, memory, limits, shared memory, disk and container."""

from collections.abc import Mapping

from tfgpu.doctor.check import Check
from tfgpu.launch.heartbeat import HEARTBEAT

GIB = 2**30
FILES = 4096
"""The number of open files that a training with many shards, workers and logs may need."""
_SHARED = GIB
_SMALL_SHARED = 2**28
_THREADS = 2048


def processor(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    """Compares the cores that this process may use with the threads that it starts."""
    found = facts["machine"]
    if not found.get("cores"):
        return [Check("CPU", "warning", found.get("error", "unknown"), command="pip install psutil")]
    cores, quota = found["cores"], found.get("quota")
    usable = min(cores, quota) if quota else cores
    text = f"{cores} cores for this process"
    if quota and quota < cores:
        each = max(1, round(quota))
        text += f", but a CPU quota of {quota:g}: TensorFlow starts {cores} threads, which slow each other down"
        command = f"export TF_NUM_INTRAOP_THREADS={each} TF_NUM_INTEROP_THREADS={each} OMP_NUM_THREADS={each}"
        return [Check("CPU", "warning", text, command=command)]
    is_alone = usable >= 4 and not environ.get(HEARTBEAT)  # in a launch, several processes share the cores
    wrong, why = _wrong_threads(found.get("threads", {}), usable, is_alone=is_alone)
    if wrong:
        return [Check("CPU", "warning", text + why, command=f"unset {' '.join(wrong)}")]
    gpus = len(facts["driver"].get("gpus") or [])
    if gpus and usable < 2 * gpus:
        text += f", for {gpus} GPU(s): too few to feed them"
        fix = "Request 4 or more cores per GPU (Slurm: --cpus-per-task; docker: --cpus)."
        return [Check("CPU", "warning", text, fix)]
    everything = found.get("all_cores") or cores
    return [Check("CPU", "ok", text + (f" of {everything}" if everything > cores else ""))]


def _wrong_threads(threads: Mapping[str, str], usable: float, *, is_alone: bool) -> tuple[list[str], str]:
    """The variables whose number of threads is wrong, and why."""
    if many := [name for name, value in threads.items() if _number(value) > usable]:
        return many, f", but {', '.join(f'{name}={threads[name]}' for name in many)}"
    if odd := [name for name, value in threads.items() if not _is_number(value)]:
        return odd, f"; not a number: {', '.join(f'{name}={threads[name]!r}' for name in odd)}"
    single = [name for name, value in threads.items() if is_alone and _number(value) == 1]
    return single, f", but {', '.join(single)} allows one thread"


def _is_number(value: str) -> bool:
    return value.strip().isdecimal()


def _number(value: str) -> int:
    return int(value) if _is_number(value) else 0


def memory(facts: Mapping[str, dict]) -> Check | None:
    found = facts["machine"]
    if "error" in found:
        return None  # `processor` reports it.
    total, free, limit = found["memory_bytes"], found["free_bytes"], found.get("memory_limit_bytes")
    text = f"{free / GIB:.1f} GiB free of {total / GIB:.1f} GiB"
    if limit and limit < total:
        text += f", {limit / GIB:.1f} GiB allowed here"
        if limit < 2 * GIB:
            fix = "Allow more (docker: --memory 8g; Kubernetes: resources.limits.memory; Slurm: --mem)."
            return Check("Memory", "warning", text, fix)
    if free < GIB:
        return Check("Memory", "warning", text, "Close other programs: TensorFlow alone takes about 0.5 GiB.")
    return Check("Memory", "ok", text)


def shared_memory(facts: Mapping[str, dict]) -> Check | None:
    """`/dev/shm`, which NCCL and data workers use; Docker's default is 64 MiB."""
    found, name = facts["machine"].get("shared_memory"), "/dev/shm"
    if not found:
        return None
    if "error" in found:
        fix = "sudo mount -t tmpfs -o size=8g tmpfs /dev/shm"
        return Check(name, "warning", found["error"], command=f"sudo mkdir -p /dev/shm; {fix}")
    total, free = found["bytes"], found["free_bytes"]
    text = f"{free / GIB:.2f} GiB free of {total / GIB:.2f} GiB"
    several = len(facts["driver"].get("gpus") or []) > 1
    least = _SHARED if several else _SMALL_SHARED
    if total < least:
        text += f"; {'several GPUs need' if several else 'data workers may need'} {least / GIB:g} GiB or more"
        fix, command = _larger(facts["machine"].get("container", ""))
        return Check(name, "problem" if several else "warning", text, fix, command)
    if free < least:
        text += ": full of leftover files"
        return Check(name, "warning", text, "List them with `ls -la /dev/shm`, and remove those that no process uses.")
    return Check(name, "ok", text)


def _larger(container: str) -> tuple[str, str]:
    if container == "kubernetes":
        return "Mount an emptyDir with medium: Memory at /dev/shm (tfgpu launch --kubernetes writes one).", ""
    if container:
        return "Start the container with --shm-size=8g (or --ipc=host).", ""
    return "", "sudo mount -o remount,size=8g /dev/shm"


def container(facts: Mapping[str, dict]) -> Check | None:
    """A container without access to the GPUs of its host."""
    found, name = facts["machine"], "Container"
    if "error" in found:
        return None
    kind, there = found.get("container", ""), found.get("devices", {})
    has_host_gpus = found.get("pci_gpus") or found.get("kernel_driver")
    if kind and has_host_gpus and not there.get("gpus"):
        text = f"{kind}: the host has NVIDIA GPUs, but /dev/nvidia0 is missing"
        return Check(name, "problem", text, _gpus_for(kind))
    if there.get("closed"):
        files = ", ".join(f"/dev/{each}" for each in there["closed"])
        text = f"{files}: this user may not open them"
        return Check(name, "problem", text, command='sudo usermod -aG video,render "$USER"')
    if not kind:
        return Check(name, "ok", "none")
    return Check(name, "ok", f"{kind}, with {there.get('gpus', 0)} NVIDIA GPU(s)")


def _gpus_for(kind: str) -> str:
    ways = {
        "kubernetes": "Request them in the pod: resources.limits with nvidia.com/gpu: 1 (and NVIDIA's device plugin).",
        "podman": "Start it with: podman run --device nvidia.com/gpu=all ...",
        "apptainer": "Start it with: apptainer run --nv ...",
    }
    return ways.get(kind, "Start it with: docker run --gpus all ... (needs the NVIDIA container toolkit on the host).")


def limits(facts: Mapping[str, dict]) -> list[Check]:
    """Open files, processes, locked memory and address space."""
    found = facts["machine"].get("limits")
    if not found:
        return []
    faults = []
    if 0 <= found["files"] < FILES:
        text = f"at most {found['files']} open files; a training with many files and workers needs {FILES}"
        faults.append(_limit("Open files", text, "n", found["most_files"], FILES * 16, FILES))
    if 0 <= found["processes"] < _THREADS:
        text = f"at most {found['processes']} processes and threads; TensorFlow starts hundreds"
        faults.append(_limit("Processes", text, "u", found["most_processes"], _THREADS * 8, _THREADS))
    if facts["machine"].get("infiniband") and 0 <= found["locked"] < GIB:
        text = f"at most {found['locked'] >> 10} KiB of locked memory; InfiniBand locks its buffers"
        faults.append(_limit("Locked memory", text, "l", found["most_locked"], -1, GIB))
    if 0 <= found["addresses"]:
        text = f"at most {found['addresses'] / GIB:.1f} GiB of address space; a GPU reserves more"
        faults.append(_limit("Address space", text, "v", found["most_addresses"], -1, 2**47))
    files = "unlimited" if found["files"] < 0 else found["files"]
    return faults or [Check("Limits", "ok", f"{files} open files")]


def _limit(name: str, text: str, flag: str, most: int, wish: int, need: int) -> Check:
    """The check of a limit, which a shell can raise up to `most`."""
    if most < 0 or most >= need:
        value = "unlimited" if wish < 0 and most < 0 else min(each for each in (wish, most) if each >= 0)
        return Check(name, "warning", text, command=f"ulimit -{flag} {value}")
    fix = f"Raise it in /etc/security/limits.conf, or with docker run --ulimit (the hard limit is {most})."
    return Check(name, "warning", text, fix)


def disk(facts: Mapping[str, dict]) -> Check | None:
    """Disk space for checkpoints in the working directory."""
    found = facts["machine"].get("disk")
    if not found:
        return None
    text = f"{found['free_bytes'] / GIB:.1f} GiB free in {found['folder']}"
    if not found["is_writable"]:
        return Check("Disk", "warning", f"{found['folder']} cannot be written", command="cd ~")
    if found["free_bytes"] < 5 * GIB:
        return Check("Disk", "warning", f"{text}: checkpoints may not fit", "Free some, or use another disk: --output.")
    return Check("Disk", "ok", text)
