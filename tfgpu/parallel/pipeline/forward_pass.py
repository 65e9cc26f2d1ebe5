"""The forward pass over a pipeline section: results, added losses and state changes of the whole batch."""

import tensorflow as tf

from tfgpu.compat.keras import get_mask
from tfgpu.core import logits
from tfgpu.core.state import layer_state
from tfgpu.parallel import device_placement, model_graph
from tfgpu.parallel.pipeline import cell_times
from tfgpu.parallel.pipeline.schedule import Cell
from tfgpu.parallel.pipeline.section_pass import SectionPass
from tfgpu.parallel.rematerialization import remat


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
        return cell_times.after(self.stamps, [*outputs, *self._losses(), *found_logits])

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
