"""Builds a library of kernels from C++ and CUDA sources for the installed TensorFlow."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError

MARK = "tfgpu-kernel-for-tensorflow:"
"""A marker in each library built here, followed by the version of TensorFlow it was built for."""
_CUDA = ".cu"
_CPP = (".cc", ".cpp", ".cxx")
_LINES = 15


def build_kernel(
    sources: Sequence[str | Path],
    *,
    output: str | Path | None = None,
    cuda: bool | None = None,
    architectures: str = "all-major",
    timeout_s: float = 600.0,
) -> Path:
    """Compiles sources into a library for `custom_op`, with the flags of the installed TensorFlow.

    C++ is compiled with g++ (or `CXX`), CUDA with nvcc from `CUDA_HOME` or `PATH`. If CUDA sources are compiled,
    `WITH_CUDA` is defined in the C++ sources. The library is replaced atomically.

    Args:
        sources: C++ files (.cc, .cpp, .cxx), at least one, and CUDA files (.cu).
        output: the library. Default: `lib` and the first source's name, beside that source.
        cuda: True requires the CUDA files, False skips them, None builds them if nvcc is installed.
        architectures: nvcc's `-arch`: `"all-major"`, `"native"`, `"sm_90"`.
        timeout_s: limit in seconds for each compiler call.

    Returns:
        The library's path.

    Raises:
        InputError: a source is missing, has another suffix, or does not compile.
        MachineError: a compiler is missing, or takes too long.

    Example:
        build_kernel(["bias_gelu.cc", "bias_gelu.cu"])  # libbias_gelu.so

    Source: https://www.tensorflow.org/guide/create_op
    """
    cpp, cu = _sorted(sources)
    nvcc = None if cuda is False or not cu else _nvcc()
    if cuda and not cu:
        raise InputError(f"`cuda` needs a source that ends in {_CUDA}. Received: {', '.join(map(str, cpp))}.")
    if cuda and nvcc is None:
        raise MachineError("nvcc was not found. Set CUDA_HOME to the CUDA toolkit's folder, or omit `cuda`.")
    library = Path(output) if output is not None else cpp[0].with_name(f"lib{cpp[0].stem}.so")
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise MachineError(f"The C++ compiler {compiler!r} was not found. Install g++, or set CXX.")
    if not library.parent.is_dir():
        raise InputError(f"There is no folder {library.parent} for the library. Create it, or give another `output`.")
    flags = [*tf.sysconfig.get_compile_flags(), "-O3", "-fPIC", "-w"]  # TensorFlow's headers cause many warnings
    with tempfile.TemporaryDirectory(prefix="tfgpu-kernel-") as folder:
        mark, objects = Path(folder, "mark.cc"), []
        mark.write_text(f'extern "C" __attribute__((used)) const char tfgpu_mark[] = "{MARK}{tf.version.VERSION};";\n')
        if nvcc is not None:
            flags.append("-DWITH_CUDA")
            for source in cu:
                objects.append(f"{folder}/{source.stem}.o")
                command = [nvcc, "-c", "-O3", "--std=c++17", "-Xcompiler", "-fPIC", f"-arch={architectures}"]
                _call([*command, str(source), "-o", objects[-1]], source, timeout_s)
        with atomic.replacing(library) as aside:
            command = [compiler, *flags, "-shared", *map(str, cpp), str(mark), *objects, "-o", str(aside)]
            _call([*command, *_link(nvcc)], cpp[0], timeout_s)
    return library


def built_for(library: str | Path) -> str | None:
    """Returns the TensorFlow version a library was built for, without loading it; None if another tool built it."""
    found = re.search(re.escape(MARK).encode() + rb"([0-9A-Za-z.+-]+);", Path(library).read_bytes())
    return found.group(1).decode() if found else None


def _sorted(sources: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    paths = [Path(source) for source in ([sources] if isinstance(sources, (str, Path)) else sources)]
    for path in paths:
        if path.suffix not in (*_CPP, _CUDA):
            raise InputError(f"A source must end in {', '.join(_CPP)} or {_CUDA}. Received: {path}.")
        if not path.is_file():
            raise InputError(f"The source {path} does not exist.")
    cpp, cu = [p for p in paths if p.suffix != _CUDA], [p for p in paths if p.suffix == _CUDA]
    if not cpp:
        raise InputError("`sources` must include a C++ file, which registers the operations. Received: none.")
    return cpp, cu


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def _link(nvcc: str | None) -> list[str]:
    """The linker's flags; CUDA's runtime is linked statically, so that the library does not depend on its version."""
    flags = list(tf.sysconfig.get_link_flags())
    if nvcc is None:
        return flags
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-"], input="", capture_output=True, text=True, timeout=60)
    folders = re.findall(r'"?-L([^"\s]+)"?', said.stderr)
    return [
        *flags,
        *(f"-L{folder}" for folder in dict.fromkeys(folders)),
        "-lcudart_static",
        "-ldl",
        "-lrt",
        "-pthread",
    ]


def _call(command: list[str], of: Path, timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"{command[0]} took longer than {timeout_s:g} s for {of}. Raise `timeout_s`.") from error
    if done.returncode:
        said = done.stderr.splitlines()
        first = next((at for at, line in enumerate(said) if re.search(r"\berror\b|undefined", line)), 0)
        raise InputError(f"{of} does not compile ({command[0]}):\n" + "\n".join(said[first : first + _LINES]))
