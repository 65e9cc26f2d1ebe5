"""`parallel.plan`: the layouts of a model over devices, what each needs, and how long a step takes.

    import tfgpu
    sizes = tfgpu.parallel.Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
    best = tfgpu.parallel.plan(sizes, devices=8, memory="40GB", batch=64)[0]

Pure arithmetic: no device is used, and a `Transformer` needs no TensorFlow. The rules are in `footprint.py`.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tfgpu.errors import InputError, is_number, positive, whole_number
from tfgpu.parallel.planning import footprint, hardware, layouts
from tfgpu.parallel.planning.footprint import Memory, Sent
from tfgpu.parallel.planning.hardware import Device
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Transformer, Workload

_MAX_COUNT = 10**9  # of devices and rows: the search tries their divisors

if TYPE_CHECKING:
    import keras

HEADROOM = 0.1
"""The share of memory left free: for TensorFlow itself, workspaces, and what the rules do not model."""


@dataclass(frozen=True)
class Plan:
    """A layout and what it needs.

    Attributes:
        layout: how the model is laid out.
        memory: bytes on the device that needs the most.
        sent: bytes that a device sends in a step.
        step_time_s: the predicted time of a step, in seconds.
        examples_per_s: the predicted examples per second, over all devices.
        lacks_bytes: the memory that is missing on a device; 0 where the layout fits.
    """

    layout: Layout
    memory: Memory
    sent: Sent
    step_time_s: float
    examples_per_s: float
    lacks_bytes: float

    @property
    def fits(self) -> bool:
        return not self.lacks_bytes


def plan(
    model: "Transformer | Workload | keras.Model",
    devices: int,
    *,
    batch: int | None = None,
    memory: int | str | None = None,
    optimizer: str | int = "adamw",
    precision: str | None = None,
    device: str | Device = "a100-80",
    per_host: int = 8,
    flops: float | None = None,
    bandwidth: float | None = None,
    host_bandwidth: float | None = None,
    efficiency: float = footprint.EFFICIENCY,
    headroom: float = HEADROOM,
    loss: str = "batch",
) -> list[Plan]:
    """Predicts what each layout of a model over devices needs; the fastest that fits comes first.

    Args:
        model: a `Transformer` (sizes), or a functional Keras model, whose graph is traced but not run; the tensor axis
            splits it as `parallel.tensor` does.
        devices: how many.
        batch: examples in a step, over all devices; None is 8 per device.
        memory: of a device, in bytes or as `"80GB"`; None takes that of `device`.
        optimizer: one of `footprint.SLOTS`, or the number of values that it keeps for each parameter.
        precision: that a `Transformer` computes in (default `mixed_bfloat16`); a Keras model has its own.
        device: a name in `hardware.DEVICES`, or a `Device`.
        per_host: devices of a host; the tensor axis stays within a host.
        flops: peak operations per second of a device, in place of the table's.
        bandwidth: bytes per second between devices of a host, in place of the table's.
        host_bandwidth: bytes per second between hosts, in place of the table's.
        efficiency: the share of `flops` that is reached.
        headroom: the share of memory that is left free.
        loss: when the loss is computed: see `Layout`.

    Returns:
        Layouts that fit, by step time; then those that do not, by missing memory. Of layouts that differ only in how
        the batch is split, the best one.

    Raises:
        InputError: a setting is invalid, or no layout divides the batch and the model.

    Example:
        >>> sizes = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
        >>> print(plan(sizes, 8, batch=64, memory="40GB")[0].layout)
        data 8, 8 accumulated
    """
    work = _workload(model, precision)
    _check(devices=devices, per_host=per_host, batch=1 if batch is None else batch)
    batch = 8 * devices if batch is None else batch
    if not is_number(efficiency) or not 0 < efficiency <= 1:
        raise InputError(f"`efficiency` must be above 0 and at most 1. Received: {efficiency!r}. Try 0.5.")
    if not is_number(headroom) or not 0 <= headroom < 1:
        raise InputError(f"`headroom` must be at least 0 and below 1. Received: {headroom!r}. Try 0.1.")
    if loss not in layouts.LOSSES:
        Layout(loss=loss)  # says so
    found = _device(device, memory, flops, bandwidth, host_bandwidth)
    room = found.memory_bytes * (1 - headroom)
    settings = dict(batch=batch, slots=footprint.slots_of(optimizer), room=room, per_host=per_host)
    works = {size: work.along(size) for size in layouts.tensor_sizes(devices, per_host)}
    stages = {size: cut.most_stages for size, cut in works.items() if cut is not None}
    cuts, best = {}, {}
    for layout in layouts.candidates(devices, batch, stages=stages, loss=loss, experts=work.experts):
        if not _can_train(work, layout):
            continue
        key = layout.tensor, layout.pipeline
        if key not in cuts:
            cuts[key] = works[layout.tensor].stages(layout.pipeline)
        one = _predicted(works[layout.tensor], cuts[key], layout, found, efficiency=efficiency, **settings)
        key = replace(layout, accumulate=1, microbatches=1)
        if key not in best or _order(one) < _order(best[key]):
            best[key] = one
    if not best:
        raise InputError(
            f"No layout of {work.name!r} over {devices} devices divides a batch of {batch}. Use a batch that is a "
            f"multiple of {devices}."
        )
    return sorted(best.values(), key=_order)


def predict(
    model: "Transformer | Workload | keras.Model",
    layout: Layout,
    *,
    batch: int,
    optimizer: str | int = "adamw",
    precision: str | None = None,
    device: str | Device = "a100-80",
    per_host: int = 8,
    efficiency: float = footprint.EFFICIENCY,
    headroom: float = HEADROOM,
) -> Plan:
    """Predicts what one layout needs.

    Args:
        model, batch, optimizer, precision, device, per_host, efficiency, headroom: as for `plan`.
        layout: the layout.

    Returns:
        Its memory in bytes, what each device sends, and the time of a step; `fits` tells whether the memory suffices.

    Raises:
        InputError: the layout does not divide the batch or the model.

    Example:
        >>> sizes = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
        >>> predict(sizes, Layout(data=8, zero=1), batch=64).fits
        True
    """
    work, found = _workload(model, precision), _device(device)
    _check(batch=batch, per_host=per_host)
    cut = work.along(layout.tensor)
    if cut is None:
        sizes = "for which `parallel.tensor` can split a layer" if work.cutter else f"that divides {work.heads}"
        raise InputError(f"{work.name!r} can be split along a tensor axis of a size {sizes}. Received: {layout}.")
    if work.experts % layout.expert:
        raise InputError(
            f"{work.name!r} can be spread along an expert axis of a size that divides {work.experts}, its number of "
            f"experts. Received: {layout}."
        )
    if layout.pipeline > cut.most_stages:
        raise InputError(f"{work.name!r} can be split into {cut.most_stages} stages at most. Received: {layout}.")
    if not _can_train(work, layout):
        raise InputError(f"`parallel.tensor` does not support recomputed blocks. Received: {layout}.")
    work = cut
    room = found.memory_bytes * (1 - headroom)
    settings = dict(batch=batch, slots=footprint.slots_of(optimizer), room=room, per_host=per_host)
    return _predicted(work, work.stages(layout.pipeline), layout, found, efficiency=efficiency, **settings)


def _can_train(work: Workload, layout: Layout) -> bool:
    """Whether tfgpu can train in a layout: a Keras model is not recomputed where it is split along `tensor`."""
    return work.cutter is None or not (layout.recompute and layout.tensor > 1)


def _predicted(work, stages, layout, device, *, batch, slots, room, per_host, efficiency) -> Plan:
    memory = footprint.memory(work, stages, layout, batch=batch, slots=slots)
    bytes_sent = footprint.sent(work, stages, layout, batch=batch)
    seconds = footprint.compute_s(work, stages, layout, device, batch=batch, efficiency=efficiency)
    seconds += footprint.sending_s(layout, bytes_sent, device, per_host=per_host)
    return Plan(layout, memory, bytes_sent, seconds, batch / seconds, max(0.0, memory.peak - room))


def _order(one: Plan) -> tuple:
    """Sorts what fits before what does not, then by time (to three digits), simplicity, and memory."""
    layout = one.layout
    plain = (layout.zero, layout.recompute, layout.pipeline, layout.tensor * layout.expert)
    plain += (layout.accumulate, layout.microbatches)
    return (one.lacks_bytes, float(f"{one.step_time_s:.3g}"), plain, one.memory.peak)


def _workload(model, precision: str | None) -> Workload:
    if isinstance(model, Transformer):
        return model.workload(precision or "mixed_bfloat16")
    if precision is not None:
        raise InputError(
            f"`precision` applies to a `Transformer` only; a model has its own. Received: precision={precision!r}."
        )
    if isinstance(model, Workload):
        return model
    from tfgpu.parallel.planning import traced  # starts TensorFlow

    return traced.workload(model)


def _device(device: str | Device, memory=None, flops=None, bandwidth=None, host_bandwidth=None) -> Device:
    found = device if isinstance(device, Device) else hardware.known(device)
    for name, value in {"flops": flops, "bandwidth": bandwidth, "host_bandwidth": host_bandwidth}.items():
        if value is not None:
            positive(name, value)
    size = None if memory is None else hardware.bytes_of(memory)
    rates = dict(flops=flops, flops_tf32=flops, flops_float32=flops, bandwidth=bandwidth, host_bandwidth=host_bandwidth)
    given = dict(memory_bytes=size, **rates)
    return replace(found, **{name: value for name, value in given.items() if value is not None})


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if whole_number(name, value) > _MAX_COUNT:
            raise InputError(f"`{name}` must be at most {_MAX_COUNT:,}. Received: {value:,}.")
