"""How long a step takes, by arithmetic: a bound to compare layouts by, not a measurement."""

from collections.abc import Sequence

from tfgpu.parallel.planning.footprint import Sent
from tfgpu.parallel.planning.hardware import Device
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Stage, Workload

EFFICIENCY = 0.5
"""Of a device's most operations a second, while it computes.

On A100s 0.43 to 0.52 are published, waiting and sending included (Narayanan et al., 2021, table 1).
"""


def compute_s(
    work: Workload, stages: Sequence[Stage], layout: Layout, device: Device, *, batch: int, efficiency: float
) -> float:
    """Seconds in which the devices compute, or wait for each other in the pipeline.

    A backward pass takes twice a forward pass. All stages take as long as the slowest, so a step of the pipeline has
    `M + S - 1` turns of it.
    """
    rows = batch / layout.parts
    slowest = max(stage.sum.operations(layout.tensor) for stage in stages) * rows
    turns = (layout.microbatches + layout.pipeline - 1) * layout.accumulate
    return turns * slowest * (layout.forwards + 2) / (device.flops_in(work.precision) * efficiency)


def sending_s(layout: Layout, bytes_sent: Sent, device: Device, *, per_host: int) -> float:
    """Seconds in which the devices send; nothing of it is hidden behind the computation.

    Neighbours along `tensor` lie side by side, then those along `pipeline`, then those along `data`: an axis that
    reaches beyond a host has the links between hosts.
    """
    reach = {"tensor": layout.tensor, "pipeline": layout.tensor * layout.pipeline, "data": layout.devices}
    return sum(
        getattr(bytes_sent, axis) / (device.bandwidth if size <= per_host else device.host_bandwidth)
        for axis, size in reach.items()
    )
