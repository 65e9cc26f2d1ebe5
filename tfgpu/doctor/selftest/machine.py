"""What another machine of a self-test does alone: the same parts as here, with facts of it that judge them."""

import os

from tfgpu.doctor import facts, selftest
from tfgpu.doctor.facts import asking


def measured(folder: str) -> dict:
    """Measures this machine.

    Args:
        folder: where the disk is measured; the user's own folder, where there is no such one that can be written to.

    Returns:
        The answers of the parts by name, and `facts`: what `tensorflow` and `driver` of this machine say.
    """
    environ = {**asking.with_tfgpu(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("TF_CONFIG", None)
    place = folder if os.path.isdir(folder) and os.access(folder, os.W_OK) else os.path.expanduser("~")
    found = selftest.parts(place, environ=environ, seconds=selftest.PART_S)
    return {**found, "facts": facts.hardware(environ)}
