"""Checks of CUDA's libraries and of XLA's tools, against TensorFlow's build and the driver."""

import os
import re
from collections.abc import Mapping

from packaging.specifiers import SpecifierSet

from tfgpu.compat.versions import INSTALL_CUDA
from tfgpu.doctor.check import Check

# The first CUDA whose ptxas supports a compute capability: https://docs.nvidia.com/cuda/parallel-thread-execution/
_FIRST_PTXAS = {(8, 9): (11, 8), (9, 0): (11, 8), (10, 0): (12, 7)}
_FIRST_PTXAS |= {(10, 3): (12, 9), (12, 0): (12, 8), (12, 1): (12, 9)}


def cuda(facts: Mapping[str, dict]) -> list[Check]:
    """Each library that TensorFlow loads; uses TensorFlow's own errors if it has tried."""
    found, log = facts["libraries"], facts["tensorflow"].get("loading", {})
    if "error" in found:
        return [Check("CUDA libraries", "warning", found["error"], command=INSTALL_CUDA)]
    opened = {name: each for name, each in found.items() if each.get("path")}
    there = ", ".join(f"{name} {each['version'] or os.path.basename(each['path'])}" for name, each in opened.items())
    if not facts["driver"].get("gpus"):
        text = "none needed without an NVIDIA GPU" + (f"; found: {there}" if there else "")
        return [Check("CUDA libraries", "ok", text)]
    failed = log.get("failed", {})
    if facts["tensorflow"].get("gpus"):
        failed = {}  # TensorFlow has found them elsewhere.
    elif not failed:
        failed = {each["file"]: each["error"] for each in found.values() if not each.get("path")}
    faults = [_unloaded(file, words, facts) for file, words in failed.items()]
    return faults or [Check("CUDA libraries", "ok", there or "part of TensorFlow's build")]


def _unloaded(file: str, words: str, facts: Mapping[str, dict]) -> Check:
    """The check of a library that could not be loaded, with the loader's error."""
    text = f"{file} cannot be loaded: {words or 'not found'}"
    # It may be broken, or in a folder that TensorFlow does not search.
    lies = next((each.get("path") for each in facts["libraries"].values() if each.get("file") == file), None)
    if lies and "/" in lies:
        command = f"export LD_LIBRARY_PATH={os.path.dirname(lies)}${{LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}}"
        return Check("CUDA libraries", "problem", f"{text}; it is in {os.path.dirname(lies)}", command=command)
    force = "" if "No such file" in words or not words else " --force-reinstall"
    return Check("CUDA libraries", "problem", text, command=INSTALL_CUDA + force)


def runtime(facts: Mapping[str, dict]) -> Check | None:
    """Compares the CUDA runtime that is found first with the driver and the build."""
    found = facts["libraries"].get("cudart", {}).get("version")
    driver = facts["driver"].get("cuda")
    if not found or not driver or not facts["driver"].get("gpus"):
        return None
    text = f"{found}; the driver supports CUDA up to {'.'.join(map(str, driver))}"
    if numbers(found)[0] > driver[0]:
        fix = f"Install a driver for CUDA {numbers(found)[0]}, or a TensorFlow built for CUDA {driver[0]}."
        return Check("CUDA runtime", "problem", f"{text}: the driver is too old", fix)
    return _as_asked("CUDA runtime", facts["libraries"]["cudart"], text)


def cudnn(facts: Mapping[str, dict]) -> Check | None:
    """cuDNN must have the version required by TensorFlow's package, or the major version of a build for another one."""
    found = facts["libraries"].get("cudnn", {})
    built = numbers(str(facts["tensorflow"].get("build", {}).get("cudnn_version", "")))
    if not version(found) or not facts["driver"].get("gpus"):
        return None
    text = f"{version(found)} ({found['path']})"
    if built and not (found.get("needs") and fits(str(built[0]), found["needs"]["versions"])):
        needs = {"package": "nvidia-cudnn-cu12", "versions": f">={built[0]},<{built[0] + 1}"}
        found = {**found, "needs": needs | {"words": f"TensorFlow was built for {built[0]}"}}
    # TensorFlow rejects a cuDNN of another major or an older minor version at its first use.
    return _as_asked("cuDNN", found, text, refused=True)


