"""`parallel.picture`: a measured picture of a pipeline, of when each stage computed each micro-batch and waited."""

import math
import statistics
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import keras
import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from tfgpu import atomic
from tfgpu.core.state import training_state
from tfgpu.errors import InputError, whole_number
from tfgpu.parallel.pipeline import execution
from tfgpu.parallel.pipeline.schedule import Cell, bound
from tfgpu.parallel.pipeline.sections import PipelineProgram

KINDS = {
    "forward": ("#56b4e9", "black", ""),
    "forward again": ("#cce6f6", "black", "///"),
    "backward": ("#d55e00", "white", ""),
}
"""Face color, text color and hatch of each kind of cell, in colors that color-blind readers can tell apart."""

SUFFIXES = (".png", ".svg", ".html")
_MOST_NUMBERS, _EDGE = 600, "#7a8a94"


@dataclass(frozen=True)
class Measured:
    """A cell as it ran.

    Args:
        cell: stage, micro-batch, and whether it is a backward pass.
        device: the number of its device, from 0.
        again: whether it is a forward pass that is repeated for the gradient.
        start: seconds from the beginning of the step's first cell.
        end: likewise.
    """

    cell: Cell
    device: int
    again: bool
    start: float
    end: float

    @property
    def kind(self) -> str:
        return "backward" if self.cell.backward else "forward again" if self.again else "forward"


def picture(model: keras.Model, batch: Any, path: str | Path, *, steps: int = 3) -> list[Measured]:
    """Runs some training steps of a pipeline, draws the cells of one of them, and restores the model's state.

    Args:
        model: from `parallel.pipeline`, compiled.
        batch: inputs and targets as `train_on_batch` takes them: `(x, y)` or `(x, y, sample_weight)`.
        path: the file to write: `.png`, `.svg` or `.html` (one self-contained page).
        steps: how many steps to measure, after one that is not measured; the step of median length is drawn.

    Returns:
        The cells of that step, in the order of their starts; of several replicas, the first one's.

    Raises:
        InputError: the model is not a pipeline or not compiled, or `path` has another suffix.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)], name="sequential")
        >>> picture(model, (keras.ops.ones((4, 4)), keras.ops.ones((4, 8))), "schedule.png")
        Traceback (most recent call last):
        tfgpu.errors.InputError: 'sequential' is not a pipeline. Give a model that `parallel.pipeline` returned.
    """
    program, path = _program_of(model, path, steps), Path(path)
    runs = [_cells(events) for events in _events(model, program, batch, steps)]
    middle = statistics.median_low([max(one.end for one in cells) for cells in runs])
    cells = next(cells for cells in runs if max(one.end for one in cells) == middle)
    path.parent.mkdir(parents=True, exist_ok=True)
    _save(draw(cells, microbatches=program.microbatches), path)
    return cells


def idle(cells: list[Measured]) -> float:
    """The share of the devices' time, from the first cell to the last, in which they wait."""
    devices = len({one.device for one in cells})
    return 1 - sum(one.end - one.start for one in cells) / (devices * max(one.end for one in cells))


def draw(cells: list[Measured], *, microbatches: int) -> Figure:
    """Draws cells: time on the x-axis, one row for each device, micro-batches by number."""
    devices = sorted({one.device for one in cells})
    stages, end = 1 + max(one.cell.stage for one in cells), max(one.end for one in cells)
    scale, unit = (1e3, "ms") if end < 10 else (1, "s")
    figure = Figure(figsize=(10, 1.5 + 0.5 * len(devices)), layout="constrained")
    axis = figure.subplots()
    least = 0.009 * end if len(cells) <= _MOST_NUMBERS else math.inf  # the shortest cell with a number
    for one in cells:
        _draw_cell(axis, one, devices, scale, has_number=one.end - one.start > least)
    names = [", ".join(map(str, range(1 + at, 1 + stages, len(devices)))) for at in devices]
    axis.set_yticks(range(len(devices)), [f"stage {name}" if len(name) == 1 else f"stages {name}" for name in names])
    axis.set_xlim(0, end * scale)
    axis.set_ylim(len(devices) - 0.5, -0.5)
    axis.set_xlabel(f"time, {unit} (numbers: micro-batches)")
    axis.set_title(_title(cells, stages, microbatches, len(devices)), fontsize=11)
    kinds = [kind for kind in KINDS if any(one.kind == kind for one in cells)]
    looks = [Patch(facecolor=KINDS[kind][0], hatch=KINDS[kind][2], edgecolor=_EDGE) for kind in kinds]
    figure.legend(looks, kinds, loc="outside lower right", ncols=len(kinds), fontsize=8, frameon=False)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(axis="y", length=0)
    return figure


