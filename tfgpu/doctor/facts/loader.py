"""Messages of TensorFlow and the loader about missing shared libraries.

By default, TensorFlow only logs "Cannot dlopen some GPU libraries". With `TF_CPP_VMODULE`, it logs each library with
the loader's error; with `LD_DEBUG=libs`, glibc logs every file that it tried.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

ASKED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1,gpu_device=0"}
"""Variables that make TensorFlow log the libraries it could not load."""
_FAILED = re.compile(r"Could not load dynamic library '([^']+)'; dlerror: (.*?)(?:; LD_LIBRARY_PATH: .*)?$")
_TRIED = re.compile(r"\s*\d+:\s+trying file=(\S.*)/([^/\s]+)$")
_LONGEST = 300


def watched(environ: dict[str, str], folder: str | os.PathLike) -> dict[str, str]:
    """The environment of a process whose loader logs its searches into `folder`."""
    return {**environ, **ASKED, "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(Path(folder) / "loader")}


def failures(log: str) -> dict[str, str]:
    """The libraries that TensorFlow could not load, with the loader's errors.

    Example:
        >>> failures("I0000 dso_loader.cc:144] Could not load dynamic library 'libcudnn.so.9'; dlerror: libcudnn.so.9: "
        ...          "cannot open shared object file: No such file or directory; LD_LIBRARY_PATH: /opt")
        {'libcudnn.so.9': 'cannot open shared object file: No such file or directory'}
    """
    found = {}
    for line in log.splitlines():
        if match := _FAILED.search(line):
            # The error may name another library that this one needs.
            found[match[1]] = match[2].removeprefix(f"{match[1]}: ").strip()[:_LONGEST]
    return found


def places(lines: Iterable[str], libraries: Iterable[str]) -> dict[str, list[str]]:
    """The folders in which the loader searched for each library, in order.

    Args:
        lines: the output of glibc's `LD_DEBUG=libs`.
        libraries: file names such as `"libcudnn.so.9"`.

    Example:
        >>> places(["  7:\\t  trying file=/opt/libcudnn.so.9", "  7:\\t  trying file=/lib/libz.so"], ["libcudnn.so.9"])
        {'libcudnn.so.9': ['/opt']}
    """
    found: dict[str, dict[str, None]] = {name: {} for name in libraries}
    for line in lines:
        match = _TRIED.match(line)
        if match and match[2] in found:
            folder = os.path.normpath(match[1])
            # In each folder, glibc also tries subfolders named after processors.
            if not re.search(r"/(glibc-hwcaps/.*|tls(/x86_64)*|x86_64|haswell|avx512_1)$", folder):
                found[match[2]][folder] = None
    return {name: list(folders) for name, folders in found.items()}


def notes(folder: str | os.PathLike) -> list[str]:
    """The log lines that loaders have written into a folder."""
    lines: list[str] = []
    for path in sorted(Path(folder).glob("loader*")):
        lines += path.read_text(errors="replace").splitlines()
    return lines
