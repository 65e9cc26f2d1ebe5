"""Checks of NVIDIA's driver and GPUs: whether they are visible, and whether TensorFlow's build supports them."""

import re
from collections.abc import Iterable, Mapping, Sequence

from tfgpu.cluster import Cluster
from tfgpu.compat.versions import INSTALL_CUDA
from tfgpu.doctor.check import Check
from tfgpu.errors import InputError
from tfgpu.launch.heartbeat import HEARTBEAT
from tfgpu.sensors import nvml

_NAME = "Cluster"
MUCH = 0.1
"""From this share of a GPU's memory in use, its processes are named."""
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# Systems that set CUDA_VISIBLE_DEVICES for their processes, by a variable that they set.
_SHARING = {HEARTBEAT: "tfgpu's launcher", "SLURM_JOB_ID": "Slurm", "PBS_JOBID": "PBS", "LSB_JOBID": "LSF"}
_SHARING["SGE_TASK_ID"] = "Grid Engine"


def driver(facts: Mapping[str, dict]) -> Check:
    found, on_the_bus = facts["driver"], facts["machine"].get("pci_gpus", 0)
    if "error" not in found:
        cuda = ".".join(map(str, found["cuda"]))
        text = f"{found['version']}, CUDA up to {cuda}; {names(found['gpus'])}"
        built = re.match(r"\d+", str(facts["tensorflow"].get("build", {}).get("cuda_version", "")))
        if found["gpus"] and built and found["cuda"][0] < int(built[0]):
            text += f"; too old for TensorFlow's CUDA {built[0]}"
            return Check("NVIDIA driver", "problem", text, f"Install a driver for CUDA {built[0]} or newer.")
        return Check("NVIDIA driver", "ok", text)
    return _silent(found["error"], on_the_bus, facts["machine"])


def _silent(error: str, on_the_bus: int, machine: Mapping) -> Check:
    """The check of a driver that does not answer, or is not installed."""
    name = "NVIDIA driver"
    if "DriverNotLoaded" in error:
        return Check(name, "problem", f"the kernel module is not loaded ({error})", command="sudo modprobe nvidia")
    if "version mismatch" in error.lower() or "LibRmVersionMismatch" in error:
        text = f"the library and the kernel module have different versions ({error})"
        if machine.get("kernel_driver"):
            text += f"; the module is {machine['kernel_driver']}"
        command = "sudo rmmod nvidia_uvm nvidia && sudo modprobe nvidia"
        return Check(name, "problem", text, f"{command}  (or reboot: the driver was updated)", command)
    if "no answer within" in error:
        fix = "Look for Xid errors with `sudo dmesg | grep -i xid`; a hung GPU needs a reset or a reboot."
        return Check(name, "problem", f"hangs: {error}", fix)
    if on_the_bus:
        text = f"{on_the_bus} NVIDIA GPU(s) on the PCI bus, but no driver answers ({error})"
        fix = "sudo ubuntu-drivers install  (or your system's command; in a container, use --gpus all)"
        return Check(name, "problem", text, fix, "" if machine.get("container") else "sudo ubuntu-drivers install")
    if "ModuleNotFoundError" in error:
        text = "not checked: nvidia-ml-py is not installed"
        return Check(name, "warning", text, command="pip install nvidia-ml-py")
    return Check(name, "ok", "none: no NVIDIA GPU")


def lost(facts: Mapping[str, dict]) -> list[Check]:
    """Lost GPUs: CUDA may then fail completely, or number the GPUs differently than the driver."""
    found, checks = facts["driver"], []
    others = [gpu["uuid"] for gpu in found.get("gpus", [])]
    for each in found.get("lost", []):
        text = f"GPU {each['index']} does not answer: {each['error']}"
        command = f"sudo nvidia-smi -i {each['index']} --gpu-reset"
        fix = f"{command}  (end its programs first; if that is refused, reboot. If it stays lost, check its power and"
        fix += " slot, or have it replaced)"
        fix += f"; until then, train on the others: {only(others)}" if others else ""
        checks.append(Check("Lost GPU", "problem", text, fix, command))
    return checks