def _draw_cell(axis: Axes, one: Measured, devices: list[int], scale: float, *, has_number: bool) -> None:
    face, ink, hatch = KINDS[one.kind]
    begin, width, row = one.start * scale, (one.end - one.start) * scale, devices.index(one.device)
    axis.barh(row, width, 0.86, begin, color=face, edgecolor=_EDGE, linewidth=0.6, hatch=hatch)
    if has_number:
        number = str(one.cell.micro + 1) + "'" * (one.cell.stage // len(devices))
        axis.text(begin + width / 2, row, number, ha="center", va="center", color=ink, fontsize=8)


def _title(cells: list[Measured], stages: int, microbatches: int, devices: int) -> str:
    least = bound(devices, microbatches * (stages // devices))
    return (
        f"{stages} stages, {microbatches} micro-batches, {devices} devices: idle {idle(cells):.1%} of a step; "
        f"the bound is {least:.1%}"
    )


def _program_of(model: keras.Model, path, steps: int) -> PipelineProgram:
    program = execution.program_of(model)
    if program is None:
        raise InputError(f"{model.name!r} is not a pipeline. Give a model that `parallel.pipeline` returned.")
    if not getattr(model, "compiled", False):
        raise InputError("The model is not compiled, so it has no training step. Call `compile` first.")
    if Path(path).suffix not in SUFFIXES:
        raise InputError(f"`path` must end in {', '.join(SUFFIXES)}. Received: {str(path)!r}.")
    whole_number("steps", steps)
    return program


def _events(model: keras.Model, program: PipelineProgram, batch, steps: int) -> list[list[tuple]]:
    """What was noted in each step: (cell, device, again, whether it ended, seconds). The model stays as it was."""
    noted: list[tuple] = []
    found: list[list[tuple]] = []
    if not model.optimizer.built:  # its variables must be there, to be put back
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)
    before = training_state.copy_state(model, metrics=True)
    kept = model.train_function
    program.clock.note = lambda *event: noted.append(event)
    model.train_function = None
    try:
        for _ in range(steps + 1):
            noted.clear()
            model.train_on_batch(*batch)
            found.append(list(noted))
    finally:
        program.clock.note = None
        model.train_function = kept
        state = {name: value for name, value in before.items() if not name.startswith("metrics/")}
        training_state.restore_state(model, state, "the state before the picture")
        model.reset_metrics()  # those that the first step has made too
        training_state.restore_metrics(model, before)
    return found[1:]


def _cells(events: list[tuple]) -> list[Measured]:
    starts, found = {}, []
    origin = min(event[-1] for event in events)
    # By time; of one time, starts first.
    for cell, device, again, ended, seconds in sorted(events, key=lambda event: (event[-1], event[-2])):
        if not ended:
            starts.setdefault((cell, device, again), []).append(seconds - origin)
        else:
            found.append(Measured(cell, device, again, starts[cell, device, again].pop(0), seconds - origin))
    return sorted(found, key=lambda one: (one.start, one.device))


def _save(figure: Figure, path: Path) -> None:
    with matplotlib.rc_context({"svg.hashsalt": "tfgpu", "svg.fonttype": "none"}):
        if path.suffix == ".png":
            with atomic.replacing(path) as aside:
                figure.savefig(aside, dpi=110)
            return
        text = StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    drawing = text.getvalue()
    if path.suffix == ".html":
        page = drawing[drawing.index("<svg") :]
        drawing = f'<!doctype html><meta charset="utf-8"><title>Schedule</title>\n{page}\n'
    atomic.write_text(path, drawing)
