"""Assigns a model's calls to stages, and plans the order of its pipeline."""

from collections.abc import Sequence

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import balance, costs, model_graph
from tfgpu.parallel.pipeline import schedule as schedules
from tfgpu.parallel.pipeline import sections


def assign_stages(model: keras.Model, stages: int, cuts: Sequence[str] | None, batch) -> list[int]:
    """The stage of each of a model's calls, in their order.

    Args:
        model: as `model_graph.calls` takes it.
        stages: how many.
        cuts: names of the layers that begin the second and later stages; None measures the layers and balances them.
        batch: inputs to measure with; None uses 8 rows of zeros.

    Raises:
        InputError: an input has a fixed number of rows; there are fewer places to cut than cuts; no layer has a name of
            `cuts`; a layer would be in two stages.
    """
    for tensor in model_graph.functional(model).inputs:
        _check_input(tensor)
    calls = model_graph.calls(model)
    begins = [0, *(_balanced(model, calls, stages, batch) if cuts is None else _named(calls, cuts, stages))]
    found = [sum(at >= begin for begin in begins) - 1 for at in range(len(calls))]
    _check_shared(calls, found)
    return found


def make_program(
    model: keras.Model, stage_of, placements, devices: int, *, microbatches: int, schedule: str, recompute: bool, found
) -> sections.PipelineProgram:
    """How a staged model runs in training.

    Args:
        model: as `model_graph.calls` takes it.
        stage_of: the stage of each call, a number.
        placements: of each stage, a `DevicePlacement`.
        devices: how many the stages of one replica share.
        microbatches, schedule, recompute: as for `pipeline`.
        found: which calls need all rows, a `RowMixing`.

    Raises:
        InputError: a stage returns a tensor without a batch axis, or with other rows than the batch; or the schedule
            does not fit the stages.
    """
    order = schedules.training(schedule, len(placements), microbatches, devices)
    staged = list(zip(model_graph.calls(model), stage_of, strict=True))

    def needs_whole_batch(call) -> bool:
        return sections.is_known_to_mix_rows(call) or id(call.node) in found.mixing

    split = sections.split_into_sections(staged, model_graph.functional(model).outputs, needs_whole_batch)
    _check_rows(split, found.other_rows)
    return sections.PipelineProgram(
        split,
        tuple(placements),
        microbatches,
        forward_order=_in_order(schedules.forward(len(placements), microbatches, devices)),
        backward_order=_in_order(order, backward_only=schedule == "gpipe"),
        recompute=recompute,
    )


def check_schedule(schedule: str, recompute: bool, stages: int, microbatches: int, devices: int) -> None:
    """Refuses a schedule that does not exist, or does not fit the other settings.

    Raises:
        InputError: as described.
    """
    schedules.training(schedule, stages, microbatches, devices)
    if not recompute and schedule != "gpipe":
        raise InputError(
            f"{schedule!r} runs each forward pass again, because the loss of the whole batch comes before the first "
            "gradient. Use recompute=True, or schedule='gpipe'."
        )


def _check_input(tensor) -> None:
    if tensor.sparse or tensor.ragged:
        raise InputError(
            f"The input {tensor.name!r} is sparse or ragged, and a pipeline splits batches by rows. Make it dense "
            "before the model, or use `parallel.place`."
        )
    if not sections.has_batch_axis(tensor):
        raise InputError(
            f"The input {tensor.name!r} has the shape {tuple(tensor.shape)}, and a pipeline splits batches by rows. "
            "Make it without `batch_size`, so that the first axis is of any size."
        )


def _check_rows(split: Sequence[sections.Section], other_rows: frozenset[int]) -> None:
    for section in split:
        for tensor in (*section.inputs, *section.outputs):
            if id(tensor) in other_rows and section.takes_micro_batches:
                raise InputError(
                    f"{tensor.name!r} of shape {tuple(tensor.shape)} has another number of rows than the batch, and "
                    "is an output of the model or an input of a layer that needs all rows. Make each row an example, "
                    "or use `parallel.place`."
                )


def _balanced(model: keras.Model, calls, stages: int, batch) -> list[int]:
    """Where the second and later stages begin, so that the most expensive stage is as cheap as possible."""
    if stages == 1:
        return []
    spans = _spans(calls)
    free = [at for at in range(1, len(calls)) if not any(first < at <= last for first, last in spans)]
    if stages - 1 > len(free):
        raise InputError(
            f"{model.name!r} can be cut at {len(free)} places, into {len(free) + 1} stages at most. Received: "
            f"stages={stages}. Use fewer stages, or give each call of a shared layer its own layer."
        )
    return balance.cut([cost.seconds for cost in costs.measure(model, batch)], stages, free)


def _named(calls, cuts: Sequence[str], stages: int) -> list[int]:
    names = [call.name for call in calls]
    missing = [name for name in cuts if name not in names]
    if missing:
        raise InputError(
            f"No layer is called {missing[0]!r}. A stage can begin at: {', '.join(dict.fromkeys(names[1:]))}."
        )
    begins = [names.index(name) for name in cuts]
    if len(begins) != stages - 1 or begins != sorted(set(begins)) or 0 in begins:
        raise InputError(
            f"{stages} stages need {stages - 1} `cuts`, in the order of the layers, after the first one. Received: "
            f"{list(cuts)}; the order is {', '.join(dict.fromkeys(names))}."
        )
    return begins


def _spans(calls) -> list[tuple[int, int]]:
    """The first and the last call of each layer, but for tables: a lookup keeps no state, and costs next to nothing.

    So a table that computes the logits as well lies where these are computed, and looks up ids for the first stage.
    """
    places: dict[int, list[int]] = {}
    for at, call in enumerate(calls):
        for layer in call.layers:
            if not isinstance(layer, keras.layers.Embedding):
                places.setdefault(id(layer), []).append(at)
    return [(found[0], found[-1]) for found in places.values()]


def _check_shared(calls, stage_of: Sequence[int]) -> None:
    for first, last in _spans(calls):
        if stage_of[first] != stage_of[last]:
            raise InputError(
                f"The layer {calls[first].name!r} is called in the stages {stage_of[first]} and {stage_of[last]}, but "
                "must be in one. Cut before its first or after its last call, or give each call its own layer."
            )


def _in_order(rows, *, backward_only: bool = False) -> tuple:
    cells = ((one.device, one.cell) for one in schedules.timed(rows))
    return tuple((device, cell) for device, cell in cells if cell.backward or not backward_only)
