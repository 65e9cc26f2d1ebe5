"""Samples GPUs, CPU, memory, disks and network of this machine, without TensorFlow.

`nvml.py` is the only module that queries NVIDIA's driver; the doctor uses it too. `limits.py` decides which resource
limits a step.

Example:
    >>> from tfgpu.sensors import Sampler
    >>> with Sampler() as sampler:
    ...     sample = sampler.read()
    >>> sample.row()["memory_bytes"] > 0
    True
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
