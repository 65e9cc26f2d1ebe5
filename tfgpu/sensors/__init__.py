"""What a machine does at this moment: its GPUs by NVML, its processors, memory, disks and network. No TensorFlow.

Example:
    >>> from tfgpu import sensors
    >>> with sensors.Sensors() as machine:
    ...     sample = machine.read()
    >>> 0 <= sample.host.memory_used_bytes <= sample.host.memory_bytes
    True
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