def visible(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    value = environ.get(_VISIBLE)
    if value is None:
        return Check(_VISIBLE, "ok", "not set")
    gpus, lost = facts["driver"].get("gpus", []), facts["driver"].get("lost", [])
    shown, stray = visible_gpus(value, gpus, lost)
    text = f"{value!r}, shows {len(shown)} of {len(gpus)} GPU(s)"
    if stray and gpus:
        command = only(gpu["uuid"] for gpu in gpus)
        return Check(_VISIBLE, "problem", f"{text}: CUDA stops reading at {stray!r}", command=command)
    if not gpus or "MIG-" in value:
        return Check(_VISIBLE, "ok", text)
    if by := shared_out(environ):
        if shown or by == _SHARING[HEARTBEAT]:
            return Check(_VISIBLE, "ok", f"{text}, by {by}")
        return Check(_VISIBLE, "warning", f"{text}: training runs on the CPU", f"Request GPUs from {by}.")
    return _hidden(gpus, shown, text, any_lost=bool(lost))


def _hidden(gpus: Sequence[Mapping], shown: Sequence[int], text: str, *, any_lost: bool) -> Check:
    """GPUs that the user's own CUDA_VISIBLE_DEVICES hides, although they are free."""
    free = [gpu for gpu in gpus if gpu["index"] not in shown and is_free(gpu)]
    if shown and not free:
        text += "; the hidden ones are in use or faulty" if len(shown) < len(gpus) else ""
        return Check(_VISIBLE, "ok", text)
    chosen = [gpu for gpu in gpus if gpu["index"] in shown or gpu in free]
    is_all = len(chosen) == len(gpus) and not any_lost
    command = f"unset {_VISIBLE}" if is_all or not chosen else only(gpu["uuid"] for gpu in chosen)
    if not shown:
        return Check(_VISIBLE, "warning", f"{text}: training runs on the CPU", command=command)
    text += f": GPU {', '.join(str(gpu['index']) for gpu in free)} stays unused"
    return Check(_VISIBLE, "warning", text, f"{command}  (unless the others are reserved for someone else)", command)


def shared_out(environ: Mapping[str, str]) -> str:
    """The system that assigned this process its GPUs by CUDA_VISIBLE_DEVICES; `""` if unknown."""
    for variable, who in _SHARING.items():
        if environ.get(variable):
            return who
    try:
        cluster = Cluster.from_environment(environ)
    except InputError:
        return ""
    hosts = [address.rpartition(":")[0] for address in cluster.workers]
    neighbors = hosts.count(hosts[cluster.rank]) if hosts and cluster.rank >= 0 else 1
    return f"the share of one of several workers ({cluster.source})" if max(cluster.local_size, neighbors) > 1 else ""


def is_full(gpu: Mapping) -> bool:
    """Whether much of a GPU's memory is in use."""
    total = gpu.get("memory_bytes")
    return bool(total) and (gpu.get("used_bytes") or 0) >= MUCH * total


def is_free(gpu: Mapping) -> bool:
    """Whether a GPU can train: not in use, without MIG, without fatal memory errors."""
    ecc = gpu.get("ecc") or {}
    return not (is_full(gpu) or ecc.get("failed") or ecc.get("uncorrected") or (gpu.get("mig") or {}).get("enabled"))


def visible_gpus(value: str, gpus: list[dict], lost: Sequence[Mapping] = ()) -> tuple[list[int], str | None]:
    """As `tfgpu.sensors.nvml.visible`, for the doctor's descriptions of present and lost GPUs."""
    uuids = {each["index"]: None for each in lost} | {gpu["index"]: gpu["uuid"] for gpu in gpus}
    return nvml.visible(value, [uuids.get(index) for index in range(max(uuids, default=-1) + 1)])


def only(uuids: Iterable[str]) -> str:
    """The command that makes only these GPUs visible, by UUID: CUDA and the driver may number them differently."""
    return f"export CUDA_VISIBLE_DEVICES={','.join(uuids)}"


def seen(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    """Compares the GPUs that TensorFlow uses with the visible ones of the driver."""
    found = facts["tensorflow"]
    gpus, there = found.get("gpus", []), facts["driver"].get("gpus", [])
    value = environ.get("CUDA_VISIBLE_DEVICES")
    expected = len(there)
    if value is not None:
        expected = len(visible_gpus(value, there, facts["driver"].get("lost", []))[0])
    if gpus and len(gpus) >= expected:
        named = ", ".join(f"{gpu['name']} (compute capability {gpu['capability']})" for gpu in gpus)
        return Check("GPUs", "ok", f"{len(gpus)}: {named}")
    if expected:
        text = f"the driver shows {expected}, TensorFlow uses {len(gpus)}: {names(there)}"
        if "error" in found:
            return Check("GPUs", "problem", f"{text} (it cannot be imported)", command=INSTALL_CUDA)
        if not found["build"].get("is_cuda_build"):
            command = f"pip uninstall -y tensorflow-cpu; {INSTALL_CUDA}"
            return Check("GPUs", "problem", f"{text} (this build is for CPUs)", command=command)
        return Check("GPUs", "problem", text, f"{INSTALL_CUDA}  (then see 'CUDA libraries' here)", INSTALL_CUDA)
    if there:
        return Check("GPUs", "ok", "CUDA_VISIBLE_DEVICES hides all: training runs on the CPU")
    if facts["driver"].get("lost"):
        return Check("GPUs", "problem", "the driver has lost all its GPUs", "See 'Lost GPU' here.")
    if facts["machine"].get("pci_gpus"):
        return Check("GPUs", "problem", "an NVIDIA GPU without a driver", "See 'NVIDIA driver' here.")
    return Check("GPUs", "ok", "no NVIDIA GPU: training runs on the CPU")


def capability(facts: Mapping[str, dict]) -> list[Check]:
    """Compares each GPU's compute capability with TensorFlow's build."""
    built = facts["tensorflow"].get("build", {}).get("cuda_compute_capabilities") or []
    found = [tuple(gpu.get("capability") or ()) for gpu in facts["driver"].get("gpus") or []]
    if not built or not any(found):
        return []
    name, faults = "Compute capability", []
    for own in dict.fromkeys(each for each in found if each):
        text = f"{own[0]}.{own[1]}; TensorFlow was built for {', '.join(built)}"
        fits = fit(own, built)
        if fits == "compiled at start":
            fix = "export CUDA_CACHE_MAXSIZE=4294967296"
            text += ": the first start compiles its kernels, which takes up to half an hour"
            faults.append(Check(name, "warning", text, f"{fix}  (so that it happens only once)", fix))
        elif fits == "none":
            fix = "Use a TensorFlow built for this GPU: an older release for an old GPU, a newer one for a new GPU."
            faults.append(Check(name, "problem", text, fix))
    shown = ", ".join(f"{each[0]}.{each[1]}" for each in dict.fromkeys(found) if each)
    return faults or [Check(name, "ok", f"{shown}: TensorFlow has code for it")]


def fit(own: tuple[int, int], built: list[str]) -> str:
    """Returns whether a build supports a GPU: `"ready"`, `"compiled at start"` from PTX, or `"none"`.

    Machine code (`sm_80`) runs on GPUs of the same major version and the same or a higher minor version; PTX
    (`compute_90`) is compiled at run time for all newer GPUs.

    Example:
        >>> fit((8, 6), ["sm_80", "compute_90"]), fit((12, 0), ["sm_80", "compute_90"]), fit((5, 2), ["sm_80"])
        ('ready', 'compiled at start', 'none')
        >>> fit((9, 0), ["sm_80", "compute_90"])
        'ready'

    Source: https://docs.nvidia.com/cuda/cuda-c-best-practices-guide/#cuda-compatibility-developers-guide
    """
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)[a-z]?", each) for each in built]
    codes = [(each[1], (int(each[2]), int(each[3]))) for each in known if each]
    if any(kind == "sm" and code[0] == own[0] and code <= own for kind, code in codes):
        return "ready"
    # TensorFlow's releases list the newest GPUs this way, and contain machine code for them too.
    if any(kind == "compute" and code == own for kind, code in codes):
        return "ready"
    return "compiled at start" if any(kind == "compute" and code <= own for kind, code in codes) else "none"


def names(gpus: list[dict]) -> str:
    return ", ".join(gpu["name"] for gpu in gpus) or "no GPU"


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


def allocated(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check | None:
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
