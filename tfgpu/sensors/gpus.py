"""Samples the GPUs that this process may use, through NVML."""

import contextlib
import os
from dataclasses import dataclass
from typing import Any

from tfgpu.sensors import nvml as driver
from tfgpu.sensors.sample import Gpu

_ALL_LINKS = 0xFFFFFFFF
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""The bandwidth of a PCIe lane in one direction, by generation, net of encoding."""


@dataclass
class _Watched:
    """A GPU and the state for its counters.

    Attributes:
        handle: NVML's handle.
        label: as in `Gpu`.
        name: as in `Gpu`.
        uuid: as in `Gpu`.
        whole: False for a MIG slice.
        link_bytes_per_s: bandwidth of its PCIe link in one direction.
        nvlink_bytes_per_s: bandwidth of its active NVLinks in one direction.
        first_mj: NVML's energy counter at the first sample.
        energy_j: energy integrated from power, if NVML has no counter.
        before: seconds, watts and NVLink counters of the previous sample.
    """

    handle: Any
    label: str
    name: str
    uuid: str
    whole: bool = True
    link_bytes_per_s: float | None = None
    nvlink_bytes_per_s: float | None = None
    first_mj: int | None = None
    energy_j: float = 0.0
    before: tuple[float, float | None, tuple[int | None, int | None]] | None = None


class Gpus:
    """Reads GPUs; NVML stays open until `close`. Without a driver there are no GPUs, and `error` has the reason.

    A lost GPU is skipped from then on; if the number of GPUs changes, all are looked up again.

    Args:
        everything: all GPUs of the machine, not only those in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, *, everything: bool = False):
        self._shown = None if everything else os.environ.get("CUDA_VISIBLE_DEVICES")
        self._held = contextlib.ExitStack()
        self._nvml: Any = None
        self._watched: dict[str, _Watched] = {}
        self._count, self.error = 0, ""
        try:
            self._nvml = self._held.enter_context(driver.opened())
            self._look()
        except Exception as error:  # pynvml has many error classes for a missing or broken driver
            self.error = _words(error)
            self.close()

    def read(self, seconds: float) -> tuple[Gpu, ...]:
        """Samples all GPUs.

        Args:
            seconds: by a monotonic clock.
        """
        if self._nvml is None:
            return ()
        try:
            if self._nvml.nvmlDeviceGetCount() != self._count:
                self._look()
        except self._nvml.NVMLError as error:
            self.error = _words(error)
            self._watched = {}
        found = []
        for key, each in list(self._watched.items()):
            try:
                found.append(self._read(each, seconds))
            except self._nvml.NVMLError as error:
                self.error = f"GPU {each.label}: {_words(error)}"
                del self._watched[key]
        return tuple(found)

    def processes(self) -> list[dict[str, Any]]:
        """The processes on the GPUs: `gpu` (its label), `pid`, `name`, `bytes`."""
        whole = [each for each in self._watched.values() if each.whole]
        return [{"gpu": each.label, **one} for each in whole for one in driver.processes(self._nvml, each.handle)]

    def close(self) -> None:
        """Shuts down NVML."""
        self._nvml, self._watched = None, {}
        self._held.close()

    def _look(self) -> None:
        nvml, known = self._nvml, {each.uuid: each for each in self._watched.values()}
        self._count = nvml.nvmlDeviceGetCount()
        handles, lost = driver.handles(nvml)
        self.error = "; ".join(f"GPU {index}: {error}" for index, error in lost.items())
        found = {index: self._made(handle, str(index)) for index, handle in handles.items()}
        parts = {
            index: [
                self._made(part, f"{index}s{number}", whole=False)
                for number, part in driver.slices(nvml, each.handle).items()
            ]
            for index, each in found.items()
        }
        if self._shown is not None:
            # The MIG slices, of each GPU that CUDA_VISIBLE_DEVICES names, or of which it names a slice.
            uuids = [found[at].uuid if at in found else None for at in range(self._count)]
            shown, _ = driver.visible(self._shown, uuids)
            names = tuple(word.strip() for word in self._shown.split(",") if word.strip().startswith("MIG-"))
            named = {index: [part for part in each if part.uuid.startswith(names)] for index, each in parts.items()}
            parts = {index: each if index in shown else named[index] for index, each in parts.items()}
            parts = {index: each for index, each in parts.items() if index in shown or each}
            found = {index: found[index] for index in parts}
        all_of_them = [one for index, each in found.items() for one in (each, *parts[index])]
        # Counters continue with the new handle.
        for each in all_of_them:
            if old := known.get(each.uuid):
                each.first_mj, each.energy_j, each.before = old.first_mj, old.energy_j, old.before
        self._watched = {each.uuid or each.label: each for each in all_of_them}

    def _made(self, handle: Any, label: str, whole: bool = True) -> _Watched:
        nvml, ask = self._nvml, driver.asked
        name, uuid = ask(nvml.nvmlDeviceGetName, handle) or "", ask(nvml.nvmlDeviceGetUUID, handle) or ""
        if not whole:
            return _Watched(handle, label, name, uuid, whole)
        lanes = ask(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle)
        lane = LANE_BYTES_PER_S.get(ask(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle) or 0)
        carried = lane * lanes if lane and lanes else None
        return _Watched(handle, label, name, uuid, whole, carried, driver.nvlink_rate(nvml, handle))

    def _read(self, each: _Watched, seconds: float) -> Gpu:
        nvml, handle = self._nvml, each.handle
        memory = driver.answer(nvml.nvmlDeviceGetMemoryInfo, handle)
        sizes = {"memory_bytes": memory and memory.used, "memory_total_bytes": memory and memory.total}
        if not each.whole:  # NVML has the other values only for the whole GPU.
            return Gpu(each.label, each.name, each.uuid, **sizes)
        busy = driver.answer(nvml.nvmlDeviceGetUtilizationRates, handle)
        power = driver.watts(driver.answer(nvml.nvmlDeviceGetPowerUsage, handle))
        reasons = driver.answer(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
        links = self._nvlink_counts(handle)
        kilobytes = [
            driver.answer(nvml.nvmlDeviceGetPcieThroughput, handle, way)
            for way in (nvml.NVML_PCIE_UTIL_TX_BYTES, nvml.NVML_PCIE_UTIL_RX_BYTES)
        ]
        sent, received = (None if count is None else count * 1024.0 for count in kilobytes)
        most = max((value for value in (sent, received) if value is not None), default=None)
        rates = _rates(each, seconds, links)
        fastest = max((rate for rate in rates if rate is not None), default=None)
        energy = self._energy(each, seconds, power)
        each.before = seconds, power, links
        return Gpu(
            each.label,
            each.name,
            each.uuid,
            utilization=busy and busy.gpu / 100,
            memory_utilization=busy and busy.memory / 100,
            **sizes,
            power_w=power,
            power_limit_w=driver.watts(driver.answer(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
            energy_j=energy,
            temperature_c=driver.answer(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
            sm_clock_mhz=driver.answer(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_SM),
            memory_clock_mhz=driver.answer(nvml.nvmlDeviceGetClockInfo, handle, nvml.NVML_CLOCK_MEM),
            pcie_sent_bytes_per_s=sent,
            pcie_received_bytes_per_s=received,
            pcie_share=most / each.link_bytes_per_s if most is not None and each.link_bytes_per_s else None,
            nvlink_sent_bytes_per_s=rates[0],
            nvlink_received_bytes_per_s=rates[1],
            nvlink_share=fastest / each.nvlink_bytes_per_s if fastest is not None and each.nvlink_bytes_per_s else None,
            slowed_by=None if reasons is None else ", ".join(driver.slowed_by(reasons)),
        )

    def _energy(self, each: _Watched, seconds: float, power: float | None) -> float | None:
        """NVML's energy counter (Volta and newer), or integrated power."""
        counted = driver.answer(self._nvml.nvmlDeviceGetTotalEnergyConsumption, each.handle)
        if counted is not None:
            each.first_mj = counted if each.first_mj is None else each.first_mj
            return (counted - each.first_mj) / 1000
        if power is None:
            return None
        if each.before is not None:
            then, earlier, _ = each.before
            each.energy_j += (power + (power if earlier is None else earlier)) / 2 * max(0.0, seconds - then)
        return each.energy_j

    def _nvlink_counts(self, handle: Any) -> tuple[int | None, int | None]:
        nvml = self._nvml
        fields = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        found = driver.answer(nvml.nvmlDeviceGetFieldValues, handle, [(field, _ALL_LINKS) for field in fields])
        return tuple(None if one.nvmlReturn else int(one.value.ullVal) for one in found) if found else (None, None)


def _rates(each: _Watched, seconds: float, links: tuple[int | None, int | None]) -> tuple[float | None, float | None]:
    if each.before is None or seconds <= each.before[0]:
        return None, None
    passed, pairs = seconds - each.before[0], zip(links, each.before[2], strict=True)
    steps = [None if None in pair or pair[0] < pair[1] else pair[0] - pair[1] for pair in pairs]
    return tuple(None if step is None else step * 1024 / passed for step in steps)


def _words(error: Exception) -> str:
    return " ".join(f"{error}".split()) or type(error).__name__
