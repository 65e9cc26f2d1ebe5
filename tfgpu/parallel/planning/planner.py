"""Which ways there are to lay a model out over devices, what each needs, and how long a step of it takes.

    import tfgpu
    sizes = tfgpu.parallel.Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
    best = tfgpu.parallel.plan(sizes, devices=8, memory="40GB", batch=64)[0]

Pure arithmetic: no device is asked for, and for sizes no TensorFlow is started. The rules stand in `footprint.py` and
`timing.py`.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tfgpu.errors import InputError
from tfgpu.parallel.planning import footprint, hardware, layouts, timing
from tfgpu.parallel.planning.footprint import Memory, Sent
from tfgpu.parallel.planning.hardware import Device
from tfgpu.parallel.planning.layouts import Layout
from tfgpu.parallel.planning.workload import Transformer, Workload

_MOST = 10**9
"""Devices, rows: a layout for more would take as long to find as there are numbers to divide by."""

if TYPE_CHECKING:
    import keras

HEADROOM = 0.1
"""The share of the memory that is left free: for TensorFlow's own use, workspaces, and what the rules do not know."""


@dataclass(frozen=True)
class Plan:
    """A layout, and what it needs.

    Attributes:
        layout: how the model is laid out.
        memory: bytes on the device that needs most.
        sent: bytes that a device sends in a step.
        step_time_s: predicted.
        examples_per_s: likewise, over all devices.
        lacks_bytes: what is missing on a device; 0 where it fits.
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
    efficiency: float = timing.EFFICIENCY,
    headroom: float = HEADROOM,
    loss: str = "batch",
) -> list[Plan]:
    """Predicts what each layout of a model over devices needs, the quickest that fits first.

    Args:
        model: a `Transformer` (its sizes), or a functional Keras model, whose graph is traced but not run; along the
            tensor axis it is cut as `parallel.tensor` cuts it.
        devices: how many.
        batch: examples of a step, over all devices; None is 8 a device.
        memory: of a device, in bytes or as `"80GB"`; None is what `device` has.
        optimizer: one of `footprint.SLOTS`, or how many numbers it keeps for each parameter.
        precision: what a `Transformer` computes in (default `mixed_bfloat16`); a Keras model has its own.
        device: of `hardware.DEVICES`, or one of your own.
        per_host: devices of a host; the tensor axis stays within one.
        flops: operations a second of a device at most, in place of the table's.
        bandwidth: bytes a second between devices of a host, in place of the table's; `host_bandwidth` between hosts.
        efficiency: what share of `flops` is reached.
        headroom: the share of the memory that is left free.
        loss: when the loss is taken: see `Layout`.

    Returns:
        Those that fit, by time; then those that do not, by what they lack. Of layouts that differ only in how the
        batch is cut, the best.

    Raises:
        InputError: a setting has no meaning, or no layout divides the batch and the model.

    Example:
        >>> sizes = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
        >>> print(plan(sizes, 8, batch=64, memory="40GB")[0].layout)
        data 8, 8 accumulated
    """
    work = _workload(model, precision)
    _check(devices=devices, per_host=per_host, batch=1 if batch is None else batch)
    batch = 8 * devices if batch is None else batch
    _check_share(efficiency=efficiency, headroom=headroom)
    if loss not in layouts.LOSSES:
        Layout(loss=loss)  # says so
    found = _device(device, memory, flops, bandwidth, host_bandwidth)
    room = found.memory_bytes * (1 - headroom)
    settings = dict(batch=batch, slots=footprint.slots_of(optimizer), room=room, per_host=per_host)
    works = {size: work.along(size) for size in layouts.tensor_sizes(devices, per_host)}
    stages = {size: cut.most_stages for size, cut in works.items() if cut is not None}
    cuts, best = {}, {}
    for layout in layouts.candidates(devices, batch, stages=stages, loss=loss):
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
            f"No layout of {work.name!r} over {devices} devices divides a batch of {batch}. Take a batch that is a "
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
    efficiency: float = timing.EFFICIENCY,
    headroom: float = HEADROOM,
) -> Plan:
    """Predicts what one layout needs; arguments are those of `plan`.

    Raises:
        InputError: the layout's parts do not divide the batch, or its axes the model.

    Example:
        >>> sizes = Transformer(layers=24, hidden=2048, heads=16, sequence=1024, vocabulary=50257)
        >>> predict(sizes, Layout(data=8, zero=1), batch=64).fits
        True
    """
    work, found = _workload(model, precision), _device(device)
    _check(batch=batch, per_host=per_host)
    cut = work.along(layout.tensor)
    if cut is None:
        fit = "where `parallel.tensor` can cut a layer so" if work.cutter else f"that divides {work.heads}"
        raise InputError(f"{work.name!r} can be cut along a tensor axis {fit}. Received: {layout}.")
    if layout.pipeline > cut.most_stages:
        raise InputError(f"{work.name!r} can be cut into {cut.most_stages} stages at most. Received: {layout}.")
    if not _can_train(work, layout):
        raise InputError(f"`parallel.tensor` takes no model whose blocks are recomputed. Received: {layout}.")
    work = cut
    room = found.memory_bytes * (1 - headroom)
    settings = dict(batch=batch, slots=footprint.slots_of(optimizer), room=room, per_host=per_host)
    return _predicted(work, work.stages(layout.pipeline), layout, found, efficiency=efficiency, **settings)


def _can_train(work: Workload, layout: Layout) -> bool:
    """Whether there is a way to train so: a model of layers is not recomputed where they lie in parts."""
    return work.cutter is None or not (layout.recompute and layout.tensor > 1)


def _predicted(work, stages, layout, device, *, batch, slots, room, per_host, efficiency) -> Plan:
    memory = footprint.memory(work, stages, layout, batch=batch, slots=slots)
    bytes_sent = footprint.sent(work, stages, layout, batch=batch)
    seconds = timing.compute_s(work, stages, layout, device, batch=batch, efficiency=efficiency)
    seconds += timing.sending_s(layout, bytes_sent, device, per_host=per_host)
    return Plan(layout, memory, bytes_sent, seconds, batch / seconds, max(0.0, memory.peak - room))


def _order(one: Plan) -> tuple:
    """What fits before what does not; then the quicker, in three digits; then the plainer, and what needs less."""
    layout = one.layout
    plain = (layout.zero, layout.recompute, layout.pipeline, layout.tensor, layout.accumulate, layout.microbatches)
    return (one.lacks_bytes, float(f"{one.step_time_s:.3g}"), plain, one.memory.peak)


def _workload(model, precision: str | None) -> Workload:
    if isinstance(model, Transformer):
        return model.workload(precision or "mixed_bfloat16")
    if precision is not None:
        raise InputError(f"`precision` is for sizes: a model has its own. Received: precision={precision!r}.")
    if isinstance(model, Workload):
        return model
    from tfgpu.parallel.planning import traced  # starts TensorFlow

    return traced.workload(model)


def _device(device: str | Device, memory=None, flops=None, bandwidth=None, host_bandwidth=None) -> Device:
    found = device if isinstance(device, Device) else hardware.known(device)
    for name, value in {"flops": flops, "bandwidth": bandwidth, "host_bandwidth": host_bandwidth}.items():
        if value is not None and not value > 0:
            raise InputError(f"`{name}` must be above 0. Received: {value!r}.")
    if memory is not None:
        found = replace(found, memory_bytes=hardware.bytes_of(memory))
    if flops is not None:
        found = replace(found, flops=flops, flops_tf32=flops, flops_float32=flops)
    if bandwidth is not None:
        found = replace(found, bandwidth=bandwidth)
    return found if host_bandwidth is None else replace(found, host_bandwidth=host_bandwidth)


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if type(value) is not int or value < 1:
            raise InputError(f"`{name}` must be a whole number from 1. Received: {value!r}.")
        if value > _MOST:
            raise InputError(f"`{name}` must be {_MOST:,} at most. Received: {value:,}.")


def _check_share(efficiency: float, headroom: float) -> None:
    if not 0 < efficiency <= 1:
        raise InputError(f"`efficiency` must be above 0, and 1 at most. Received: {efficiency!r}. Try 0.5.")
    if not 0 <= headroom < 1:
        raise InputError(f"`headroom` must be from 0 to below 1. Received: {headroom!r}. Try 0.1.")
