"""What NVIDIA's driver says of its GPUs, through NVML: health, state, who uses them, how they are linked."""

import contextlib
import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfgpu.sensors.gpus import slowed_by

_ANCESTORS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_NVLINKS = 18
_P2P_READ, _P2P_NVLINK = 0, 2  # In nvidia-ml-py these constants are tuples, which ctypes refuses.


def _driver(*, root: str = "/", **_) -> dict:
    import pynvml

    pynvml.nvmlInit()
    try:
        cuda = pynvml.nvmlSystemGetCudaDriverVersion()
        count = pynvml.nvmlDeviceGetCount()
        handles, lost = [], []
        for index in range(count):
            try:
                handles.append(pynvml.nvmlDeviceGetHandleByIndex(index))
            except pynvml.NVMLError as error:  # One GPU that is lost hides none of the others.
                lost.append({"index": index, "error": str(error)})
        return {
            "version": pynvml.nvmlSystemGetDriverVersion(),
            "cuda": [cuda // 1000, cuda % 1000 // 10],
            "gpus": [_gpu(pynvml, handle, Path(root)) for handle in handles],
            "links": _links(pynvml, handles),
            "lost": lost,
        }
    finally:
        pynvml.nvmlShutdown()


def _gpu(nvml: Any, handle: Any, root: Path) -> dict:
    memory = _asked(nvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "capability": list(_asked(nvml.nvmlDeviceGetCudaComputeCapability, handle) or ()),
        "memory_bytes": memory and memory.total,
        "used_bytes": memory and memory.used,
        "processes": _processes(nvml, handle, root),
        "persistence": _asked(nvml.nvmlDeviceGetPersistenceMode, handle),
        "temperature_c": _asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power_limit_w": _watts(_asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "default_power_limit_w": _watts(_asked(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "slowed_by": slowed_by(_asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
        "ecc": _ecc(nvml, handle),
        "mig": _mig(nvml, handle),
        "pcie": _pcie(nvml, handle),
        "nvlinks": _nvlinks(nvml, handle),
    }


def _asked(function: Callable, *arguments: Any) -> Any:
    """NVML's answer, or `None` where this GPU or this driver has none."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        return function(*arguments)
    return None


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else milliwatts / 1000


def _processes(nvml: Any, handle: Any, root: Path) -> list[dict]:
    found = []
    for each in _asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []:
        name = ""
        with contextlib.suppress(OSError):
            name = (root / f"proc/{each.pid}/comm").read_text().strip()
        found.append({"pid": each.pid, "name": name, "bytes": each.usedGpuMemory or 0})
    return found


def _ecc(nvml: Any, handle: Any) -> dict:
    mode = _asked(nvml.nvmlDeviceGetEccMode, handle)
    rows = _asked(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    since_boot = nvml.NVML_VOLATILE_ECC
    kinds = {"corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}
    found = {name: _asked(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, since_boot) for name, kind in kinds.items()}
    pending = bool(rows[2]) or bool(_asked(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle))
    return {"enabled": mode and bool(mode[0]), **found, "pending": pending, "failed": bool(rows[3])}


def _mig(nvml: Any, handle: Any) -> dict:
    mode = _asked(nvml.nvmlDeviceGetMigMode, handle)
    if not mode:
        return {"enabled": False, "pending": False, "slices": []}
    slices = []
    for index in range(_asked(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0 if mode[0] else 0):
        part = _asked(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index)
        if part is not None:
            slices.append(_asked(nvml.nvmlDeviceGetUUID, part) or f"slice {index}")
    return {"enabled": bool(mode[0]), "pending": bool(mode[1]), "slices": slices}


def _pcie(nvml: Any, handle: Any) -> dict:
    asked = {
        "width": nvml.nvmlDeviceGetCurrPcieLinkWidth,
        "most_width": nvml.nvmlDeviceGetMaxPcieLinkWidth,
        "generation": nvml.nvmlDeviceGetMaxPcieLinkGeneration,  # The current one falls while the GPU is idle.
    }
    return {name: _asked(function, handle) for name, function in asked.items()}


def _nvlinks(nvml: Any, handle: Any) -> dict:
    """How many NVLinks are up, of those that this GPU has; what the fabric between them says."""
    states = [_asked(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_NVLINKS)]
    known = [each for each in states if each is not None]
    return {"up": sum(known), "of": len(known), "fabric": _fabric(nvml, handle)}


def _fabric(nvml: Any, handle: Any) -> str | None:
    """What the switches between NVLinks say; `None` where there are none."""
    found = nvml.c_nvmlGpuFabricInfo_t()
    _asked(nvml.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(found))
    return {1: "not started", 2: "under way", 3: "done"}.get(found.state)


def _links(nvml: Any, handles: list) -> list[dict]:
    """How each two GPUs reach each other, and whether one may read the other's memory."""
    found = []
    for one, first in enumerate(handles):
        for other in range(one + 1, len(handles)):
            ancestor = _asked(nvml.nvmlDeviceGetTopologyCommonAncestor, first, handles[other])
            reads = _asked(nvml.nvmlDeviceGetP2PStatus, first, handles[other], _P2P_READ)
            linked = _asked(nvml.nvmlDeviceGetP2PStatus, first, handles[other], _P2P_NVLINK)
            path = "NVLink" if linked == 0 else _ANCESTORS.get(ancestor, "unknown")
            found.append({"gpus": [one, other], "path": path, "reads": None if reads is None else reads == 0})
    return found


QUESTIONS = {"driver": _driver}
