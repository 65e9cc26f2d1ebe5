"""Decides which resource limits a step, by rules on mean values; the first matching rule counts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tfgpu.sensors.sample import Value

WAITS = 0.2
"""The input limits a step that waits for data for at least this share of the time."""
BUSY = 0.8
"""A GPU or the CPU cores count as busy from this share of the time."""
TRAFFIC = 0.6
"""Memory traffic limits a busy GPU whose memory is in use for at least this share of the time."""
LINK = 0.5
"""A link limits a step from this share of its bandwidth, since programs rarely sustain more: PCIe only if the GPU is
not busy; NVLink and the network in any case, since a GPU that waits for an all-reduce counts as busy."""
RESOURCES = ("input", "GPU memory traffic", "GPU compute", "communication", "CPU", "host", "unknown")


@dataclass(frozen=True)
class Limit:
    """What limits the step.

    Attributes:
        resource: one of `RESOURCES`.
        why: the measured values behind it.
    """

    resource: str
    why: str


def limit(means: Mapping[str, Value], *, workers: int = 1) -> Limit:
    """Decides which resource limits a step.

    Args:
        means: means of samples by the columns of `Sample.row`, and `input_wait` if known. GPUs are averaged.
        workers: number of workers that train together.

    Example:
        >>> limit({"input_wait": 0.02, "gpu0_utilization": 0.97, "gpu0_memory_utilization": 0.3})
        Limit(resource='GPU compute', why='the GPU is busy 97% of the time')
    """
    wait, cpu = _number(means.get("input_wait")), _number(means.get("cpu_share"))
    network = _number(means.get("network_share")) if workers > 1 else None
    if _is_from(WAITS, wait):
        more = f"; the cores are {cpu:.0%} busy" if _is_from(BUSY, cpu) else ""
        return Limit("input", f"the step waits for data {wait:.0%} of the time{more}")
    found = _of_links_and_gpus(means, network) or _of_cores(means, workers, network)
    is_complete = wait is not None or found.resource == "unknown"
    return found if is_complete else Limit(found.resource, f"{found.why}; the wait for data is unknown")


def _is_from(least: float, share: float | None) -> bool:
    return share is not None and share >= least


def _of_links_and_gpus(means: Mapping[str, Value], network: float | None) -> Limit | None:
    gpu, traffic = _gpus(means, "utilization"), _gpus(means, "memory_utilization")
    for name, share in (("NVLink", _gpus(means, "nvlink_share")), ("the network", network)):
        if _is_from(LINK, share):
            return Limit("communication", f"{name} uses {share:.0%} of its bandwidth")
    if _is_from(BUSY, gpu):
        if _is_from(TRAFFIC, traffic):
            return Limit("GPU memory traffic", f"the GPU's memory is read or written {traffic:.0%} of the time")
        return Limit("GPU compute", f"the GPU is busy {gpu:.0%} of the time")
    link = _gpus(means, "pcie_share")
    if gpu is not None and _is_from(LINK, link):
        return Limit("communication", f"{_idle(gpu)}PCIe uses {link:.0%} of its bandwidth")
    return None


def _of_cores(means: Mapping[str, Value], workers: int, network: float | None) -> Limit:
    """What limits a step that neither its input, a link nor a GPU does."""
    cpu, machine = _number(means.get("cpu_share")), _number(means.get("machine_cpu_share"))
    gpu = _gpus(means, "utilization")
    if cpu is None:
        return Limit("unknown", "the CPU load is not known yet")
    idle = _idle(gpu)
    if cpu >= BUSY:
        return Limit("CPU", f"{idle}the cores are {cpu:.0%} busy")
    if _is_from(BUSY, machine) and machine > 2 * cpu:
        return Limit("CPU", f"{idle}other processes keep the machine's cores {machine:.0%} busy")
    if gpu is None and workers > 1:
        return Limit("communication", f"the cores are {cpu:.0%} busy while {workers} workers train")
    carried = f" (the network uses {network:.0%} of its bandwidth)" if network is not None else ""
    exchange = f", or communication between {workers} workers{carried}" if workers > 1 else ""
    return Limit("host", f"{idle}the cores are {cpu:.0%} busy: Python, small steps or few threads{exchange}")


def _idle(gpu: float | None) -> str:
    return f"the GPU is busy {gpu:.0%} of the time, " if gpu is not None else ""


def input_wait(step_s: float | None, computing_s: float | None, busy: Sequence[float | None] = ()) -> float | None:
    """The share of a step's time in which it waits for data.

    With GPUs the step hands its kernels on and asks for the next batch while they still run, so the host waits for data
    that nobody misses yet. A GPU misses it only while it idles: the share is at most what the busiest GPU leaves.

    Args:
        step_s: how long a step takes, in seconds.
        computing_s: how long the host computes between two requests for a batch.
        busy: of each GPU the share of the time in which a kernel ran; None where it does not tell.

    Returns:
        From 0 to 1; None where it cannot be known.

    Example:
        >>> input_wait(0.1, 0.04), input_wait(0.1, 0.04, [0.95])
        (0.6, 0.05)
    """
    told = [share for share in busy if share is not None]
    if step_s is None or computing_s is None or (busy and not told):
        return None
    share = min(1 - computing_s / step_s, 1 - max(told, default=0.0))
    return round(min(1.0, max(0.0, share)), 6)


def _gpus(means: Mapping[str, Value], name: str) -> float | None:
    """The mean over whole GPUs."""
    ends = f"_{name}"
    gpus = [key for key in means if key.startswith("gpu") and key.endswith(ends) and key[3 : -len(ends)].isdecimal()]
    known = [value for key in gpus if (value := _number(means[key])) is not None]
    return sum(known) / len(known) if known else None


def _number(value: Value) -> float | None:
    return float(value) if isinstance(value, int | float) else None
