"""The backward pass over a pipeline section: the gradients of its inputs and of the variables that it reads."""

import tensorflow as tf

from tfgpu.core import logits
from tfgpu.core.sparse import merging
from tfgpu.parallel.pipeline import cell_times
from tfgpu.parallel.pipeline.forward_pass import ForwardPass
from tfgpu.parallel.pipeline.schedule import Cell
from tfgpu.parallel.pipeline.section_pass import Recorded, SectionPass
from tfgpu.parallel.pipeline.sections import has_batch_axis
from tfgpu.parallel.rematerialization import remat


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
            return cell_times.after(self.stamps, inputs)
        return inputs, cell_times.after(self.stamps, [self._total(gradient) for gradient in self._variable_gradients])

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
