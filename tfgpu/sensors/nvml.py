"""Queries NVIDIA's driver through NVML: health and state of the GPUs, their processes and links.

This is the only module that uses NVML. Values that a GPU or a driver does not support are `None`.
"""

import contextlib
import ctypes
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

# Bits of nvmlClocksEventReasons; the others do not cost speed (idle, set by the user, sync boost).
REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x20: "heat (software)",
    0x40: "heat (hardware)",
    0x80: "power brake",
}
_ANCESTORS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
_NVLINKS = 18
LOST = ("NVMLError_GpuIsLost", "NVMLError_Uninitialized", "NVMLError_DriverNotLoaded", "NVMLError_ResetRequired")
"""NVML's errors for a lost GPU or driver; other errors only mean that a value is not available."""
_P2P_READ, _P2P_NVLINK = 0, 2  # In nvidia-ml-py these constants are tuples, which ctypes refuses.


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """Gives NVML's functions (`pynvml`), initialized within the block.

    Raises:
        pynvml.NVMLError: there is no driver, or it does not answer.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        with contextlib.suppress(pynvml.NVMLError):  # the driver may be gone
            pynvml.nvmlShutdown()


def handles(nvml: Any) -> tuple[dict[int, Any], dict[int, str]]:
    """The handles of the GPUs by NVML's index (as in `nvidia-smi`), and the errors of those that do not answer.

    A lost GPU keeps its index and does not hide the others.
    """
    found: dict[int, Any] = {}
    lost: dict[int, str] = {}
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            found[index] = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            lost[index] = str(error)
    return found, lost


def living(nvml: Any) -> dict[int, Any]:
    """The GPUs that answer, by NVML's index. A GPU lost after NVML's start still has a handle."""
    found = {}
    for index, handle in handles(nvml)[0].items():
        with contextlib.suppress(nvml.NVMLError):
            answer(nvml.nvmlDeviceGetMemoryInfo, handle)
            found[index] = handle
    return found


def asked(function: Callable, *arguments: Any) -> Any:
    """NVML's answer; `None` if this GPU or driver does not support it."""
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        return function(*arguments)
    return None


def answer(function: Callable, *arguments: Any) -> Any:
    """Like `asked`, but raises an error if the GPU itself is lost.

    Raises:
        pynvml.NVMLError: the GPU or the driver is lost.
    """
    import pynvml

    try:
        return function(*arguments)
    except pynvml.NVMLError as error:
        if type(error).__name__ in LOST:
            raise
        return None


