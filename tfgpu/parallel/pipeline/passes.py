"""The forward and the backward pass over a pipeline section, by micro-batches.

The forward pass gives results, added losses and state changes of the whole batch; the backward pass the gradients of
the section's inputs and of the variables that it reads.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import tensorflow as tf

from tfgpu.compat.keras import StatelessScope, get_mask
from tfgpu.core import logits
from tfgpu.core.sparse import merging
from tfgpu.core.state import layer_state
from tfgpu.parallel import device_placement, model_graph
from tfgpu.parallel.pipeline.micro_batches import MicroBatches, map_with_mask
from tfgpu.parallel.pipeline.schedule import Cell
from tfgpu.parallel.pipeline.sections import PipelineProgram, Section, after, has_batch_axis
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
            if has_batch_axis(tensor):
                value = map_with_mask(value, lambda whole: self.micro_batches.slice(whole, micro))
            found[id(tensor)] = value
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


class ForwardPass(SectionPass):
    """The first pass; the backward pass reads from it what it needs.

    Attributes:
        logits_kinds: by the `id` of an output whose logits are known, how Keras finds them (see `core.logits`).
    """

    def __init__(self, section, program, operation_fn, batch: list):
        super().__init__(section, program, operation_fn, batch, is_backward=False)
        self.logits_kinds: dict[int, str] = {}
        self.scopes: dict[tuple[int, int], remat.RecordingScope] = {}

    def run(self) -> None:
        for device, cell in self.program.forward_order:
            if cell.stage in self.section.stages:
                self._run_cell(device, cell)

    def _run_cell(self, device: int, cell: Cell) -> None:
        values = self.values[cell.micro]
        with self.cell_scope(device, cell, values):
            scope = _CellScope(self.assigned_before(cell))
            if self.program.recompute:
                with scope:
                    model_graph.run(self.section.stages[cell.stage], values, self.operation_fn)
            else:
                self.record(cell, scope, values)
            self.scopes[cell.stage, cell.micro] = scope
            self.end_cell(device, cell, self.results_of(cell))

    def assigned_before(self, cell: Cell) -> dict[int, tf.Tensor]:
        """What earlier stages assigned on the cell's micro-batch, such as Keras's global seed: by the variable's id."""
        earlier = (self.scopes[stage, cell.micro] for stage in self.section.stages if stage < cell.stage)
        return {id(variable): value for scope in earlier for variable, value in scope.assigned}

    def results(self) -> list:
        """The section's outputs, then the losses that its layers add, then the outputs' logits: see `split`."""
        outputs, found_logits = [], []
        for tensor in self.section.outputs:
            pieces = [values[id(tensor)] for values in self.values]
            known = logits.find_all(pieces)
            with device_placement.scope(self.program.placements[self._stage_of(tensor)]):
                outputs.append(self.micro_batches.concat(pieces))
                if known is not None:
                    found_logits.append(self.micro_batches.concat(known[0]))
                    self.logits_kinds[id(tensor)] = known[1]
        return after(self.stamps, [*outputs, *self._losses(), *found_logits])

    def split(self, results) -> tuple[list, list, list]:
        """Divides `results`, or their gradients, into those of outputs, of losses and of logits."""
        begin, end = len(self.section.outputs), len(results) - len(self.logits_kinds)
        return results[:begin], results[begin:end], results[end:]

    def losses_of(self, stage: int, micro: int) -> list:
        return self.scopes[stage, micro].losses

    def _losses(self) -> list[tf.Tensor]:
        """Each added loss as the mean over the batch: micro-batches count by their rows."""
        found = []
        for stage in self.section.stages:
            each = [self.losses_of(stage, micro) for micro in range(self.program.microbatches)]
            for column in zip(*each, strict=True):
                weighed = [loss * self.micro_batches.fraction(m, loss.dtype) for m, loss in enumerate(column)]
                found.append(tf.add_n(weighed))
        return found

    def _stage_of(self, tensor) -> int:
        return next(stage for stage, made in self.section.stage_outputs.items() if any(t is tensor for t in made))

    def mask_of(self, tensor) -> tf.Tensor | None:
        """The Keras mask of an output for the whole batch, or None."""
        masks = [get_mask(values[id(tensor)]) for values in self.values]
        return None if masks[0] is None else self.micro_batches.concat(masks)

    def assign_state(self) -> None:
        """Assigns to the variables what the cells assigned, combined over micro-batches and replicas."""
        for stage in self.section.stages:
            scopes = [self.scopes[stage, micro] for micro in range(self.program.microbatches)]
            latest = [{id(variable): (variable, value) for variable, value in scope.assigned} for scope in scopes]
            before = {id(variable): value for variable, value in scopes[0].found}
            for key, (variable, _) in latest[0].items():
                values = [assigned[key][1] for assigned in latest]
                layer_state.put(variable, self._combined(variable, values, before.get(key)))

    def _combined(self, variable, values: list, before):
        """One value of a variable, the same on all replicas, from one value per micro-batch.

        If all micro-batches agree, it is that value; otherwise the rule of `core.state.layer_state` applies.
        """
        if variable.aggregation == "sum" and before is not None:  # the other replicas' are in what was added already
            added = [value - before for value in values]
            if variable.synchronization == "on_read":  # as metrics': replicas keep their own, which counts all rows
                added = [self.micro_batches.zero_if_empty(micro, value) for micro, value in enumerate(added)]
            return before + tf.add_n(added)
        if not tf.as_dtype(variable.dtype).is_floating:
            return layer_state.agreed(variable, values[0])
        weighed = [value * self.micro_batches.fraction(micro, value.dtype) for micro, value in enumerate(values)]
        return layer_state.agreed(variable, tf.add_n(weighed))


