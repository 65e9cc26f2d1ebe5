"""Builds a library of kernels from C++ and CUDA sources, for the TensorFlow that is installed."""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf

from tfgpu.errors import InputError, MachineError

MARK = "tfgpu-kernel-for-tensorflow:"
"""Stands in each library that is built here, before the version of TensorFlow it was built for."""
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
    """Compiles sources into a library for `custom_op`, with the flags of the TensorFlow that is installed.

    C++ goes through g++ (or `CXX`), CUDA through nvcc, from `CUDA_HOME` or the path. Where CUDA sources are compiled,
    C++ ones see `WITH_CUDA`. The library appears whole, under its name, or not at all.

    Args:
        sources: C++ files (.cc, .cpp, .cxx), of which there must be one, and CUDA files (.cu).
        output: the library; left out: `lib` and the first source's name, beside it.
        cuda: True insists on the CUDA files, False leaves them out, None builds them where there is an nvcc.
        architectures: nvcc's `-arch`: `"all-major"`, `"native"`, `"sm_90"`.
        timeout_s: seconds for each call of a compiler.

    Returns:
        The library's path.

    Raises:
        InputError: sources that are missing or of another kind, or that do not compile.
        MachineError: no compiler, or it takes too long.

    Example:
        build_kernel(["bias_gelu.cc", "bias_gelu.cu"])  # libbias_gelu.so

    Source: https://www.tensorflow.org/guide/create_op
    """
    cpp, cu = _sorted(sources)
    nvcc = None if cuda is False or not cu else _nvcc()
    if cuda and not cu:
        raise InputError(f"cuda=True needs a source that ends in {_CUDA}. Received: {', '.join(map(str, cpp))}.")
    if cuda and nvcc is None:
        raise MachineError("There is no nvcc. Set CUDA_HOME to the CUDA toolkit's folder, or leave `cuda` out.")
    library = Path(output) if output is not None else cpp[0].with_name(f"lib{cpp[0].stem}.so")
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise MachineError(f"There is no C++ compiler {compiler!r}. Install g++, or set CXX.")
    flags = [*tf.sysconfig.get_compile_flags(), "-O3", "-fPIC", "-w"]  # warnings would all be of TensorFlow's headers
    with tempfile.TemporaryDirectory(prefix="tfgpu-kernel-", dir=_folder(library)) as folder:
        objects = []
        if nvcc is not None:
            flags.append("-DWITH_CUDA")
            for source in cu:
                objects.append(f"{folder}/{source.stem}.cu.o")
                command = [nvcc, "-c", "-O3", "--std=c++17", "-Xcompiler", "-fPIC", f"-arch={architectures}"]
                _call([*command, str(source), "-o", objects[-1]], source, timeout_s)
        mark = Path(folder, "mark.cc")
        mark.write_text(f'extern "C" __attribute__((used)) const char tfgpu_mark[] = "{MARK}{tf.version.VERSION};";\n')
        for source in (*cpp, mark):
            objects.append(f"{folder}/{source.stem}.o")
            _call([compiler, *flags, "-c", str(source), "-o", objects[-1]], source, timeout_s)
        made = f"{folder}/{library.name}"
        _call([compiler, "-shared", *objects, "-o", made, *_link(nvcc)], library, timeout_s)
        os.replace(made, library)
    return library


def built_for(library: str | Path) -> str | None:
    """Reads, without loading it, for which TensorFlow a library was built; None where another tool made it."""
    found = re.search(re.escape(MARK).encode() + rb"([0-9A-Za-z.+-]+);", Path(library).read_bytes())
    return found.group(1).decode() if found else None


def _sorted(sources: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    paths = [Path(source) for source in ([sources] if isinstance(sources, (str, Path)) else sources)]
    for path in paths:
        if path.suffix not in (*_CPP, _CUDA):
            raise InputError(f"A source must end in {', '.join(_CPP)} or {_CUDA}. Received: {path}.")
        if not path.is_file():
            raise InputError(f"There is no file {path}.")
    cpp, cu = [p for p in paths if p.suffix != _CUDA], [p for p in paths if p.suffix == _CUDA]
    if not cpp:
        raise InputError("Among `sources` there must be a C++ file, which registers the operations. Received: none.")
    names = [p.stem for p in cpp]
    if len(set(names)) < len(names):
        raise InputError(f"C++ sources must have different names. Received: {', '.join(map(str, cpp))}.")
    return cpp, cu


def _folder(library: Path) -> Path:
    if not library.parent.is_dir():
        raise InputError(f"There is no folder {library.parent} for the library.")
    return library.parent


def _nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME")
    return shutil.which("nvcc", path=f"{home}/bin") if home else shutil.which("nvcc")


def _link(nvcc: str | None) -> list[str]:
    """The linker's flags; CUDA's runtime goes into the library, so that it needs none of that version at run time."""
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
