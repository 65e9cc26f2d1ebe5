"""Predicts what a layout needs: memory of each device, bytes that it sends, and time.

The rules, for Ψ parameters on a device, of V bytes each, and D copies of the model:

| | plain | ZeRO 1 | ZeRO 2 | ZeRO 3 |
|---|---|---|---|---|
| parameters | V Ψ | V Ψ | V Ψ | V Ψ / D, and the largest block's whole |
| gradients | V Ψ | V Ψ | V Ψ / D, and the largest block's whole | the same |
| slots, sums of accumulated gradients | V Ψ each | V Ψ / D | V Ψ / D | V Ψ / D |
| sent for the gradients, times (D - 1) / D | 2 V Ψ | 2 V Ψ | V Ψ | V Ψ |
| sent for the parameters, times (D - 1) / D | - | V Ψ | V Ψ | 2 V Ψ |

Under a mixed policy, Keras keeps variables, gradients and slots in float32 and casts kernels where they are used; the
casts count as activations. Activations grow before gradients exist, so the peak is less than the sum of all maxima.

Along `expert`, E devices hold 1 / E of the experts each and run them on the tokens of all E; their gradients are summed
over `data` alone, all others over both. A device's share of the tokens stays the same if experts are used equally.

Source: Lepikhin et al., GShard, 2020; Rajbhandari et al., ZeRO, 2020; Narayanan et al., 2021; Korthikanti et al., 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tfgpu.errors import InputError, unknown
from tfgpu.parallel.planning.hardware import Device
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Stage, Workload

SLOTS = {
    "sgd": 0,
    "momentum": 1,
    "rmsprop": 1,
    "adagrad": 1,
    "lion": 1,
    "adam": 2,
    "adamw": 2,
    "adamax": 2,
    "adadelta": 2,
    "nadam": 2,
    "ftrl": 2,
    "lamb": 2,
}
"""Numbers that Keras's optimizers keep for each parameter; `momentum` is SGD with momentum."""


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs the most.

    Attributes:
        parameters: of its variables.
        slots: of the optimizer, and accumulated gradients.
        gradients: their maximum.
        activations: their maximum, including the loss's.
        peak: the maximum of all together, at most the sum of these.
        stage: the pipeline stage on that device.
    """

    parameters: float
    slots: float
    gradients: float
    activations: float
    peak: float
    stage: int = 0


@dataclass(frozen=True)
class Sent:
    """Bytes that a device sends in a step, by axis."""

    data: float = 0
    pipeline: float = 0
    tensor: float = 0
    expert: float = 0

    @property
    def total(self) -> float:
        return self.data + self.pipeline + self.tensor + self.expert


def slots_of(optimizer: str | int) -> int:
    """Numbers that an optimizer keeps for each parameter.

    Raises:
        InputError: the name is not in `SLOTS`; give the number instead.

    Example:
        >>> slots_of("adamw"), slots_of(3)
        (2, 3)
    """
    if type(optimizer) is int and optimizer >= 0:
        return optimizer
    name = str(optimizer).lower()
    if name.isdigit():
        return int(name)
    if name not in SLOTS:
        raise unknown("optimizer", optimizer, [*SLOTS, "or how many numbers it keeps for each parameter"])
    return SLOTS[name]


def memory(work: Workload, stages: Sequence[Stage], layout: Layout, *, batch: int, slots: int) -> Memory:
    """Bytes on the device of a layout that needs the most.

    Args:
        work: the model.
        stages: of `work.stages(layout.pipeline)`.
        layout: how the model is laid out.
        batch: examples in a step, over all devices.
        slots: numbers that the optimizer keeps for each parameter.

    Raises:
        InputError: the batch does not divide into the layout's parts.
    """
    if batch % layout.parts:
        raise InputError(
            f"The batch must divide into {layout.parts} equal parts for {layout}. Received: {batch}. Use "
            f"{max(1, round(batch / layout.parts)) * layout.parts}."
        )
    rows, last, seen, found = batch // layout.parts, len(stages) - 1, set(), []
    for at, stage in enumerate(stages):
        key = stage.signature, at == last
        if key not in seen:  # of equal stages, the first one keeps the most
            seen.add(key)
            found.append(of_stage(work, stage, layout, at, rows=rows, slots=slots))
    return max(found, key=lambda one: one.peak)


def of_stage(work: Workload, stage: Stage, layout: Layout, at: int, *, rows: float, slots: int) -> Memory:
    """Bytes on a device of one stage, with `rows` examples in a micro-batch; other arguments are those of `memory`."""
    size, tensor, zero, copies, expert = work.variable_bytes, layout.tensor, layout.zero, layout.data, layout.expert
    variables, trained = size * stage.sum.parameters(tensor, expert), size * stage.sum.trainable(tensor, expert)
    parameters, gradients = variables, trained
    if zero == 3:
        parameters = min(variables, variables / copies + size * stage.largest_parameters(tensor))
    if zero >= 2:
        gradients = min(trained, trained / copies + size * stage.largest_trainable(tensor))
    pieces = zero in (1, 2) and size >= 4  # being updated; for 16-bit variables, the slots include a copy
    kept_apart = (slots + (layout.accumulate > 1) + pieces) * trained / (copies if zero else 1)
    loss = _loss(work, layout, rows) if at == layout.pipeline - 1 else 0.0
    activations = _activations(stage, layout, at, rows)
    passing = stage.largest_passing(rows, tensor)
    if layout.pipeline > 1:
        # The loss is computed before the gradients begin; its gradient is kept until the last micro-batch.
        peak = max(loss, activations + passing + gradients + loss / 3)
    elif layout.recompute or zero >= 2:
        peak = max(activations + loss, activations + passing + gradients)
    else:
        peak = max(activations + loss, _walk(stage, layout, rows, size))
    activations += max(loss, passing)
    return Memory(parameters, kept_apart, gradients, activations, parameters + kept_apart + peak, at)


def _loss(work: Workload, layout: Layout, rows: float) -> float:
    """Bytes of the loss: of a shard of the logits where the tensor axis splits them, as in Megatron-LM.

    A pipeline and the tensor axis compute no logits by chunks.
    """
    parts = layout.tensor if work.loss_splits else 1
    rows *= 1 if layout.loss == "microbatch" else layout.microbatches
    return work.loss(rows, by_chunks=layout.pipeline == layout.tensor == 1) / parts


def _activations(stage: Stage, layout: Layout, at: int, rows: float) -> float:
    under_way = layout.under_way(at)
    if layout.recompute:
        kept = under_way * stage.inputs(rows) + stage.largest_segment(rows, layout.tensor, layout.expert)
    else:
        kept = under_way * stage.sum.kept(rows, layout.tensor, layout.expert)
    if layout.pipeline > 1 and layout.schedule == "gpipe":  # what the previous stage sent, for all of them
        kept += layout.microbatches * rows * stage.sum.takes
    return kept


def _walk(stage: Stage, layout: Layout, rows: float, size: int) -> float:
    """The peak of a backward pass: what earlier blocks keep, and the gradients of later ones."""
    kept, gradients = stage.sum.kept(rows, layout.tensor, layout.expert), 0.0
    most = kept
    for block in reversed(stage.blocks):
        most = max(most, kept + gradients + rows * block.passing / layout.tensor)
        gradients += size * block.trainable(layout.tensor, layout.expert)
        most = max(most, kept + gradients)
        kept -= block.kept(rows, layout.tensor, layout.expert)
    return most


def sent(work: Workload, stages: Sequence[Stage], layout: Layout, *, batch: int) -> Sent:
    """Bytes sent in a step by the device that sends the most; arguments are those of `memory`."""
    copies, tensor, expert = layout.copies, layout.tensor, layout.expert
    rows = batch / copies
    passes = layout.forwards + 1
    once = (copies - 1) / copies * work.variable_bytes
    trained = once * max(stage.sum.trainable(tensor) for stage in stages)
    variables = once * max(stage.sum.parameters(tensor) for stage in stages)
    reductions = layout.accumulate if layout.zero else 1
    if expert > 1:
        held = work.variable_bytes * max(stage.sum.experts for stage in stages)
        trained += (layout.data - 1) / layout.data * held / expert - (copies - 1) / copies * held
    data = (1 if layout.zero >= 2 else 2) * trained * reductions
    if layout.zero == 3:
        data += 2 * variables * reductions  # gathered for the forward pass, and again for the backward pass
    elif layout.zero:
        data += trained
    reduced = max(stage.sum.reduces for stage in stages) * rows * passes
    crossing = max((stage.sum.takes for stage in stages[1:]), default=0) * rows * passes
    spread, dealt = (max(getattr(stage.sum, name) for stage in stages) for name in ("spreads", "exchanges"))
    exchanged = rows * passes * ((expert - 1) * spread + (expert - 1) / expert * dealt)
    return Sent(data, crossing, 2 * (tensor - 1) / tensor * reduced, exchanged)


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
