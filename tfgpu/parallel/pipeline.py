"""A model in stages on devices of their own, which work on parts of the batch at the same time.

The batch is cut into micro-batches by rows. While the second stage works on the first of them, the first stage works
on the second. The loss, the metrics and the update are those of the whole batch: see `keras_fixes/pipelining.py`.

A step's idle share is `(S - 1) / (M + S - 1)` with S stages that cost the same and M micro-batches (`schedule.bound`).
"""

from collections.abc import Iterable, Sequence

import keras
import tensorflow as tf

from tfgpu import environment, strategies
from tfgpu.errors import InputError, unknown
from tfgpu.keras_fixes import graphs, homes, pipelining, replica, sections
from tfgpu.parallel import balance, costs, placement
from tfgpu.parallel import schedule as schedules
from tfgpu.parallel.mesh import Mesh


def pipeline(
    model: keras.Model,
    stages: int,
    microbatches: int,
    *,
    schedule: str = "1f1b",
    recompute: bool = True,
    cuts: Sequence[str] | None = None,
    devices: int | str | Iterable[str] | None = None,
    mesh: Mesh | None = None,
    batch=None,
) -> keras.Model:
    """Cuts a model into stages, each on a device of its own, before it is compiled.

    Args:
        model: functional or Sequential, built. One that is too large for the first device is best made under
            `tf.device("CPU:0")`, outside of any strategy.
        stages: how many. A layer is in one stage, also where it is called several times.
        microbatches: how many parts the batch of each replica is cut into; they differ by one row at most. More of
            them leave the devices less idle, and each with less to compute at once.
        schedule: `"1f1b"`, `"gpipe"` or `"interleaved"` (several stages a device): see `schedule.training`.
        recompute: keep only what the stages hand on, and run the forward pass again for the gradient. Without, which
            `"gpipe"` alone can, all activations of all micro-batches are kept, and the forward pass runs once.
        cuts: names of the layers that begin the stages but the first; None measures the layers and makes the most
            expensive stage as cheap as can be.
        devices: how many, or their names; None takes the first GPUs, or logical CPU devices: one a stage, or for
            `"interleaved"` half as many as stages.
        mesh: devices with an axis `data` besides: several copies of the pipeline, each on its rows of the batch.
        batch: inputs to measure with, as the model takes them; None takes 8 rows of zeros.

    Returns:
        The same model, to be compiled and fitted. `evaluate` and `predict` run stage after stage on whole batches.

    Raises:
        InputError: the model has no graph, a layer would be in two stages, there are fewer places to cut at than cuts,
            no layer of a name, or a setting that does not fit the others; the message says which.

    Example:
        >>> layers = [keras.layers.Dense(8, name=f"dense_{at}") for at in range(4)]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = pipeline(model, stages=1, microbatches=2, devices="CPU:0")
        >>> model.compile("adam", "mse")

    Source: Huang et al., GPipe, 2019; Narayanan et al., Efficient large-scale language model training, 2021.
    """
    _check(stages=stages, microbatches=microbatches)
    _check_schedule(schedule, recompute)
    calls = graphs.calls(model)
    mesh = _mesh_of(mesh, devices, stages, schedule)
    rows = schedules.training(schedule, stages, microbatches, mesh.pipeline)
    begins = [0, *(_measured(model, calls, stages, batch) if cuts is None else _named(calls, cuts, stages))]
    stage_of = [sum(at >= begin for begin in begins) - 1 for at in range(len(calls))]
    _check_shared(calls, stage_of)
    parts = sections.parts_of(
        list(zip(calls, stage_of, strict=True)), graphs.functional(model).outputs, sections.mixes_rows
    )
    _settle(model, calls, stage_of, mesh)
    plan = sections.Plan(
        parts,
        tuple(_home(mesh, stage) for stage in range(stages)),
        microbatches,
        forward=_in_order(schedules.forward(stages, microbatches, mesh.pipeline)),
        again=_in_order(rows, backward_only=schedule == "gpipe"),
        recompute=recompute,
    )
    pipelining.install(model, plan)
    return model


def _check_schedule(schedule: str, recompute: bool) -> None:
    if schedule not in schedules.SCHEDULES:
        raise unknown("schedule", schedule, schedules.SCHEDULES)
    if not recompute and schedule != "gpipe":
        raise InputError(
            f"{schedule!r} runs each forward pass again: the loss of the whole batch comes before the first gradient. "
            "Leave recompute=True, or take schedule='gpipe'."
        )


