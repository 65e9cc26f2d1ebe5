"""Samples a machine and its GPUs."""

import time
from collections.abc import Callable
from types import TracebackType

from tfgpu.sensors.gpus import Gpus
from tfgpu.sensors.machine import Machine
from tfgpu.sensors.sample import Sample


class Sampler:
    """Takes samples; a context manager that shuts down NVML at the end.

    Args:
        everything: all GPUs of the machine, not only those in CUDA_VISIBLE_DEVICES.
        clock: a monotonic clock in seconds.

    Example:
        >>> with Sampler() as sampler:
        ...     sample = sampler.read()
        >>> sample.memory_bytes > 2**20, sample.cores > 0
        (True, True)
    """

    def __init__(self, *, everything: bool = False, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._begun = clock()
        self._machine = Machine()
        self.gpus: Gpus = Gpus(everything=everything)

    def read(self) -> Sample:
        """Takes a sample."""
        seconds = self._clock() - self._begun
        gpus = self.gpus.read(seconds)
        machine = self._machine.read(seconds)
        return Sample(time=time.time(), seconds=seconds, **machine, gpus=gpus, gpu_error=self.gpus.error)

    def close(self) -> None:
        """Shuts down NVML."""
        self.gpus.close()

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