class _CellScope(remat.RecordingScope):
    """What one cell assigns. Replicas agree later, once all micro-batches are there."""

    def agreed(self, variable, value):
        return value


class BackwardPass(SectionPass):
    """Runs the cells of the gradient, after the forward pass.

    Args:
        first: the forward pass.
        batch: copies of the section's inputs.
        upstream: the gradient of each of `first.results()`, or None.
        variables: those whose gradients are asked for.
    """

    def __init__(self, first: ForwardPass, batch: list, upstream, variables):
        super().__init__(first.section, first.program, first.operation_fn, batch, is_backward=True)
        self._first, self._variables = first, list(variables)
        of_outputs, of_losses, of_logits = first.split(upstream)
        self._of_outputs = self._by_micro_batch(map(id, self.section.outputs), of_outputs)
        self._of_logits = self._by_micro_batch(first.logits_kinds, of_logits)
        self._of_losses = self._by_stage(of_losses)
        self._gradients: list[dict] = [{} for _ in range(self.program.microbatches)]
        self._variable_gradients: list = [None] * len(self._variables)

    def _by_micro_batch(self, keys, upstream) -> list[dict[int, tf.Tensor]]:
        known = [(key, value) for key, value in zip(keys, upstream, strict=True) if value is not None]
        return [
            {key: self.micro_batches.slice_gradient(value, micro) for key, value in known}
            for micro in range(self.program.microbatches)
        ]

    def _by_stage(self, of_losses) -> dict[int, list]:
        left = iter(of_losses)
        return {stage: [next(left) for _ in self._first.losses_of(stage, 0)] for stage in self.section.stages}

    def run(self, positions: list[int]):
        """The gradients of the inputs at these positions and, if there are variables, of the variables."""
        for device, cell in self.program.backward_order:
            if cell.stage not in self.section.stages:
                continue
            if self.program.recompute and (self.program.keeps_boundaries or not cell.backward):
                self._run_forward_again(device, cell._replace(backward=False))
            if cell.backward:
                self._run_cell(device, cell)
        inputs = [self._input_gradient(self.section.inputs[at]) for at in positions]
        if not self._variables:
            return after(self.stamps, inputs)
        return inputs, after(self.stamps, [self._total(gradient) for gradient in self._variable_gradients])

    def _total(self, gradient):
        """A variable's gradient of the whole batch."""
        return merging.of_parts(*zip(*gradient, strict=True)) if isinstance(gradient, list) else gradient

    def _run_forward_again(self, device: int, cell: Cell) -> None:
        first, values, keeps = self._first, self.values[cell.micro], self.program.keeps_boundaries
        known = first.values[cell.micro] | values if keeps else values
        with self.cell_scope(device, cell, known):
            scope = remat.ReplayScope(first.scopes[cell.stage, cell.micro], first.assigned_before(cell))
            self.record(cell, scope, known)
            if self.program.clock.is_on or not keeps:
                self.end_cell(device, cell, self.results_of(cell))

    def _run_cell(self, device: int, cell: Cell) -> None:
        arrived = self._gradients[cell.micro] | self._of_outputs[cell.micro]
        with self.cell_scope(device, cell, arrived):
            recorded = (self if self.program.recompute else self._first).take_recorded(cell)
            targets, upstream = self._targets(cell, recorded)
            self.end_cell(device, cell, self._add_gradients(cell, recorded, targets, upstream) if targets else [])

    def _targets(self, cell: Cell, recorded: Recorded) -> tuple[list, list]:
        """What a cell is differentiated by, with the gradient of each: its losses, its outputs, and their logits."""
        gradients, micro = self._gradients[cell.micro], cell.micro
        targets = list(recorded.losses)
        upstream = [value * self.micro_batches.fraction(micro, value.dtype) for value in self._of_losses[cell.stage]]
        for key, value in recorded.outputs.items():
            found = [g for g in (gradients.pop(key, None), self._of_outputs[micro].get(key)) if g is not None]
            if found and remat.is_differentiable(value):
                targets.append(value)
                upstream.append(tf.add_n(found) if len(found) > 1 else found[0])
            if key in self._of_logits[micro]:
                targets.append(logits.find(value).tensor)
                upstream.append(self._of_logits[micro][key])
        return targets, upstream

    def _add_gradients(self, cell: Cell, recorded: Recorded, targets: list, upstream: list) -> list:
        """Adds a cell's gradients to those of its inputs and of the variables; returns the sums that it changed."""
        sources = [*recorded.inputs.values(), *self._variables]
        found = recorded.tape.gradient(targets, sources, output_gradients=upstream)
        of_inputs, of_variables = found[: len(recorded.inputs)], found[len(recorded.inputs) :]
        gradients = self._gradients[cell.micro]
        for key, gradient in zip(recorded.inputs, of_inputs, strict=True):
            if gradient is not None:
                gradients[key] = gradients[key] + gradient if key in gradients else tf.convert_to_tensor(gradient)
        changed = [at for at, gradient in enumerate(of_variables) if gradient is not None]
        rows = self.micro_batches.bounds(cell.micro)[1]
        for at in changed:
            self._variable_gradients[at] = _plus(self._variable_gradients[at], of_variables[at], rows)
        sums = [gradients[key] for key in recorded.inputs if key in gradients]
        return sums + [_latest(self._variable_gradients[at]) for at in changed]

    def _input_gradient(self, tensor):
        """The gradient of one of the section's inputs for the whole batch."""
        found = [gradients.get(id(tensor)) for gradients in self._gradients]
        if not has_batch_axis(tensor):
            known = [gradient for gradient in found if gradient is not None]
            return tf.add_n(known) if known else None
        like = [values[id(tensor)] for values in self.values]
        pieces = [tf.zeros_like(v) if g is None else g for g, v in zip(found, like, strict=True)]
        return self.micro_batches.concat(pieces)


def _plus(total, gradient, rows):
    """A running sum, so that the gradients of all micro-batches need not be kept until the last; slices are listed.

    A table that one stage looks up and another multiplies with (tied embeddings) has slices and whole gradients, whose
    sum is whole, as on one device.

    Args:
        total: the sum so far; or a list of slices, each with the rows of its micro-batch; or None.
        gradient: of a micro-batch.
        rows: of that micro-batch.
    """
    if isinstance(gradient, tf.IndexedSlices) and (total is None or isinstance(total, list)):
        return [*(total or []), (gradient, rows)]
    if isinstance(total, list):
        total = tf.add_n([tf.convert_to_tensor(slices) for slices, _ in total])
    return gradient if total is None else total + tf.convert_to_tensor(gradient)


def _latest(total) -> tf.Tensor:
    return total[-1][0].values if isinstance(total, list) else total
