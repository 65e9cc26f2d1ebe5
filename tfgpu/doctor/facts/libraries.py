"""Facts of CUDA's libraries and tools, loaded as TensorFlow does, and the versions that its package requires."""

import ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

from tfgpu.doctor.facts.software import TENSORFLOWS

# The libraries that TensorFlow loads, by CUDA's major version. TensorFlow 2.17 was built for cuDNN 8.
_SONAMES = {12: dict(cudart=12, cublas=12, cublasLt=12, cufft=11, cusolver=11, cusparse=12, cudnn=9, nccl=2)}
_SONAMES[13] = _SONAMES[12] | dict(cudart=13, cublas=13, cublasLt=13, cufft=12, cusolver=12)
# The function that returns a library's version, and whether it does so by a pointer.
_VERSIONS = {"cudart": ("cudaRuntimeGetVersion", True), "cudnn": ("cudnnGetVersion", False)}
_VERSIONS["nccl"] = ("ncclGetVersion", True)
# The wheels of the libraries; CUDA's major version may follow.
_WHEELS = {name: rf"nvidia-{name}(-cu\d+)?" for name in ("cudnn", "nccl")}
_WHEELS["cudart"] = r"nvidia-cuda-runtime(-cu\d+)?"
_EXTRA = "and-cuda"
_TOOL_S = 10


def sonames(cuda_version: str | None, cudnn_version: str | None = None) -> dict[str, str]:
    """The library files that TensorFlow loads, for the CUDA and cuDNN versions of its build.

    Example:
        >>> sonames("12.5.1")["cudnn"], sonames("12.3", "8")["cudnn"], sonames(None)["cufft"]
        ('libcudnn.so.9', 'libcudnn.so.8', 'libcufft.so.11')
    """
    major = int((cuda_version or "12").partition(".")[0])
    numbers = dict(_SONAMES[13 if major >= 13 else 12])
    if cudnn_version:
        numbers["cudnn"] = int(cudnn_version.partition(".")[0])
    return {name: f"lib{name}.so.{number}" for name, number in numbers.items()}


def spelled(name: str, number: int) -> str:
    """Formats a library's version number.

    Example:
        >>> spelled("cudart", 12050), spelled("cudnn", 90300), spelled("cudnn", 8907), spelled("nccl", 22304)
        ('12.5', '9.3.0', '8.9.7', '2.23.4')
    """
    if name == "cudart":
        return f"{number // 1000}.{number % 1000 // 10}"
    # Since cuDNN 9 and NCCL 2.9, the minor version has two digits.
    large = 10000 if number >= 10000 else 1000
    return f"{number // large}.{number % large // 100}.{number % 100}"


def wheel_folders(tensorflow: str | None) -> list[str]:
    """The folders of NVIDIA's wheels beside TensorFlow, which its libraries search."""
    beside = Path(tensorflow).parent / "nvidia" if tensorflow else None
    return [str(path) for path in sorted(beside.glob("*/lib"))] if beside else []


def _libraries(*, cuda_version: str | None, cudnn_version: str | None, tensorflow: str | None, **_) -> dict:
    folders, needs = wheel_folders(tensorflow), requirements(tensorflow)
    found = {name: _opened(name, file, folders) for name, file in sonames(cuda_version, cudnn_version).items()}
    for name, wheel in _WHEELS.items():
        found[name]["needs"] = next((each for each in needs if re.fullmatch(wheel, each["package"])), None)
        found[name]["wheel"] = _wheel(wheel, found[name].get("path"))
    return found


def requirements(tensorflow: str | None) -> list[dict]:
    """The wheels that TensorFlow's package requires: `package` and `versions`, such as `">=9.3.0.75,<10.0"`.

    Args:
        tensorflow: the folder of TensorFlow; the metadata of its package is beside it.
    """
    from packaging.requirements import InvalidRequirement, Requirement

    found = []
    site = [str(Path(tensorflow).parent)] if tensorflow else []
    packages = [each for each in metadata.distributions(path=site) if _name(each) in TENSORFLOWS]
    for text in [text for package in packages for text in package.requires or []]:
        try:
            each = Requirement(text)
        except InvalidRequirement:
            continue
        if each.marker and each.marker.evaluate({"extra": _EXTRA}) and not each.marker.evaluate({"extra": ""}):
            versions = sorted(map(str, each.specifier), key=lambda one: not one.startswith(">"))
            found.append({"package": each.name, "versions": ",".join(versions)})
    return found