def driver(root: str = "/") -> dict:
    """The driver and all its GPUs as plain values, for the doctor.

    Args:
        root: the folder below which the names of processes are read.

    Raises:
        pynvml.NVMLError: there is no driver, or it does not answer.
    """
    with opened() as nvml:
        cuda = nvml.nvmlSystemGetCudaDriverVersion()
        found, lost = handles(nvml)
        gpus = []
        for index, handle in list(found.items()):
            try:
                gpus.append({"index": index, **_gpu(nvml, handle, Path(root))})
            except nvml.NVMLError as error:  # A GPU lost after NVML's start still has a handle.
                lost[index] = str(error)
                del found[index]
        return {
            "version": nvml.nvmlSystemGetDriverVersion(),
            "cuda": [cuda // 1000, cuda % 1000 // 10],
            "gpus": gpus,
            "links": _links(nvml, found),
            "lost": [{"index": index, "error": lost[index]} for index in sorted(lost)],
        }


def visible(value: str, uuids: Sequence[str | None]) -> tuple[list[int], str | None]:
    """Parses CUDA_VISIBLE_DEVICES as CUDA does: up to the first entry that does not name a GPU.

    Args:
        value: the variable's value: comma-separated indices, or prefixes of GPU UUIDs.
        uuids: the UUIDs of the driver's GPUs, in its order; `None` for a lost GPU, whose index is skipped.

    Returns:
        The indices of the visible GPUs, and the invalid entry at which CUDA stops; `None` if all are valid.
        "-1", the usual way to hide all GPUs, does not count as invalid.

    Example:
        >>> visible("1,GPU-a", ["GPU-aa", "GPU-bb"])
        ([1, 0], None)
        >>> visible("0,1,2", ["GPU-aa", None, "GPU-cc"])
        ([0, 2], None)

    Source: https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#cuda-environment-variables
    """
    shown: list[int] = []
    entries = [entry.strip() for entry in value.split(",")] if value.strip() else []
    for entry in entries:
        named = [index for index, uuid in enumerate(uuids) if uuid is not None and uuid.startswith(entry)]
        if re.fullmatch(r"\d+", entry) and int(entry) < len(uuids):
            index = int(entry)
            if uuids[index] is None:
                continue
        elif re.match(r"GPU-", entry) and len(named) == 1:
            index = named[0]
        elif entry.startswith("MIG-"):
            continue  # A slice of a GPU; the driver's list has whole ones.
        else:
            return shown, None if entry == "-1" else entry
        if index in shown:
            return [], entry  # CUDA shows no GPU at all if one is listed twice.
        shown.append(index)
    return shown, None


def _gpu(nvml: Any, handle: Any, root: Path) -> dict:
    memory = answer(nvml.nvmlDeviceGetMemoryInfo, handle)
    return {
        "name": nvml.nvmlDeviceGetName(handle),
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "capability": list(asked(nvml.nvmlDeviceGetCudaComputeCapability, handle) or ()),
        "memory_bytes": memory and memory.total,
        "used_bytes": memory and memory.used,
        "processes": processes(nvml, handle, root),
        "persistence": asked(nvml.nvmlDeviceGetPersistenceMode, handle),
        "temperature_c": asked(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power_limit_w": watts(asked(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "default_power_limit_w": watts(asked(nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle)),
        "slowed_by": slowed_by(asked(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0),
        "ecc": _ecc(nvml, handle),
        "mig": _mig(nvml, handle),
        "pcie": {
            "width": asked(nvml.nvmlDeviceGetCurrPcieLinkWidth, handle),
            "most_width": asked(nvml.nvmlDeviceGetMaxPcieLinkWidth, handle),
            # The current generation falls while the GPU is idle.
            "generation": asked(nvml.nvmlDeviceGetMaxPcieLinkGeneration, handle),
        },
        "nvlinks": _nvlinks(nvml, handle),
    }


def watts(milliwatts: int | None) -> float | None:
    """Converts milliwatts to watts."""
    return None if milliwatts is None else milliwatts / 1000


def slowed_by(bits: int) -> list[str]:
    """The reasons why a GPU's clocks are throttled.

    Example:
        >>> slowed_by(0x41), slowed_by(0x1)
        (['heat (hardware)'], [])
    """
    return [words for bit, words in REASONS.items() if bits & bit]


def processes(nvml: Any, handle: Any, root: Path = Path("/")) -> list[dict]:
    """The processes on a GPU: `pid`, `name` (`""` if not visible) and `bytes` of GPU memory."""
    found = []
    for each in asked(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []:
        name = ""
        with contextlib.suppress(OSError):
            name = (root / f"proc/{each.pid}/comm").read_text().strip()
        found.append({"pid": each.pid, "name": name, "bytes": each.usedGpuMemory or 0})
    return found


def _ecc(nvml: Any, handle: Any) -> dict:
    mode = asked(nvml.nvmlDeviceGetEccMode, handle)
    rows = asked(nvml.nvmlDeviceGetRemappedRows, handle) or (0, 0, 0, 0)
    since_boot = nvml.NVML_VOLATILE_ECC
    kinds = {"corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED}
    found = {name: asked(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, since_boot) for name, kind in kinds.items()}
    pending = bool(rows[2]) or bool(asked(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle))
    return {"enabled": mode and bool(mode[0]), **found, "pending": pending, "failed": bool(rows[3])}


def _mig(nvml: Any, handle: Any) -> dict:
    mode = asked(nvml.nvmlDeviceGetMigMode, handle)
    if not mode:
        return {"enabled": False, "pending": False, "slices": []}
    names = [asked(nvml.nvmlDeviceGetUUID, part) or f"slice {index}" for index, part in slices(nvml, handle).items()]
    return {"enabled": bool(mode[0]), "pending": bool(mode[1]), "slices": names}


def slices(nvml: Any, handle: Any) -> dict[int, Any]:
    """The MIG slices of a GPU by number; empty without MIG."""
    mode = asked(nvml.nvmlDeviceGetMigMode, handle)
    count = asked(nvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0 if mode and mode[0] else 0
    found = {index: asked(nvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, index) for index in range(count)}
    return {index: part for index, part in found.items() if part is not None}


def _nvlinks(nvml: Any, handle: Any) -> dict:
    """The numbers of active and of all NVLinks, and the state of the NVLink fabric."""
    states = [asked(nvml.nvmlDeviceGetNvLinkState, handle, link) for link in range(_NVLINKS)]
    known = [each for each in states if each is not None]
    fabric = nvml.c_nvmlGpuFabricInfo_t()  # of NVSwitch
    asked(nvml.nvmlDeviceGetGpuFabricInfo, handle, ctypes.byref(fabric))
    state = {1: "not started", 2: "under way", 3: "done"}.get(fabric.state)
    return {"up": sum(known), "of": len(known), "fabric": state}


def nvlink_rate(nvml: Any, handle: Any) -> float | None:
    """The bandwidth of the active NVLinks in one direction, in bytes per second; `None` without NVLinks."""
    found = asked(nvml.nvmlDeviceGetFieldValues, handle, [nvml.NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON])
    up = _nvlinks(nvml, handle)["up"] if found and not found[0].nvmlReturn else 0
    return found[0].value.uiVal * 1e6 * up or None if up else None


def _links(nvml: Any, handles: Mapping[int, Any]) -> list[dict]:
    """The path between each pair of GPUs, and whether they can read each other's memory."""
    found = []
    for one, other in itertools.combinations(handles, 2):
        pair = handles[one], handles[other]
        ancestor = asked(nvml.nvmlDeviceGetTopologyCommonAncestor, *pair)
        reads = asked(nvml.nvmlDeviceGetP2PStatus, *pair, _P2P_READ)
        linked = asked(nvml.nvmlDeviceGetP2PStatus, *pair, _P2P_NVLINK)
        path = "NVLink" if linked == 0 else _ANCESTORS.get(ancestor, "unknown")
        found.append({"gpus": [one, other], "path": path, "reads": None if reads is None else reads == 0})
    return found
