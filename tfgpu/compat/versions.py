"""Which versions of TensorFlow and Keras tfgpu supports. Reads package metadata alone: imports neither."""

from dataclasses import dataclass
from importlib import metadata

from packaging.version import Version


@dataclass(frozen=True)
class Support:
    """The versions of one library.

    Attributes:
        title: its name in sentences.
        oldest: the oldest minor version that works.
        newest: the newest minor version that was tried.
        recommended: the version to install where another one does not fit.
    """

    title: str
    oldest: str
    newest: str
    recommended: str


SUPPORTED = {
    "tensorflow": Support("TensorFlow", "2.17", "2.22", "2.21.0"),
    "keras": Support("Keras", "3.13", "3.16", "3.15.1"),
}


def installed(library: str) -> Version | None:
    """The version of an installed library, or None.

    Example:
        >>> str(installed("no-such-package"))
        'None'
    """
    import sys

    module = sys.modules.get(library)  # nightly builds have another distribution's name
    found = getattr(module, "__version__", None)
    for name in () if found else (library, f"{library}-nightly", f"{library}-cpu"):
        try:
            found = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    return Version(found) if found else None


def here(library: str) -> str:
    """A library and its installed version, as errors name it."""
    return f"{SUPPORTED[library].title} {installed(library) or '(not installed)'}"


def tried() -> str:
    """The supported versions, as errors name them.

    Example:
        >>> tried()
        'TensorFlow 2.17 to 2.22 and Keras 3.13 to 3.16'
    """
    return " and ".join(f"{each.title} {each.oldest} to {each.newest}" for each in SUPPORTED.values())


def pin(library: str) -> str:
    """What pip must install instead: one exact version, since a range may be satisfied already.

    Example:
        >>> pin("keras")
        '"keras==3.15.1"'
    """
    return f'"{library}=={SUPPORTED[library].recommended}"'