def _check(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"`{name}` must be a whole number from 1. Received: {value!r}.")


def _mesh_of(mesh: Mesh | None, devices, stages: int, schedule: str) -> Mesh:
    if mesh is not None and devices is not None:
        raise InputError("Give `devices` or `mesh`, not both: a mesh has devices of its own.")
    wanted = -(-stages // 2) if schedule == "interleaved" else stages
    if mesh is None:
        chosen = environment.select(wanted if devices is None else devices)
        mesh = Mesh(pipeline=len(chosen), devices=tuple(device.name for device in chosen))
    elif mesh.devices is None:
        chosen = environment.accelerators()
        mesh = mesh.on(device.name for device in chosen[: mesh.size])
    if mesh.tensor > 1:
        raise InputError(f"A pipeline has no axis `tensor`. Received: {mesh}.")
    environment.select(mesh.devices)
    return mesh


def _measured(model: keras.Model, calls, stages: int, batch) -> list[int]:
    """Where the stages but the first begin: the most expensive stage is as cheap as can be."""
    if stages == 1:
        return []
    spans = _spans(calls)
    free = [at for at in range(1, len(calls)) if not any(first < at <= last for first, last in spans)]
    if stages - 1 > len(free):
        raise InputError(
            f"{model.name!r} can be cut at {len(free)} places, into {len(free) + 1} stages at most. Received: "
            f"stages={stages}. Take fewer, or give layers that are called several times a layer of their own each."
        )
    return balance.cut([cost.seconds for cost in costs.measure(model, batch)], stages, free)


def _named(calls, cuts: Sequence[str], stages: int) -> list[int]:
    names = [call.name for call in calls]
    missing = [name for name in cuts if name not in names]
    if missing:
        raise InputError(
            f"No layer is called {missing[0]!r}. A stage may begin at: {', '.join(dict.fromkeys(names[1:]))}."
        )
    begins = [names.index(name) for name in cuts]
    if len(begins) != stages - 1 or begins != sorted(set(begins)) or 0 in begins:
        raise InputError(
            f"{stages} stages need {stages - 1} `cuts`, in the order of the layers, after the first one. Received: "
            f"{list(cuts)}; the order is {', '.join(dict.fromkeys(names))}."
        )
    return begins


def _spans(calls) -> list[tuple[int, int]]:
    """From the first to the last call of each layer that is called several times."""
    places: dict[int, list[int]] = {}
    for at, call in enumerate(calls):
        if isinstance(call.operation, keras.layers.Layer):
            places.setdefault(id(call.operation), []).append(at)
    return [(found[0], found[-1]) for found in places.values()]


def _check_shared(calls, stage_of: Sequence[int]) -> None:
    for first, last in _spans(calls):
        if stage_of[first] != stage_of[last]:
            raise InputError(
                f"The layer {calls[first].name!r} is called in the stages {stage_of[first]} and {stage_of[last]}, but "
                "can be in one alone. Cut before its first or after its last call, or give each call its own layer."
            )


def _settle(model: keras.Model, calls, stage_of: Sequence[int], mesh: Mesh) -> None:
    stage_by_name = {call.name: stage for call, stage in zip(calls, stage_of, strict=True)}
    layers = graphs.layers_within(graphs.functional(model))
    places = {path: _home(mesh, stage_by_name.get(path.partition("/")[0], 0)) for path in layers}
    placement.settle(model, places, _strategy(model, mesh))


def _strategy(model: keras.Model, mesh: Mesh) -> tf.distribute.Strategy:
    """A strategy of as many replicas as the mesh has along `data`: the model's own where it fits."""
    placement.check_early(model)
    first = _home(mesh, 0)
    found = model.distribute_strategy
    if not replica.is_spread(found):
        return strategies.mirrored([mesh.device(data=at) for at in range(mesh.data)])
    if homes.home(found.extended.worker_devices) != first:
        raise InputError(
            f"The model was made for replicas on {', '.join(found.extended.worker_devices)}; the first stage is on "
            f"{', '.join(first.devices)}. Make it outside of any strategy."
        )
    return found


def _home(mesh: Mesh, stage: int) -> homes.Home:
    return homes.home(mesh.device(data=at, pipeline=stage % mesh.pipeline) for at in range(mesh.data))


def _in_order(rows, *, backward_only: bool = False) -> tuple:
    cells = ((one.device, one.cell) for one in schedules.timed(rows))
    return tuple((device, cell) for device, cell in cells if cell.backward or not backward_only)
