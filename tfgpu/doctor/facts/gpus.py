"""What NVIDIA's driver says of its GPUs, for the doctor; `tfgpu.sensors` asks it."""

from tfgpu.sensors import nvml


def _driver(*, root: str = "/", **_) -> dict:
    return nvml.driver(root)


QUESTIONS = {"driver": _driver}