def _name(distribution: metadata.Distribution) -> str:
    return canonicalize_name(distribution.metadata["Name"] or "")


def _wheel(wheel: str, path: str | None) -> str | None:
    """The version of a library's wheel; `None` if it is not from a wheel."""
    at = Path(path).parents if path else ()
    site = next((str(folder.parent) for folder in at if folder.name == "nvidia"), None)
    for each in metadata.distributions(path=[site] if site else []):
        if re.fullmatch(wheel, _name(each)):
            return each.version
    return None


def _opened(name: str, file: str, folders: list[str]) -> dict:
    """Loads a library by the loader's search path, or from the wheels' folders; reads its version."""
    found = {"file": file, "version": None, "error": ""}
    for path in [file, *(os.path.join(each, file) for each in folders)]:
        if path != file and not os.path.exists(path):
            continue
        try:
            library = ctypes.CDLL(path)
        except OSError as error:
            found["error"] = str(error).removeprefix(f"{file}: ")[:300]
            continue
        lies = _path(file) or path
        return {"file": file, "path": lies, "version": _version(name, library) or _named(lies, file), "error": ""}
    return found


def _version(name: str, library: ctypes.CDLL) -> str | None:
    function, by_pointer = _VERSIONS.get(name, ("", False))
    if not function or not hasattr(library, function):
        return None
    call = getattr(library, function)
    number = ctypes.c_int()
    if by_pointer:
        return spelled(name, number.value) if call(ctypes.byref(number)) == 0 else None
    call.restype = ctypes.c_size_t
    return spelled(name, call())


def _named(path: str, file: str) -> str | None:
    """The version in the full name of a library, such as `libcudnn.so.9.3.0`."""
    name = os.path.basename(os.path.realpath(path))
    number = name.removeprefix(file.partition(".so.")[0] + ".so.")
    return number if re.fullmatch(r"\d+(\.\d+)+", number) else None


def _path(file: str) -> str | None:
    """The path of a loaded library."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = line.partition("/")[2]
        if path and os.path.basename(path).startswith(file):
            return f"/{path}"
    return None


def _tools(*, tensorflow: str | None, root: str = "/", **_) -> dict:
    """XLA's tools: `ptxas`, its assembler, and `libdevice`, CUDA's math library."""
    found: dict = {"ptxas": None, "version": None, "libdevice": None, "looked": []}
    folders = _tool_folders(tensorflow, os.environ, root)
    for folder in folders:
        device = Path(folder) / "nvvm/libdevice/libdevice.10.bc"
        if not found["libdevice"] and device.is_file():
            found["libdevice"] = str(device)
    candidates = [*(str(Path(each) / "bin/ptxas") for each in folders), shutil.which("ptxas") or ""]
    found["looked"] = [os.path.dirname(each) for each in candidates if each] + ["PATH"]
    for path in candidates:
        if path and os.path.exists(path):
            return {**found, "ptxas": path, **_ptxas_version(path)}
    return found


def _tool_folders(tensorflow: str | None, environ: Mapping[str, str], root: str) -> list[str]:
    """The folders that XLA searches: its flag, the wheel, CUDA's variables and the default folders."""
    flag = re.search(r"--xla_gpu_cuda_data_dir=(\S+)", environ.get("XLA_FLAGS", ""))
    found = [flag[1]] if flag else []
    found += [str(Path(tensorflow).parent / "nvidia/cuda_nvcc")] if tensorflow else []
    found += [environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    return [*found, os.path.join(root, "usr/local/cuda"), os.path.join(root, "opt/cuda")]


def _ptxas_version(path: str) -> dict:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=_TOOL_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"error": f"{path} does not run: {getattr(error, 'strerror', None) or error}"}
    match = re.search(r"release (\d+\.\d+)", done.stdout)
    return {"version": match[1]} if match else {"error": f"{path} ended with code {done.returncode}, without a version"}


QUESTIONS = {"libraries": _libraries, "tools": _tools}
