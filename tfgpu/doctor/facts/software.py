"""Facts of Python, packages, TensorFlow and Keras."""

import importlib.util
import platform
import sys
from importlib import metadata
from pathlib import Path

from packaging.utils import canonicalize_name

PACKAGES = ("tensorflow", "keras", "tf-keras", "tensorboard", "triton")
TENSORFLOWS = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-intel", "tf-nightly", "tf-nightly-cpu")
"""Packages that install into the same folder and overwrite each other's files."""


def _python(**_) -> dict:
    return {"version": platform.python_version(), "executable": sys.executable}


def _packages(**_) -> dict:
    found: dict = {name: _version(name) for name in PACKAGES}
    found["tensorflows"] = [f"{name} {_version(name)}" for name in TENSORFLOWS if _version(name)]
    found["shares_symbols"] = shares_symbols()
    return found


def shares_symbols() -> bool:
    """Whether TensorFlow, once imported, replaces LLVM in libraries that are loaded later; does not import it.

    Its wheels of 2.20 and 2.21 have a file for that: https://github.com/tensorflow/tensorflow/issues/124205
    """
    found = importlib.util.find_spec("tensorflow")
    folders = (found and found.submodule_search_locations) or []
    return any((Path(each) / "python" / "pywrap_dlopen_global_flags.py").is_file() for each in folders)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed() -> dict[str, str]:
    """The versions of all packages, by normalized name."""
    return {canonicalize_name(each.metadata["Name"] or ""): each.version for each in metadata.distributions()}


def _tensorflow(**_) -> dict:
    import tensorflow as tf

    gpus = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", ("?",))))
        gpus.append({"name": details.get("device_name", gpu.name), "capability": capability})
    build = tf.sysconfig.get_build_info().items()
    build = {name: list(value) if isinstance(value, (list, tuple)) else value for name, value in build}
    return {"version": tf.__version__, "build": build, "gpus": gpus, "folder": tf.sysconfig.get_lib()}


def _keras(**_) -> dict:
    import keras

    return {"version": keras.__version__, "backend": keras.backend.backend()}


def _repairs(**_) -> dict:
    from tfgpu.repairs import all_repairs, probing

    return probing.ask(all_repairs())


def _patches(**_) -> dict:
    from tfgpu import repairs
    from tfgpu.compat import patch

    repairs.repair_keras()
    in_force = patch.installed()
    on_use = {*patch.declared()} - {(found.target, found.by) for found in in_force}
    described = [[found.target, found.by, found.source] for found in in_force]
    return {"in force": described, "on use": sorted(map(list, on_use))}


QUESTIONS = {"python": _python, "packages": _packages, "tensorflow": _tensorflow, "keras": _keras}
QUESTIONS |= {"repairs": _repairs, "patches": _patches}
