"""GPUs, processors, memory, disks and network of this machine, read again and again. No TensorFlow.

`nvml.py` is the one place that asks NVIDIA's driver; the doctor asks it too. `limits.py` says which resource limits a
step.

Example:
    >>> from tfgpu.sensors import Sampler
    >>> with Sampler() as sampler:
    ...     sample = sampler.read()
    >>> sample.row()["memory_bytes"] > 0
    True
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
