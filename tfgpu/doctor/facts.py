"""Asks this machine's Python, packages, driver, TensorFlow and Keras what they are.

They answer in a process of their own, so that one that cannot be imported, or that dies on import, is a fact
and not the end of the doctor.
"""

import contextlib
import ctypes.util
import io
import json
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path

# What TensorFlow loads from CUDA: the name for the linker, and the NVIDIA wheel that brings it.
_LIBRARIES = {
    "cudart": "nvidia-cuda-runtime-cu",
    "cublas": "nvidia-cublas-cu",
    "cudnn": "nvidia-cudnn-cu",
    "cufft": "nvidia-cufft-cu",
    "cusolver": "nvidia-cusolver-cu",
    "cusparse": "nvidia-cusparse-cu",
    "nccl": "nvidia-nccl-cu",
}
_MARK = "tfgpu-fact "
_SECONDS = 300


def gather(environ: Mapping[str, str]) -> dict[str, dict]:
    """Asks this machine's Python, packages, driver, TensorFlow and Keras what they are.

    Args:
        environ: the environment of the processes that are asked.

    Returns:
        The answers by question, the names in `QUESTIONS`. One that could not be had is `{"error": why}`.
    """
    # The folder that holds tfgpu comes last, so that it hides no package of the user's.
    parent = str(Path(__file__).resolve().parent.parent)
    path = os.pathsep.join(filter(None, [environ.get("PYTHONPATH"), parent]))
    environ = {**environ, "PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "3"}
    facts, end = _ask([name for name in QUESTIONS if name != "repairs"], environ)
    for name in QUESTIONS:
        facts.setdefault(name, {"error": end})
    if "error" in facts["tensorflow"] or "error" in facts["keras"]:
        facts["repairs"] = {"error": "not asked: TensorFlow or Keras cannot be imported"}
        return facts
    # The probes train tiny models on logical CPU devices of their own: no GPU, no cluster, a fresh process.
    alone = {key: value for key, value in environ.items() if key not in ("TF_CONFIG", "TFGPU_REPAIR")}
    answers, end = _ask(["repairs"], {**alone, "CUDA_VISIBLE_DEVICES": ""})
    return facts | {"repairs": answers.get("repairs", {"error": end})}


def answer(names: Iterable[str]) -> None:
    """Prints the answer to each question as it comes; `gather` runs this in a process of its own.

    Args:
        names: questions in `QUESTIONS`.
    """
    for name in names:
        try:
            found = QUESTIONS[name]()
        except BaseException as error:  # A broken package may raise anything, SystemExit too.
            found = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(_MARK + json.dumps({name: found}), flush=True)


def _ask(names: list[str], environ: Mapping[str, str]) -> tuple[dict[str, dict], str]:
    """Has the questions answered in a process of its own; returns the answers, and how it ended."""
    code = f"from tfgpu.doctor import facts; facts.answer({names!r})"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=dict(environ),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
        )
        out, lines = done.stdout, done.stderr.strip().splitlines() or [""]
        end = f"the process ended with code {done.returncode}: {lines[-1][:300]}"
        if done.returncode < 0:
            end = f"the process died of {signal.Signals(-done.returncode).name}"
    except subprocess.TimeoutExpired as error:
        out = (error.stdout or b"").decode(errors="replace")
        end = f"no answer within {_SECONDS} s"
    facts = {}
    for line in out.splitlines():
        if line.startswith(_MARK):
            facts.update(json.loads(line.removeprefix(_MARK)))
    return facts, end


def _ask_python() -> dict:
    return {"version": platform.python_version(), "executable": sys.executable}


def _ask_packages() -> dict:
    return {name: _version(name) for name in ("tensorflow", "keras", "tf-keras", "tensorboard")}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _ask_machine() -> dict:
    import psutil

    memory = psutil.virtual_memory()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": cores,
        "memory_bytes": memory.total,
        "free_bytes": memory.available,
        "pci_gpus": pci_gpus(Path("/sys/bus/pci/devices")),
    }


def pci_gpus(folder: Path) -> int:
    """Counts NVIDIA's display and 3D controllers among Linux's PCI devices, with or without a driver.

    Args:
        folder: `/sys/bus/pci/devices`; where there is no such folder, 0.
    """
    count = 0
    for device in folder.glob("*"):
        try:
            vendor, kind = (device / "vendor").read_text().strip(), (device / "class").read_text().strip()
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")
    return count


def _ask_driver() -> dict:
    import pynvml

    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return {
            "version": pynvml.nvmlSystemGetDriverVersion(),
            "cuda": [cuda // 1000, cuda % 1000 // 10],
            "gpus": [
                {"name": pynvml.nvmlDeviceGetName(handle), "uuid": pynvml.nvmlDeviceGetUUID(handle)}
                for handle in handles
            ],
        }
    finally:
        pynvml.nvmlShutdown()


def _ask_libraries() -> dict:
    wheels = {}
    for distribution in metadata.distributions():
        name = (distribution.metadata["Name"] or "").lower()
        wheels[re.sub(r"-cu\d+$", "-cu", name)] = distribution.version
    found = {}
    for name, wheel in _LIBRARIES.items():
        # Newer wheels have lost the CUDA version from their names.
        found[name] = wheels.get(wheel) or wheels.get(wheel.removesuffix("-cu")) or ctypes.util.find_library(name)
    return found


def _ask_tensorflow() -> dict:
    import tensorflow as tf

    gpus = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ("?",))))
        gpus.append({"name": details.get("device_name", gpu.name), "capability": capability})
    return {"version": tf.__version__, "build": dict(tf.sysconfig.get_build_info()), "gpus": gpus}


def _ask_keras() -> dict:
    import keras

    return {"version": keras.__version__, "backend": keras.backend.backend()}


def _ask_repairs() -> dict:
    from tfgpu.keras_fixes import probes

    with contextlib.redirect_stdout(io.StringIO()) as out:
        probes.main()
    return json.loads(out.getvalue().splitlines()[-1])


# What `answer` asks, in this order: TensorFlow and Keras, which may take the process with them, come last.
QUESTIONS: dict[str, Callable[[], dict]] = {
    "python": _ask_python,
    "packages": _ask_packages,
    "machine": _ask_machine,
    "libraries": _ask_libraries,
    "driver": _ask_driver,
    "tensorflow": _ask_tensorflow,
    "keras": _ask_keras,
    "repairs": _ask_repairs,
}
