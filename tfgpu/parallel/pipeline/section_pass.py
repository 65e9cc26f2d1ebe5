"""What forward and backward passes over a pipeline section share: micro-batches, tapes, and the order of cells."""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfgpu.compat.keras import StatelessScope
from tfgpu.parallel import device_placement, model_graph
from tfgpu.parallel.pipeline.micro_batches import MicroBatches, map_with_mask
from tfgpu.parallel.pipeline.schedule import Cell
from tfgpu.parallel.pipeline.sections import PipelineProgram, Section, has_batch_axis
from tfgpu.parallel.rematerialization import remat


class Recorded(NamedTuple):
    """A cell's forward pass on a gradient tape.

    Attributes:
        tape: the tape.
        inputs: the differentiable inputs, by the `id` of their symbolic tensors.
        outputs: the results that the cell passes on, likewise.
        losses: what the cell's layers added by `add_loss`.
    """

    tape: tf.GradientTape
    inputs: dict[int, tf.Tensor]
    outputs: dict[int, tf.Tensor]
    losses: list


class SectionPass:
    """One pass over the cells of a section. A cell is one stage's work on one micro-batch.

    Args:
        section: what runs.
        program: how it runs.
        operation_fn: as for `model_graph.run`.
        batch: the values of the section's inputs.
        is_backward: for the timestamps.
    """

    def __init__(
        self, section: Section, program: PipelineProgram, operation_fn: Callable, batch: list, *, is_backward: bool
    ):
        self.section, self.program, self.operation_fn = section, program, operation_fn
        self.micro_batches = MicroBatches(_count_rows(section, batch), program.microbatches)
        self.values = [self._slice(batch, micro) for micro in range(program.microbatches)]
        self.stamps: list[tf.Tensor] = []
        self._tapes: dict[tuple, Recorded] = {}
        self._last_results: dict[int, list] = {}  # by device
        self._is_backward = is_backward

    def _slice(self, batch: list, micro: int) -> dict[int, tf.Tensor]:
        found = {}
        for tensor, value in zip(self.section.inputs, batch, strict=True):
            is_split = has_batch_axis(tensor)
            found[id(tensor)] = (
                map_with_mask(value, lambda whole: self.micro_batches.slice(whole, micro)) if is_split else value
            )
        return found

    @contextlib.contextmanager
    def cell_scope(self, device: int, cell: Cell, values: dict) -> Iterator[None]:
        """Runs the block as a cell: on its stage's devices, on its rows, and after the last cell of the same device.

        Args:
            device: the number of the device.
            cell: what runs.
            values: those that the cell may take, for the timestamp.
        """
        placement = self.program.placements[cell.stage]
        with device_placement.scope(placement), self.micro_batches.row_scope(cell.micro):
            with tf.control_dependencies(self._start_after(device, cell, values)):
                yield

    def _start_after(self, device: int, cell: Cell, values: dict) -> list:
        last, clock = self._last_results.get(device, []), self.program.clock
        if not clock.is_on:
            return last
        edge = self.section.stage_outputs if cell.backward else self.section.stage_inputs
        inputs = [values[id(tensor)] for tensor in edge[cell.stage] if id(tensor) in values]
        with tf.control_dependencies(last):
            return [clock.stamp(inputs, cell, device, self._is_backward, False)]

    def end_cell(self, device: int, cell: Cell, results: list) -> None:
        """Makes the device's next cell wait for these results."""
        if self.program.clock.is_on:
            results = [self.program.clock.stamp(results, cell, device, self._is_backward, True)]
            self.stamps += results
        self._last_results[device] = results or self._last_results.get(device, [])

    def record(self, cell: Cell, scope: StatelessScope, known: dict) -> None:
        """Runs a cell's calls on its own gradient tape, and keeps the tape.

        Args:
            cell: what runs.
            scope: what the calls read variables from, and assign them in.
            known: the micro-batch's values.
        """
        values = {id(t): map_with_mask(known[id(t)], tf.identity) for t in self.section.stage_inputs[cell.stage]}
        inputs = {key: value for key, value in values.items() if remat.is_differentiable(value)}
        with tf.GradientTape() as tape:
            tape.watch(list(inputs.values()))
            with scope:
                model_graph.run(self.section.stages[cell.stage], values, self.operation_fn)
        outputs = {id(tensor): values[id(tensor)] for tensor in self.section.stage_outputs[cell.stage]}
        self._tapes[cell.stage, cell.micro] = Recorded(tape, inputs, outputs, scope.losses)
        self.values[cell.micro] |= outputs

    def take_recorded(self, cell: Cell) -> Recorded:
        """What `record` kept of a cell; it is kept no longer."""
        return self._tapes.pop((cell.stage, cell.micro))

    def results_of(self, cell: Cell) -> list:
        """The values that a cell passes on."""
        values = self.values[cell.micro]
        return [values[id(t)] for t in self.section.stage_outputs[cell.stage] if id(t) in values]


def _count_rows(section: Section, batch: list):
    """The rows of the batch: a number where it is static, else an int32 scalar."""
    value = next(value for value, tensor in zip(batch, section.inputs, strict=True) if has_batch_axis(tensor))
    return value.shape[0] if value.shape[0] is not None else tf.shape(value)[0]
