"""One sample of a machine: its GPUs and all else, at one moment."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from tfgpu.sensors.gpus import Gpu, Gpus
from tfgpu.sensors.host import Host, HostSensor


@dataclass(frozen=True)
class Sample:
    """A machine at one moment.

    Attributes:
        time_s: by a clock that never leaps (`time.monotonic`).
        host: processors, memory, disks, network.
        gpus: those that CUDA_VISIBLE_DEVICES leaves; none where there is no driver.
    """

    time_s: float
    host: Host
    gpus: tuple[Gpu, ...]


class Sensors:
    """All sensors of this machine, kept open.

    Args:
        pid: the process whose share of the processors and of the memory is told; None: this one.
        environ: as for `Gpus`.

    Attributes:
        why_no_gpus: the driver's words where there are none.

    Example:
        >>> with Sensors() as machine:
        ...     machine.read().host.cores >= 1
        True
    """

    def __init__(self, pid: int | None = None, environ: Mapping[str, str] | None = None):
        self._gpus, self._host = Gpus(environ), HostSensor(pid)
        self.why_no_gpus: str = self._gpus.why

    def __enter__(self) -> "Sensors":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> Sample:
        """One reading of all."""
        return Sample(time.monotonic(), self._host.read(), self._gpus.read())

    def close(self) -> None:
        """Lets the driver go."""
        self._gpus.close()
