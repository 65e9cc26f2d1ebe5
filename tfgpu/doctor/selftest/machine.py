"""Runs the parts of a self-test on another machine, and collects its facts."""

import os

from tfgpu.doctor import facts, selftest
from tfgpu.doctor.facts import asking


def measured(folder: str) -> dict:
    """Measures this machine.

    Args:
        folder: where the disk is measured; the home directory, if it does not exist or is not writable.

    Returns:
        The answers by part, and `facts`: the answers to `tensorflow` and `driver`.
    """
    environ = {**asking.with_tfgpu(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("TF_CONFIG", None)
    place = folder if os.path.isdir(folder) and os.access(folder, os.W_OK) else os.path.expanduser("~")
    found = selftest.parts(place, environ=environ, seconds=selftest.PART_S)
    return {**found, "facts": facts.hardware(environ)}
