"""Predicts how long a step takes: an estimate to compare layouts by, not a measurement."""

from collections.abc import Sequence

from tfgpu.parallel.planning.footprint import Sent
from tfgpu.parallel.planning.hardware import Device
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Stage, Workload

EFFICIENCY = 0.5
"""The share of a device's peak operations per second that is reached while it computes.

Published for A100s: 0.43 to 0.52, including waiting and sending (Narayanan et al., 2021, table 1).
"""


def compute_s(
    work: Workload, stages: Sequence[Stage], layout: Layout, device: Device, *, batch: int, efficiency: float
) -> float:
    """Seconds in which the devices compute, or wait for each other in the pipeline.

    A backward pass takes twice as long as a forward pass. All stages take as long as the slowest one, so a step of the
    pipeline takes `M + S - 1` times its time per micro-batch.
    """
    rows = batch / layout.parts
    slowest = max(stage.sum.operations(layout.tensor) for stage in stages) * rows
    turns = (layout.microbatches + layout.pipeline - 1) * layout.accumulate
    return turns * slowest * (layout.forwards + 2) / (device.flops_in(work.precision) * efficiency)


def sending_s(layout: Layout, bytes_sent: Sent, device: Device, *, per_host: int) -> float:
    """Seconds in which the devices send, with no overlap with computation.

    Neighbors along `tensor` are adjacent devices, then those along `expert`, `pipeline` and `data`. An axis that
    spans more than one host uses the links between hosts.
    """
    pair = layout.tensor * layout.expert
    reach = {"tensor": layout.tensor, "expert": pair, "pipeline": pair * layout.pipeline, "data": layout.devices}
    return sum(
        getattr(bytes_sent, axis) / (device.bandwidth if size <= per_host else device.host_bandwidth)
        for axis, size in reach.items()
    )
