"""The supported versions of TensorFlow and Keras, and what tfgpu says about others. Imports neither."""

import sys
import warnings
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Literal

from packaging.version import Version

from tfgpu.errors import MachineError


@dataclass(frozen=True)
class Support:
    """The versions of one library.

    Attributes:
        title: its name in sentences.
        package: its name for pip and import.
        oldest: the oldest minor version that works.
        newest: the newest tested minor version.
        recommended: the version to install if another one does not fit.
        others: its builds under other names.
    """

    title: str
    package: str
    oldest: str
    newest: str
    recommended: str
    others: tuple[str, ...]

    @property
    def requirement(self) -> str:
        """The requirement for pip, as in `setup.cfg`.

        Example:
            >>> KERAS.requirement
            'keras>=3.13,<3.17'
        """
        newest = Version(self.newest)
        return f"{self.package}>={self.oldest},<{newest.major}.{newest.minor + 1}"

    def compare(self, version: str) -> Literal["older", "supported", "newer"]:
        """Whether a version is supported. A release candidate or nightly build counts as its release.

        Example:
            >>> KERAS.compare("3.12.4"), KERAS.compare("3.16.0.dev2026102704"), KERAS.compare("4.0.0")
            ('older', 'supported', 'newer')
        """
        minor = Version(version).release[:2]
        if minor < Version(self.oldest).release:
            return "older"
        return "newer" if minor > Version(self.newest).release else "supported"

    def describe(self, version: str) -> str:
        """One sentence about a version that is not supported."""
        if self.compare(version) == "older":
            return f"{self.title} {version} is too old: tfgpu supports {self.oldest} to {self.newest}."
        return f"{self.title} {version} is newer than tfgpu was tested with ({self.oldest} to {self.newest})."


TENSORFLOW = Support("TensorFlow", "tensorflow", "2.17", "2.22", "2.21.0", ("tensorflow-cpu", "tf-nightly"))
KERAS = Support("Keras", "keras", "3.13", "3.16", "3.15.1", ("keras-nightly",))
SUPPORTED = {each.package: each for each in (TENSORFLOW, KERAS)}
INSTALL = f"pip install '{TENSORFLOW.requirement}' '{KERAS.requirement}'"
INSTALL_CUDA = f"pip install '{TENSORFLOW.requirement.replace('tensorflow', 'tensorflow[and-cuda]')}'"


def installed(library: str) -> Version | None:
    """The version of an installed library, or None.

    Example:
        >>> str(installed("no-such-package"))
        'None'
    """
    found = getattr(sys.modules.get(library), "__version__", None)
    others = SUPPORTED[library].others if library in SUPPORTED else ()
    for name in () if found else (library, *others):
        try:
            found = metadata.version(name)
            break
        except metadata.PackageNotFoundError:
            continue
    return Version(found) if found else None


@cache
def check() -> None:
    """Raises if TensorFlow or Keras is too old, and warns once if one is newer than tested.

    Raises:
        MachineError: TensorFlow or Keras is too old.
    """
    for support in SUPPORTED.values():
        version = str(installed(support.package) or support.recommended)  # a missing library fails on import
        how = support.compare(version)
        if how == "older":
            raise MachineError(f"{support.describe(version)} Run `{INSTALL}`.")
        if how == "newer":
            text = f"{support.describe(version)} If training fails or results differ, run `{INSTALL}`."
            warnings.warn(text, UserWarning, stacklevel=2)


def is_at_most(library: str, minor: str) -> bool:
    """Whether the installed version is of this minor version, or older.

    Example:
        >>> is_at_most("keras", "2.15")
        False
    """
    found = installed(library)
    return found is not None and found.release[:2] <= Version(minor).release


def is_at_least(library: str, minor: str) -> bool:
    """Whether the installed version is of this minor version, or newer. A nightly build counts as its release.

    Example:
        >>> is_at_least("keras", "2.15")
        True
    """
    found = installed(library)
    return found is not None and found.release[:2] >= Version(minor).release


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
    """The requirement that pip must install instead: one exact version, since a range may already be satisfied.

    Example:
        >>> pin("keras")
        '"keras==3.15.1"'
    """
    return f'"{library}=={SUPPORTED[library].recommended}"'