def _as_asked(name: str, found: Mapping, text: str, refused: bool = False) -> Check:
    """Compares a library with the versions required by TensorFlow's package, if any.

    Args:
        refused: whether TensorFlow rejects another major or an older minor version.
    """
    needs, have = found.get("needs"), version(found)
    if not needs or not have:
        return Check(name, "ok", text)
    text += f"; {needs.get('words') or 'TensorFlow requires ' + needs['package'] + needs['versions']}"
    if fits(have, needs["versions"]):
        return Check(name, "ok", text)
    command = f"pip install --upgrade '{needs['package']}{needs['versions']}'"
    if "/nvidia/" not in found["path"]:
        text += "; LD_LIBRARY_PATH or the system's library takes precedence over the wheel's"
        command = f"unset LD_LIBRARY_PATH\n{command}"
    minor = ".".join(map(str, numbers(have)[:2]))
    status = "problem" if refused and not fits(minor, needs["versions"]) else "warning"
    return Check(name, status, text, command.replace("\n", "; "), command)


def version(library: Mapping) -> str:
    """The most exact version of a library: its own, or that of its wheel.

    Example:
        >>> version({"version": "9.3.0", "wheel": "9.3.0.75"}), version({"version": "9.1.0", "wheel": "9.3.0.75"})
        ('9.3.0.75', '9.1.0')
    """
    own, wheel = library.get("version") or "", library.get("wheel") or ""
    return wheel if not own or f"{wheel}.".startswith(f"{own}.") else own


def fits(version: str, versions: str) -> bool:
    """Whether a version satisfies a requirement; a partial version, as far as it is known.

    TensorFlow up to 2.19 requires one version of each wheel, for pip. Later ones of its major version work as well.

    Example:
        >>> fits("9.3.0", ">=9.3.0.75,<10"), fits("9.2.1", ">=9.3.0.75,<10"), fits("10.0.0", ">=9.3.0.75,<10")
        (True, False, False)
        >>> fits("9.3", "==9.3.0.75"), fits("9.7.1", "==9.3.0.75"), fits("9.2.1", "==9.3.0.75")
        (True, True, False)
    """
    asked = SpecifierSet(re.sub(r"==((\d+)[\d.]*)", lambda found: f">={found[1]},<{int(found[2]) + 1}", versions))
    return any(asked.contains(f"{version}{rest}", prereleases=True) for rest in ("", ".99999"))


def nccl(facts: Mapping[str, dict]) -> Check | None:
    """NCCL, which communicates between GPUs."""
    found, gpus = facts["libraries"].get("nccl", {}), facts["driver"].get("gpus") or []
    if not gpus or "error" in facts["libraries"]:
        return None
    if not found.get("path"):
        text = f"libnccl.so.2 cannot be loaded: {found.get('error') or 'not found'}"
        if len(gpus) < 2:
            return Check("NCCL", "ok", f"not needed for one GPU ({text})")
        return Check("NCCL", "problem", f"{text}; {len(gpus)} GPUs need it", command=INSTALL_CUDA)
    return _as_asked("NCCL", found, f"{version(found) or 'unknown version'} ({found['path']})")


def tools(facts: Mapping[str, dict]) -> Check | None:
    """`ptxas` and `libdevice`, without which XLA compiles slowly, or not at all."""
    found, gpus = facts["tools"], facts["driver"].get("gpus") or []
    if not gpus:
        return None
    command = "pip install nvidia-cuda-nvcc-cu12"
    looked = ", ".join(found.get("looked", []))
    if not found.get("ptxas"):
        text = f"not found in {looked}: XLA then uses the driver, which may be too old"
        return Check("ptxas", "warning", text, command=command)
    if not found.get("version"):
        return Check("ptxas", "problem", found["error"], command=f"{command} --force-reinstall")
    text = f"{found['version']} ({found['ptxas']})"
    needed = max((_FIRST_PTXAS.get(tuple(gpu.get("capability") or ()), (0, 0)) for gpu in gpus), default=(0, 0))
    if tuple(numbers(found["version"])) < needed:
        want = ".".join(map(str, needed))
        text += f"; these GPUs need {want} or newer"
        return Check("ptxas", "problem", text, command=f"pip install --upgrade 'nvidia-cuda-nvcc-cu12>={want}'")
    if not found.get("libdevice"):
        text += f"; libdevice.10.bc was not found in {looked}: XLA cannot compile exp, tanh and the like"
        return Check("ptxas", "problem", text, command=command)
    return Check("ptxas", "ok", text)


def numbers(version: str) -> list[int]:
    """The numbers of a version.

    Example:
        >>> numbers("12.5.1"), numbers("9")
        ([12, 5, 1], [9])
    """
    return [int(part) for part in re.findall(r"\d+", version)]
