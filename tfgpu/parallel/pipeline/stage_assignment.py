"""A model's stages: where it is cut, and in which order its cells run."""

from collections.abc import Sequence

import keras

from tfgpu.errors import InputError, unknown
from tfgpu.parallel import balance, costs, device_placement, model_graph
from tfgpu.parallel.pipeline import row_mixing, sections
from tfgpu.parallel.pipeline import schedule as schedules


def assign_stages(model: keras.Model, stages: int, cuts: Sequence[str] | None, batch) -> list[int]:
    """The stage of each of a model's calls, in their order.

    Args:
        model: as `graphs.calls` takes it.
        stages: how many.
        cuts: names of the layers that begin the stages but the first; None measures the layers.
        batch: inputs to measure with; None takes 8 rows of zeros.

    Raises:
        InputError: an input has a fixed number of rows, there are fewer places to cut at than cuts, no layer of a
            name, or a layer would be in two stages.
    """
    for tensor in model_graph.functional(model).inputs:
        if tensor.sparse or tensor.ragged:
            raise InputError(
                f"The input {tensor.name!r} is sparse or ragged, and a pipeline cuts batches by rows. Make it dense "
                "before the model, or take `parallel.place`."
            )
        if not sections.has_batch_axis(tensor):
            raise InputError(
                f"The input {tensor.name!r} has the shape {tuple(tensor.shape)}, and a pipeline cuts batches by rows. "
                "Make it without `batch_size`, so that the first axis is of any size."
            )
    calls = model_graph.calls(model)
    begins = [0, *(_measured(model, calls, stages, batch) if cuts is None else _named(calls, cuts, stages))]
    found = [sum(at >= begin for begin in begins) - 1 for at in range(len(calls))]
    _check_shared(calls, found)
    return found


def make_program(
    model: keras.Model,
    stage_of: Sequence[int],
    places: Sequence[device_placement.DevicePlacement],
    devices: int,
    microbatches: int,
    schedule: str,
    recompute: bool,
    found: row_mixing.RowMixing,
) -> sections.PipelineProgram:
    """How a model in stages is to be run.

    Args:
        model: as `graphs.calls` takes it.
        stage_of: the stage of each call.
        places: the home of each stage.
        devices: how many the stages of one replica share.
        microbatches, schedule, recompute: as for `pipeline`.
        found: which calls need all rows.

    Raises:
        InputError: what a stage hands on has no axis of rows, or other rows than the batch; or the schedule does not
            fit.
    """
    order = schedules.training(schedule, len(places), microbatches, devices)
    placed = list(zip(model_graph.calls(model), stage_of, strict=True))

    def mixes(call) -> bool:
        return sections.mixes_rows(call) or id(call.node) in found.mixed

    parts = sections.split_into_sections(placed, model_graph.functional(model).outputs, mixes)
    _check_folded(parts, found.folded)
    return sections.PipelineProgram(
        parts,
        tuple(places),
        microbatches,
        forward=_in_order(schedules.forward(len(places), microbatches, devices)),
        again=_in_order(order, backward_only=schedule == "gpipe"),
        recompute=recompute,
    )


def _check_folded(parts: Sequence[sections.Section], folded: frozenset[int]) -> None:
    for part in parts:
        for tensor in (*part.takes, *part.gives):
            if id(tensor) in folded and not part.whole and len(part.stages) > 1:
                raise InputError(
                    f"{tensor.name!r} of the shape {tuple(tensor.shape)} has other rows than the batch, and is the "
                    "model's output or meets a layer that needs all rows. Let a row be an example there, or take "
                    "`place`."
                )


def check_schedule(schedule: str, recompute: bool, stages: int, microbatches: int, devices: int) -> None:
    """Refuses what no schedule can do.

    Raises:
        InputError: as said.
    """
    if schedule not in schedules.SCHEDULES:
        raise unknown("schedule", schedule, schedules.SCHEDULES)
    if not recompute and schedule != "gpipe":
        raise InputError(
            f"{schedule!r} runs each forward pass again: the loss of the whole batch comes before the first gradient. "
            "Leave recompute=True, or take schedule='gpipe'."
        )
    schedules.training(schedule, stages, microbatches, devices)


def check_counts(**counts: int) -> None:
    """Refuses what is no whole number from 1.

    Raises:
        InputError: as said.
    """
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(f"`{name}` must be a whole number from 1. Received: {value!r}.")


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
        for layer in call.layers:
            places.setdefault(id(layer), []).append(at)
    return [(found[0], found[-1]) for found in places.values()]


def _check_shared(calls, stage_of: Sequence[int]) -> None:
    for first, last in _spans(calls):
        if stage_of[first] != stage_of[last]:
            raise InputError(
                f"The layer {calls[first].name!r} is called in the stages {stage_of[first]} and {stage_of[last]}, but "
                "can be in one alone. Cut before its first or after its last call, or give each call its own layer."
            )


def _in_order(rows, *, backward_only: bool = False) -> tuple:
    cells = ((one.device, one.cell) for one in schedules.timed(rows))
    return tuple((device, cell) for device, cell in cells if cell.backward or not backward_only)
