"""Facts of NVIDIA's driver and GPUs, from `tfgpu.sensors`."""

from tfgpu.sensors import nvml


def _driver(*, root: str = "/", **_) -> dict:
    return nvml.driver(root)


QUESTIONS = {"driver": _driver}
