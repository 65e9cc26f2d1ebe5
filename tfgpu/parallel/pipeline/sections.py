"""What a model in stages is cut into: sections that go through their stages, and layers that see the whole batch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, model_graph
from tfgpu.parallel.pipeline.cell_times import CellClock


@dataclass(frozen=True)
class Section:
    """Calls that follow each other: one that sees the whole batch, or a section of stages.

    Attributes:
        stages: the calls of each stage that it has, by the stage's number.
        whole: it sees the whole batch.
        takes: symbolic tensors from before, and `gives`, those that are needed after it.
    """

    stages: dict[int, tuple[model_graph.Call, ...]]
    whole: bool
    takes: tuple = field(default=(), repr=False)
    gives: tuple = field(default=(), repr=False)


@dataclass(frozen=True)
class PipelineProgram:
    """How a model is to be run.

    Attributes:
        parts: in order.
        homes: of each stage.
        microbatches: how many.
        forward: the cells (`parallel.schedule.Cell`) in the order in which they are made, each after the number of
            its device: forward passes alone.
        again: the same for the gradient; where it has no forward passes, what stages hand on is kept for it.
        recompute: a backward pass runs its forward pass anew; else all that the first pass has made is kept.
        watch: takes the times of cells, where someone looks on.
    """

    parts: tuple[Section, ...]
    homes: tuple[device_placement.DevicePlacement, ...]
    microbatches: int
    forward: tuple[tuple, ...]
    again: tuple[tuple, ...]
    recompute: bool = True
    watch: CellClock = field(default_factory=CellClock, repr=False, compare=False)

    @property
    def keeps(self) -> bool:
        """Whether what the stages hand on in the first pass is kept."""
        return all(cell.backward for _, cell in self.again)


def split_into_sections(
    calls: Sequence[tuple[model_graph.Call, int]], outputs: Sequence, mixes: Callable
) -> tuple[Section, ...]:
    """Groups calls into sections and what stands between them.

    Args:
        calls: each with its stage.
        outputs: symbolic tensors that the model returns.
        mixes: whether a call must see the whole batch.

    Raises:
        InputError: what a stage hands on has no axis of rows.
    """
    groups: list[tuple[bool, list]] = []
    for call, stage in calls:
        whole = mixes(call)
        if whole or not groups or groups[-1][0]:
            groups.append((whole, []))
        groups[-1][1].append((call, stage))
    found, later = [], {id(tensor) for tensor in outputs}
    for whole, members in reversed(groups):
        made = {id(tensor): tensor for call, _ in members for tensor in call.makes}
        needed = {id(tensor): tensor for call, _ in members for tensor in call.needs if id(tensor) not in made}
        stages: dict[int, list] = {}
        for call, stage in members:
            stages.setdefault(stage, []).append(call)
        gives = tuple(tensor for key, tensor in made.items() if key in later)
        ordered = {stage: tuple(stages[stage]) for stage in sorted(stages)}
        found.append(Section(ordered, whole, tuple(needed.values()), gives))
        later |= set(needed)
    for part in found:
        if not part.whole and len(part.stages) > 1:
            _check_rows(part)
    return tuple(reversed(found))


def _check_rows(part: Section) -> None:
    needed = {id(tensor) for calls in part.stages.values() for call in calls for tensor in call.needs}
    given = {id(tensor) for tensor in part.gives}
    for calls in part.stages.values():
        for call in calls:
            if not all(has_batch_axis(tensor) for tensor in call.makes if id(tensor) in needed or id(tensor) in given):
                raise InputError(
                    f"{call.name!r} makes {[tuple(t.shape) for t in call.makes]}, without an axis of rows, which "
                    "cannot be cut into micro-batches. Let the first axis be the batch's, of any size, or take `place`."
                )


WHOLE_BATCH = (
    keras.layers.BatchNormalization,
    keras.layers.MixUp,
    keras.layers.CutMix,
    keras.layers.RandomElasticTransform,
    keras.layers.Equalization,
    keras.layers.RandAugment,
    keras.layers.AugMix,
    keras.layers.SpectralNormalization,
)
"""Layers whose result for a row depends on the others, or that assign a weight that learns."""


def mixes_rows(call: model_graph.Call) -> bool:
    """Whether a call, or a layer within, needs all rows of the batch."""
    each = (one for layer in call.layers for one in (layer, *model_graph.layers_within(layer).values()))
    return any(isinstance(one, WHOLE_BATCH) for one in each)


def has_batch_axis(tensor) -> bool:
    """Whether a symbolic tensor has a row for each example."""
    return len(tensor.shape) > 0 and tensor.shape[0] is None
