"""What the loader and TensorFlow say when they look for a shared library.

TensorFlow itself says only "Cannot dlopen some GPU libraries". Asked for it (`TF_CPP_VMODULE`), it names each library
with the loader's words, and glibc (`LD_DEBUG=libs`) writes down every file that it tried.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path

ASKED = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1,gpu_device=0"}
"""What makes TensorFlow say which library it could not load."""
_FAILED = re.compile(r"Could not load dynamic library '([^']+)'; dlerror: (.*?)(?:; LD_LIBRARY_PATH: .*)?$")
_TRIED = re.compile(r"\s*\d+:\s+trying file=(\S.*)/([^/\s]+)$")
_LONGEST = 300


def watched(environ: dict[str, str], folder: str | os.PathLike) -> dict[str, str]:
    """The environment of a process whose loader writes into `folder` where it looks."""
    return {**environ, **ASKED, "LD_DEBUG": "libs", "LD_DEBUG_OUTPUT": str(Path(folder) / "loader")}


def failures(log: str) -> dict[str, str]:
    """Which libraries TensorFlow could not load, and the loader's words.

    Example:
        >>> failures("I0000 dso_loader.cc:144] Could not load dynamic library 'libcudnn.so.9'; dlerror: libcudnn.so.9: "
        ...          "cannot open shared object file: No such file or directory; LD_LIBRARY_PATH: /opt")
        {'libcudnn.so.9': 'cannot open shared object file: No such file or directory'}
    """
    found = {}
    for line in log.splitlines():
        if match := _FAILED.search(line):
            # What follows the name may name another library that this one needs.
            found[match[1]] = match[2].removeprefix(f"{match[1]}: ").strip()[:_LONGEST]
    return found


def places(lines: Iterable[str], libraries: Iterable[str]) -> dict[str, list[str]]:
    """In which folders the loader looked for each library, in its order.

    Args:
        lines: of glibc's `LD_DEBUG=libs`.
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
            # For each folder, glibc also tries ones below it that are named after processors.
            if not re.search(r"/(glibc-hwcaps/.*|tls(/x86_64)*|x86_64|haswell|avx512_1)$", folder):
                found[match[2]][folder] = None
    return {name: list(folders) for name, folders in found.items()}


def notes(folder: str | os.PathLike) -> list[str]:
    """The lines that loaders have written into a folder."""
    lines: list[str] = []
    for path in sorted(Path(folder).glob("loader*")):
        lines += path.read_text(errors="replace").splitlines()
    return lines
