"""The GPUs as NVIDIA's driver sees them at this moment, through NVML (nvidia-ml-py)."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

# Bits of nvmlClocksEventReasons; the others are no loss (idle, set by the user, sync boost).
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Process:
    """A process that holds memory of a GPU.

    Attributes:
        pid: its number; of a container that does not share the host's numbers, the host's.
        bytes: what it holds; 0 where the driver does not say.
    """

    pid: int
    bytes: int


@dataclass(frozen=True)
class Gpu:
    """A GPU at one moment; None is what this GPU or its driver does not tell.

    Attributes:
        index, uuid, name: which it is.
        utilization: the part of the last moments (up to a second) in which a kernel ran, 0 to 1.
        memory_utilization: the part in which its memory was read or written, 0 to 1.
        memory_used_bytes, memory_bytes: used by all processes, and there is.
        power_w, power_limit_w: drawn, and allowed.
        energy_j: drawn since the driver was loaded.
        temperature_c: of the chip.
        clock_mhz, clock_max_mhz: of its multiprocessors, now and at most.
        pcie_read_bytes_s, pcie_write_bytes_s: over the bus, to and from the GPU, in the last 20 ms.
        nvlink_bytes: sent and received over all NVLinks since the driver was loaded.
        slowed_by: why its clocks are held back.
        processes: who holds its memory.
    """

    index: int
    uuid: str
    name: str
    utilization: float | None = None
    memory_utilization: float | None = None
    memory_used_bytes: int | None = None
    memory_bytes: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    energy_j: float | None = None
    temperature_c: int | None = None
    clock_mhz: int | None = None
    clock_max_mhz: int | None = None
    pcie_read_bytes_s: int | None = None
    pcie_write_bytes_s: int | None = None
    nvlink_bytes: int | None = None
    slowed_by: tuple[str, ...] = ()
    processes: tuple[Process, ...] = field(default=(), repr=False)


class Gpus:
    """The driver's view, kept open; without a driver there are no GPUs, and no error.

    Args:
        environ: CUDA_VISIBLE_DEVICES in it says which GPUs count; None takes this process's. Numbers are the driver's
            (as with CUDA_DEVICE_ORDER=PCI_BUS_ID); a wrong entry ends the list, as for CUDA.

    Attributes:
        why: why there are none, in the driver's words; empty where there are some.

    Example:
        >>> with Gpus() as gpus:
        ...     found = gpus.read()
        >>> all(gpu.memory_bytes is None or gpu.memory_bytes > 0 for gpu in found)
        True
    """

    def __init__(self, environ: Mapping[str, str] | None = None):
        self.why: str = ""
        self._nvml: Any = None
        self._handles: dict[int, Any] = {}
        visible = (os.environ if environ is None else environ).get("CUDA_VISIBLE_DEVICES")
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as error:  # NVMLError, or a library that cannot be loaded
            self.why = str(error)
            return
        self._nvml = pynvml
        every = {}
        for index in range(self._asked(pynvml.nvmlDeviceGetCount) or 0):
            handle = self._asked(pynvml.nvmlDeviceGetHandleByIndex, index)
            if handle is not None:  # One that is lost hides none of the others.
                every[index] = handle
        uuids = {index: self._asked(pynvml.nvmlDeviceGetUUID, handle) or "" for index, handle in every.items()}
        self._handles = {index: every[index] for index in visible_of(visible, uuids)}
        if not self._handles:
            self.why = "the driver has no GPU" if not every else f"CUDA_VISIBLE_DEVICES={visible!r} names none"

    def __enter__(self) -> "Gpus":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def read(self) -> tuple[Gpu, ...]:
        """Asks the driver; a GPU that has gone meanwhile is left out."""
        found = (self._gpu(index, handle) for index, handle in self._handles.items())
        return tuple(gpu for gpu in found if gpu is not None)

    def close(self) -> None:
        """Lets the driver go."""
        if self._nvml is not None:
            self._asked(self._nvml.nvmlShutdown)
            self._nvml, self._handles = None, {}

    def _gpu(self, index: int, handle: Any) -> Gpu | None:
        nvml, asked = self._nvml, self._asked
        name = asked(nvml.nvmlDeviceGetName, handle)
        if name is None:
            return None
        busy, memory = asked(nvml.nvmlDeviceGetUtilizationRates, handle), asked(nvml.nvmlDeviceGetMemoryInfo, handle)
        traffic = [
            asked(nvml.nvmlDeviceGetPcieThroughput, handle, way)
            for way in (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
        ]
        running = asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        bits = asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return Gpu(
            index=index,
            uuid=asked(nvml.nvmlDeviceGetUUID, handle) or "",
            name=name,
            utilization=busy and busy.gpu / 100,
            memory_utilization=busy and busy.memory / 100,
            memory_used_bytes=memory and memory.used,
            memory_bytes=memory and memory.total,
            power_w=_thousandth(asked(nvml.nvmlDeviceGetPowerUsage, handle)),
            power_limit_w=_thousandth(asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            energy_j=_thousandth(asked(nvml.nvmlDeviceGetTotalEnergyConsumption, handle)),
            temperature_c=asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            clock_mhz=asked(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            clock_max_mhz=asked(nvml.nvmlDeviceGetMaxClockInfo, handle, nvml.NVML_CLOCK_SM),
            pcie_read_bytes_s=None if traffic[0] is None else 1000 * traffic[0],  # NVML tells KB/s
            pcie_write_bytes_s=None if traffic[1] is None else 1000 * traffic[1],
            nvlink_bytes=self._nvlinks(handle),
            slowed_by=tuple(slowed_by(bits)),
            processes=tuple(Process(each.pid, each.usedGpuMemory or 0) for each in running),
        )

    def _nvlinks(self, handle: Any) -> int | None:
        nvml = self._nvml
        ways = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        every = 0xFFFFFFFF  # the scope that stands for all links together
        values = self._asked(nvml.nvmlDeviceGetFieldValues, handle, [(way, every) for way in ways])
        if values is None or any(value.nvmlReturn for value in values):
            return None
        return sum(1024 * int(value.value.ullVal) for value in values)  # NVML tells KiB

    def _asked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """NVML's answer, or None where this GPU or this driver has none."""
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            return function(*arguments)
        return None


def slowed_by(bits: int) -> list[str]:
    """The reasons for which a GPU's clocks are held back.

    Example:
        >>> slowed_by(0x41), slowed_by(0x1)
        (['heat (hardware)'], [])
    """
    return [words for bit, words in REASONS.items() if bits & bit]


def visible_of(visible: str | None, uuids: Mapping[int, str]) -> list[int]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, by the driver's numbers.

    Args:
        visible: its value; None where it is not set.
        uuids: of all GPUs, by number. An entry may be a beginning of one.

    Example:
        >>> visible_of("1,GPU-aa,7,0", {0: "GPU-aaaa", 1: "GPU-bbbb"})
        [1, 0]
        >>> visible_of(None, {0: "GPU-aaaa"}), visible_of("", {0: "GPU-aaaa"})
        ([0], [])
    """
    if visible is None:
        return list(uuids)
    found: list[int] = []
    for entry in map(str.strip, visible.split(",")):
        if entry.isdecimal():
            match = [int(entry)] if int(entry) in uuids else []
        else:
            match = [index for index, uuid in uuids.items() if entry.startswith("GPU-") and uuid.startswith(entry)]
        if len(match) != 1:
            break
        found += [match[0]] if match[0] not in found else []
    return found


def _thousandth(number: int | None) -> float | None:
    return None if number is None else number / 1000
