"""What the machine's facts mean: each check is one function of the facts and the environment."""

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError

TESTED = {"tensorflow": (2, 21), "keras": (3, 15)}
INSTALL = "pip install 'tensorflow~=2.21' 'keras~=3.15'"
INSTALL_CUDA = "pip install 'tensorflow[and-cuda]~=2.21'"


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: such as `"TensorFlow"`.
        status: `"ok"`, `"warning"` (training works, but could do better) or `"problem"` (it does not work, or
            leaves a GPU unused).
        found: what is there, in a few words.
        fix: the command or the sentence that mends it; `""` when the status is `"ok"`.
    """

    name: str
    status: str
    found: str
    fix: str = ""


def judge(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    """Makes checks of the facts that `gather` brought.

    Args:
        facts: what `gather` returns.
        environ: the environment variables it was given.

    Returns:
        The checks; each problem and warning has a fix.
    """
    return [
        _python(facts),
        _tensorflow(facts),
        _keras(facts, environ),
        _legacy_keras(facts, environ),
        _build(facts),
        _driver(facts),
        _visible(facts, environ),
        _gpus(facts, environ),
        _cuda(facts),
        _tensorboard(facts),
        _cluster(environ),
        _processor(facts),
        _memory(facts),
        *_repairs(facts, environ),
    ]


def _python(facts: Mapping[str, dict]) -> Check:
    found = facts["python"]
    if "error" in found:
        return Check("Python", "problem", found["error"], f"Run `{sys.executable} -c 'import tfgpu'` and mend it.")
    text = f"{found['version']} ({found['executable']})"
    if tuple(map(int, found["version"].split(".")[:2])) < (3, 11):
        return Check("Python", "problem", text, "Install Python 3.11 or newer, and make a new .venv with it.")
    return Check("Python", "ok", text)


def _tensorflow(facts: Mapping[str, dict]) -> Check:
    return _package("TensorFlow", "tensorflow", facts["tensorflow"])


def _package(title: str, package: str, found: dict) -> Check:
    if "error" in found:
        is_missing = re.search(rf"No module named '{package}'$", found["error"])
        text = "not installed" if is_missing else f"cannot be imported: {found['error']}"
        return Check(title, "problem", text, INSTALL if is_missing else f"{INSTALL} --force-reinstall")
    tested = TESTED[package]
    numbers = tuple(int(part) for part in re.findall(r"\d+", found["version"])[:2])
    if numbers[0] != tested[0] or numbers < tested:
        wanted = ".".join(map(str, tested))
        return Check(title, "warning", f"{found['version']}; tests ran on {wanted}", INSTALL)
    return Check(title, "ok", found["version"])


def _keras(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    found = facts["keras"]
    # A backend that is not installed shows as an import error that names it.
    absent = re.search(r"No module named '(jax|torch|openvino)'", found.get("error", ""))
    backend = absent[1] if absent else found.get("backend", "tensorflow")
    if backend == "tensorflow":
        return _package("Keras", "keras", found)
    fix = "export KERAS_BACKEND=tensorflow"
    if "KERAS_BACKEND" not in environ:
        fix += '  (or set "backend": "tensorflow" in ~/.keras/keras.json)'
    return Check("Keras", "problem", f"its backend is {backend}, not TensorFlow", fix)


def _legacy_keras(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    wanted = environ.get("TF_USE_LEGACY_KERAS", "").lower() in ("1", "true")
    installed = facts["packages"].get("tf-keras")
    if wanted:
        text = "TF_USE_LEGACY_KERAS makes tf.keras the old Keras 2, whose models do not mix with Keras 3"
        return Check("Legacy Keras", "problem", text, "unset TF_USE_LEGACY_KERAS")
    if installed:
        text = f"tf-keras {installed} is installed: what it makes does not mix with Keras 3"
        return Check("Legacy Keras", "warning", text, "pip uninstall tf-keras  (unless something imports tf_keras)")
    return Check("Legacy Keras", "ok", "not in use")


def _build(facts: Mapping[str, dict]) -> Check:
    found = facts["tensorflow"]
    if "error" in found:
        return Check("TensorFlow build", "problem", "unknown: TensorFlow cannot be imported", INSTALL)
    build = found["build"]
    if not build.get("is_cuda_build"):
        return Check("TensorFlow build", "ok", "for CPUs")
    capabilities = ", ".join(build.get("cuda_compute_capabilities", []))
    text = f"CUDA {build.get('cuda_version', '?')}, cuDNN {build.get('cudnn_version', '?')} ({capabilities})"
    return Check("TensorFlow build", "ok", text)


def _driver(facts: Mapping[str, dict]) -> Check:
    found, on_the_bus = facts["driver"], facts["machine"].get("pci_gpus", 0)
    if "error" not in found:
        cuda = ".".join(map(str, found["cuda"]))
        text = f"{found['version']}, CUDA up to {cuda}; {_gpu_names(found['gpus'])}"
        built = re.match(r"\d+", str(facts["tensorflow"].get("build", {}).get("cuda_version", "")))
        if found["gpus"] and built and found["cuda"][0] < int(built[0]):
            text += f"; too old for TensorFlow's CUDA {built[0]}"
            return Check("NVIDIA driver", "problem", text, f"Install a driver for CUDA {built[0]} or newer.")
        return Check("NVIDIA driver", "ok", text)
    if on_the_bus:
        text = f"{on_the_bus} NVIDIA GPU(s) on the PCI bus, but no driver answers ({found['error']})"
        fix = "sudo ubuntu-drivers install  (or your system's way; start a container with --gpus all)"
        return Check("NVIDIA driver", "problem", text, fix)
    if "ModuleNotFoundError" in found["error"]:
        text = "not asked: nvidia-ml-py is not installed"
        return Check("NVIDIA driver", "warning", text, "pip install nvidia-ml-py")
    return Check("NVIDIA driver", "ok", "none: no NVIDIA GPU")


def _visible(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    name, value = "CUDA_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")
    gpus = facts["driver"].get("gpus", [])
    if value is None:
        return Check(name, "ok", "not set")
    shown, stray = visible_gpus(value, gpus)
    text = f"{value!r}, shows {len(shown)} of {len(gpus)} GPU(s)"
    if stray and gpus:
        fix = f"export CUDA_VISIBLE_DEVICES={','.join(str(index) for index in range(len(gpus)))}"
        return Check(name, "problem", f"{text}: CUDA stops reading at {stray!r}", fix)
    if gpus and not shown:
        return Check(name, "warning", f"{text}: training runs on the CPU", "unset CUDA_VISIBLE_DEVICES")
    return Check(name, "ok", text)


def visible_gpus(value: str, gpus: list[dict]) -> tuple[list[int], str | None]:
    """Reads CUDA_VISIBLE_DEVICES as CUDA does: up to the first entry that names no GPU.

    Args:
        value: the variable's value: indices, or starts of GPU UUIDs, with commas between.
        gpus: the driver's GPUs, each with its `"uuid"`.

    Returns:
        The indices of the visible GPUs, and the entry at which CUDA stops; `None` where it reads to the end.
        "-1" is the usual way to hide all, and no stray entry.

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    shown: list[int] = []
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    for entry in entries:
        named = [index for index, gpu in enumerate(gpus) if gpu["uuid"].startswith(entry)]
        if re.fullmatch(r"\d+", entry) and int(entry) < len(gpus):
            index = int(entry)
        elif re.match(r"GPU-", entry) and len(named) == 1:
            index = named[0]
        elif entry.startswith("MIG-"):
            continue  # A slice of a GPU; the driver's list has whole ones.
        else:
            return shown, None if entry == "-1" else entry
        if index in shown:
            return [], entry  # CUDA shows none at all when one stands there twice.
        shown.append(index)
    return shown, None


