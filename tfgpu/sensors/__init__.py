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

from tfgpu.sensors.limits import Limit, limit
from tfgpu.sensors.sample import Gpu, Sample
from tfgpu.sensors.sampler import Sampler

__all__ = ["Gpu", "Limit", "Sample", "Sampler", "limit"]
