"""Which code belongs to Python, to an installed package or to tfgpu: its version stands for it in a digest."""

import functools
import os
import sys
import sysconfig
from pathlib import Path

_PURE = frozenset(
    "abc builtins collections contextlib copy dataclasses enum functools itertools logging math numbers operator "
    "re statistics string textwrap types typing typing_extensions warnings __future__".split()
)
"""Modules of Python whose functions give the same for the same arguments."""
_FOLDERS = "stdlib", "platstdlib", "purelib", "platlib"
_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in _FOLDERS)


class Unknown(Exception):
    """What a thing would do is not known from its code and values."""


@functools.cache
def has_file(file: str) -> bool:
    """Whether a file belongs to Python, to an installed package or to tfgpu."""
    path = str(Path(file).resolve())
    return path.startswith((*_LIBRARIES, str(Path(__file__).resolve().parents[2])))


@functools.cache
def has_module(module: str) -> bool:
    """Whether a module belongs to Python, to an installed package or to tfgpu."""
    if module == "__main__":
        return False
    if is_of_python(module):
        return True
    file = getattr(sys.modules.get(module.split(".")[0]), "__file__", None)
    return file is not None and has_file(file)


def is_of_python(module: str) -> bool:
    """Whether a module comes with Python."""
    return module.split(".")[0] in sys.stdlib_module_names and module != "__main__"


@functools.cache
def version_of(module: str) -> str:
    """Of the package that a module is in, and when it was installed: one's own may be installed again and again.

    Raises:
        Unknown: the package does not say its version, or the functions of Python's module depend on more than their
            arguments.
    """
    root = module.split(".")[0]
    if is_of_python(module):
        if root not in _PURE:
            raise Unknown(f"it uses Python's module {root!r}")
        return ""
    if root == "tfgpu":  # its code counts, see `store`
        return ""
    package = sys.modules.get(root)
    found = getattr(package, "__version__", None)
    if not isinstance(found, str):
        raise Unknown(f"the package {root!r} does not say its version")
    return f"{found} {os.stat(package.__file__).st_mtime_ns}"