def _gpus(facts: Mapping[str, dict], environ: Mapping[str, str]) -> Check:
    found, driver = facts["tensorflow"], facts["driver"].get("gpus", [])
    seen = found.get("gpus", [])
    value = environ.get("CUDA_VISIBLE_DEVICES")
    expected = len(driver) if value is None else len(visible_gpus(value, driver)[0])
    if seen and len(seen) >= expected:
        names = ", ".join(f"{gpu['name']} (compute capability {gpu['capability']})" for gpu in seen)
        return Check("GPUs", "ok", f"{len(seen)}: {names}")
    if expected:
        text = f"the driver shows {expected}, TensorFlow uses {len(seen)}: {_gpu_names(driver)}"
        if "error" in found:
            return Check("GPUs", "problem", f"{text} (it cannot be imported)", INSTALL_CUDA)
        if not found["build"].get("is_cuda_build"):
            fix = f"pip uninstall -y tensorflow-cpu; {INSTALL_CUDA}"
            return Check("GPUs", "problem", f"{text} (this build is for CPUs)", fix)
        return Check("GPUs", "problem", text, f"{INSTALL_CUDA}  (then look at 'CUDA libraries' here)")
    if driver:
        return Check("GPUs", "ok", "CUDA_VISIBLE_DEVICES shows none: training runs on the CPU")
    if facts["machine"].get("pci_gpus"):
        return Check("GPUs", "problem", "an NVIDIA GPU without a driver", "See 'NVIDIA driver' here.")
    return Check("GPUs", "ok", "no NVIDIA GPU: training runs on the CPU")


def _cuda(facts: Mapping[str, dict]) -> Check:
    found = facts["libraries"]
    if "error" in found:
        return Check("CUDA libraries", "warning", found["error"], INSTALL_CUDA)
    there = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = [name for name, version in found.items() if not version]
    if not facts["driver"].get("gpus"):
        text = "none needed without an NVIDIA GPU" + (f"; found: {there}" if there else "")
        return Check("CUDA libraries", "ok", text)
    if missing and not facts["tensorflow"].get("gpus"):
        text = f"missing: {', '.join(missing)}" + (f"; found: {there}" if there else "")
        return Check("CUDA libraries", "problem", text, INSTALL_CUDA)
    return Check("CUDA libraries", "ok", there or "in TensorFlow's own build")


def _tensorboard(facts: Mapping[str, dict]) -> Check:
    version = facts["packages"].get("tensorboard")
    if not version:
        text = "not installed: logs cannot be written"
        return Check("TensorBoard", "problem", text, "pip install 'tensorboard>=2.19'")
    return Check("TensorBoard", "ok", version)


def _cluster(environ: Mapping[str, str]) -> Check:
    try:
        cluster = Cluster.from_environment(environ)
    except InputError as error:
        fix = "unset TF_CONFIG  (or mend it)" if environ.get("TF_CONFIG", "").strip() else "Mend what it names."
        return Check("Cluster", "problem", str(error), fix)
    if cluster.source == "none":
        return Check("Cluster", "ok", "none: one process")
    counts = ", ".join(f"{len(addresses)} {job}" for job, addresses in cluster.jobs().items())
    return Check("Cluster", "ok", f"{cluster.source}: {cluster.task_type} {cluster.task_index} of {counts}")


def _processor(facts: Mapping[str, dict]) -> Check:
    cores = facts["machine"].get("cores")
    if not cores:
        return Check("CPU", "warning", facts["machine"].get("error", "unknown"), "pip install psutil")
    return Check("CPU", "ok", f"{cores} cores for this process")


def _memory(facts: Mapping[str, dict]) -> Check:
    machine = facts["machine"]
    if "error" in machine:
        return Check("Memory", "warning", machine["error"], "pip install psutil")
    total, free = (machine[key] / 2**30 for key in ("memory_bytes", "free_bytes"))
    text = f"{free:.1f} GiB free of {total:.1f} GiB"
    if free < 1:
        fix = "Close other programs: TensorFlow alone takes about 0.5 GiB."
        return Check("Memory", "warning", text, fix)
    return Check("Memory", "ok", text)


def _repairs(facts: Mapping[str, dict], environ: Mapping[str, str]) -> list[Check]:
    found = facts["repairs"]
    if "error" in found:
        if "no answer" in found["error"]:
            fix = "Run `tfgpu doctor` again when the machine is less busy."
            return [Check("Keras repairs", "warning", found["error"], fix)]
        fix = "Mend TensorFlow and Keras first." if "not asked" in found["error"] else INSTALL
        return [Check("Keras repairs", "problem", found["error"], fix)]
    is_off = environ.get("TFGPU_REPAIR", "1") == "0"
    checks = []
    for name, is_needed in found.items():
        title = f"Keras repair {name}"
        if not is_needed:
            checks.append(Check(title, "ok", "fixed upstream: not needed here"))
        elif is_off:
            text = "needed here, but TFGPU_REPAIR=0 leaves Keras alone"
            checks.append(Check(title, "warning", text, "unset TFGPU_REPAIR"))
        else:
            checks.append(Check(title, "ok", "needed here; tfgpu.strategy() installs it"))
    return checks


def _gpu_names(gpus: list[dict]) -> str:
    return ", ".join(gpu["name"] for gpu in gpus) or "no GPU"
