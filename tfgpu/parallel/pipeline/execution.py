"""A functional model's training step in stages and micro-batches, inside of the model's own `call`.

The model is called on the whole batch, as ever, and returns the whole batch's outputs: so the loss, its divisors,
sample weights, metrics and the optimizer are Keras's own, on the whole batch. Within the call, runs of layers
("sections") go through their stages micro-batch by micro-batch, and their gradient does the same the other way, in the
order of a schedule. Layers that mix the rows of a batch (BatchNormalization) stand between the sections and see all
rows.

The second forward pass, which the gradient needs, equals the first: see `remat`, whose scopes these are.
"""

import contextlib
import copy
from collections.abc import Callable

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from tensorflow.python.eager import record

from tfgpu.core import collectives, layer_state, logits, replication
from tfgpu.parallel import device_placement, model_graph
from tfgpu.parallel.pipeline import cell_times, sections
from tfgpu.parallel.pipeline.micro_batches import MicroBatches
from tfgpu.parallel.rematerialization import remat


def install(model: keras.Model, plan: sections.PipelineProgram) -> None:
    """Lets a functional model train by a plan. What runs without `training=True`, or in no replica, runs as it did."""

    def run(values: dict, operation_fn: Callable) -> None:
        in_parts = replication.replica_context() is not None  # elsewhere no draw knows which rows it is for
        for part in plan.parts:
            if part.whole or len(part.stages) == 1 or not in_parts:
                for calls in part.stages.values():
                    model_graph.run(calls, values, operation_fn)
            else:
                _Section(part, plan, operation_fn).run(values)

    model_graph.override_run(model, run, "pipeline")
    object.__setattr__(model_graph.functional(model), "tfgpu_plan", plan)


def program_of(model: keras.Model) -> sections.PipelineProgram | None:
    """The plan that `install` gave a model, if it did."""
    return getattr(model_graph.functional(model), "tfgpu_plan", None) if model_graph.is_functional(model) else None


class _Section:
    """One training step's way through a section."""

    def __init__(self, part: sections.Section, plan: sections.PipelineProgram, operation_fn: Callable):
        self._part, self._plan, self._operation_fn = part, plan, operation_fn
        self._around = {name: copy.copy(global_state.get_global_attribute(name)) for name in remat.CALL_STATE}
        self._takes = {stage: self._crossing(stage) for stage in part.stages}
        self._gives = {stage: self._leaving(stage) for stage in part.stages}

    def run(self, values: dict) -> None:
        """Puts what the section gives among the values."""
        batch = [values[id(tensor)] for tensor in self._part.takes]
        places = [at for at, value in enumerate(batch) if remat.is_differentiable(value)]
        made = {}

        @tf.custom_gradient
        def block(*given):
            # TensorFlow's own tape has no use for what is recorded here: the block's gradient takes its place.
            with record.stop_recording() if self._plan.recompute else contextlib.nullcontext():
                first = made["first"] = _Pass(self, self._filled(batch, places, given))
                first.forward(self._plan.forward)

            def gradient(*upstream, variables=()):
                arrived = tf.nest.flatten(upstream, expand_composites=True)
                with remat.call_state_restored(self._around), tf.control_dependencies(arrived):
                    copies = [tf.identity(value) for value in given]
                    second = _Pass(self, self._filled(batch, places, copies), first, upstream, variables)
                    return second.back(self._plan.again, places)

            return first.results(), gradient

        found = block(*(batch[at] for at in places))
        first, count = made["first"], len(self._part.gives)
        behind = iter(found[len(found) - len(first.behind) :])
        for at, tensor in enumerate(self._part.gives):
            kind = first.behind.get(id(tensor))
            values[id(tensor)] = found[at] if kind is None else logits.Behind(next(behind), kind).put(found[at])
            if first.mask_of(tensor) is not None:
                backend.set_keras_mask(values[id(tensor)], first.mask_of(tensor))
        for loss in found[count : len(found) - len(first.behind)]:
            self._owner().add_loss(loss)
        first.assign()

    def _owner(self) -> keras.layers.Layer:
        """A layer that can hold what the section's layers add by `add_loss`."""
        return model_graph.loss_owner(
            layer for calls in self._part.stages.values() for c in calls for layer in c.layers
        )

    def _filled(self, batch: list, places: list[int], given) -> list:
        whole = list(batch)
        for at, value in zip(places, given, strict=True):
            mask = backend.get_keras_mask(batch[at])
            whole[at] = value
            if mask is not None:
                backend.set_keras_mask(value, mask)
        return whole

    def _crossing(self, stage: int) -> tuple:
        own = {id(tensor) for call in self._part.stages[stage] for tensor in call.makes}
        needed = {id(t): t for call in self._part.stages[stage] for t in call.needs if id(t) not in own}
        return tuple(needed.values())

    def _leaving(self, stage: int) -> tuple:
        later = {id(tensor) for other in self._part.stages if other > stage for tensor in self._takes[other]}
        later |= {id(tensor) for tensor in self._part.gives}
        return tuple(t for call in self._part.stages[stage] for t in call.makes if id(t) in later)


class _Pass:
    """One pass over the cells of a section: the forward one, or the one for the gradient, which follows the first."""

    def __init__(self, section: _Section, batch: list, first: "_Pass | None" = None, upstream=(), variables=()):
        self._section, self._first, self._variables = section, first, list(variables)
        self._part, self._plan = section._part, section._plan
        rows = next(value for value, t in zip(batch, self._part.takes, strict=True) if sections.has_batch_axis(t))
        rows = rows.shape[0] if rows.shape[0] is not None else tf.shape(rows)[0]
        self._pieces = MicroBatches(rows, self._plan.microbatches)
        self._values = [self._cut(batch, micro) for micro in range(self._plan.microbatches)]
        self._scopes, self._tapes, self._losses, self._last, self._stamps = {}, {}, {}, {}, []
        self._grown: list = [None] * len(self._variables)
        self._upstream = self._parts_of(upstream)
        self._of_losses = self._by_stage(upstream[len(self._part.gives) :])
        self.behind: dict[int, str] = {}  # of which logits are known, and how Keras finds them
        self._of_logits = self._parts_of_logits(upstream)

    def forward(self, cells) -> None:
        for device, cell in cells:
            if cell.stage in self._part.stages:
                values = self._values[cell.micro]
                with self._at(cell), self._in_order(device, cell, values):
                    scope = _Cell(self._given(cell))
                    if self._plan.recompute:
                        with scope:
                            model_graph.run(self._part.stages[cell.stage], values, self._section._operation_fn)
                    else:
                        self._on_tape(cell, scope, values)
                    self._scopes[cell.stage, cell.micro] = scope
                    self._losses[cell.stage, cell.micro] = scope.losses
                    self._note(device, cell, self._handed_on(cell))

    def results(self) -> list:
        """What the section gives, as whole batches, and the losses that its layers add."""
        found, behind = [], []
        for tensor in self._part.gives:
            column = [values[id(tensor)] for values in self._values]
            known = logits.together(column)
            with device_placement.scope(self._plan.homes[self._stage_of(tensor)]):
                found.append(self._pieces.join(column))
                if known is not None:
                    behind.append(self._pieces.join(known[0]))
                    self.behind[id(tensor)] = known[1]
        stages, micros = self._part.stages, range(self._plan.microbatches)
        for stage in stages:
            for column in zip(*(self._losses[stage, micro] for micro in micros), strict=True):
                found.append(tf.add_n([loss * self._pieces.share(m, loss.dtype) for m, loss in enumerate(column)]))
        return cell_times.after(self._stamps, found + behind)

    def mask_of(self, tensor):
        masks = [backend.get_keras_mask(values[id(tensor)]) for values in self._values]
        return None if masks[0] is None else self._pieces.join(masks)

    def assign(self) -> None:
        """Assigns what the cells have: one micro-batch's where all agree, else by the rule of `state`, over them."""
        for stage in self._part.stages:
            scopes = [self._scopes[stage, micro] for micro in range(self._plan.microbatches)]
            latest = [{id(variable): (variable, value) for variable, value in scope.assigned} for scope in scopes]
            before = [dict((id(variable), value) for variable, value in scope.found) for scope in scopes]
            for key, (variable, _) in latest[0].items():
                values = [column[key][1] for column in latest]
                layer_state.put(variable, self._together(variable, values, before[0].get(key)))

    def back(self, cells, places: list[int]):
        """Runs the cells of the gradient, and returns that of the inputs at these places, and of the variables."""
        gradients: list[dict] = [dict() for _ in range(self._plan.microbatches)]
        for device, cell in cells:
            if cell.stage not in self._part.stages:
                continue
            if self._plan.recompute and (self._plan.keeps or not cell.backward):
                self._forward_again(device, cell._replace(backward=False))
            if cell.backward:
                arrived = gradients[cell.micro] | self._upstream[cell.micro]
                with self._at(cell), self._in_order(device, cell, arrived):
                    self._note(device, cell, self._go_back(cell, gradients[cell.micro]))
        inputs = [self._joined(self._part.takes[at], gradients) for at in places]
        if not self._variables:
            return cell_times.after(self._stamps, inputs)
        return inputs, cell_times.after(self._stamps, [_closed(grown) for grown in self._grown])

    def _on_tape(self, cell, scope, known: dict) -> None:
        """A forward pass on a tape of its own, from what is known to the micro-batch."""
        section = self._section
        values = {id(tensor): _copy(known[id(tensor)]) for tensor in section._takes[cell.stage]}
        watched = {key: value for key, value in values.items() if remat.is_differentiable(value)}
        with tf.GradientTape() as tape:
            tape.watch(list(watched.values()))
            with scope:
                model_graph.run(self._part.stages[cell.stage], values, section._operation_fn)
        made = {id(tensor): values[id(tensor)] for tensor in section._gives[cell.stage]}
        self._tapes[cell.stage, cell.micro] = tape, watched, made, scope.losses
        self._values[cell.micro] |= made

    def _forward_again(self, device: int, cell) -> None:
        first, values = self._first, self._values[cell.micro]
        known = first._values[cell.micro] | values if self._plan.keeps else values
        with self._at(cell), self._in_order(device, cell, known):
            self._on_tape(cell, remat.ReplayScope(first._scopes[cell.stage, cell.micro], first._given(cell)), known)
            if self._plan.watch.is_on or not self._plan.keeps:
                self._note(device, cell, self._handed_on(cell))

    def _go_back(self, cell, gradients: dict) -> list:
        """A backward pass; returns what it has made."""
        tapes = self._tapes if self._plan.recompute else self._first._tapes
        tape, watched, made, losses = tapes.pop((cell.stage, cell.micro))
        targets, upstream = list(losses), self._upstream_losses(cell)
        for key, value in made.items():
            found = [g for g in (gradients.pop(key, None), self._upstream[cell.micro].get(key)) if g is not None]
            if found and remat.is_differentiable(value):
                targets.append(value)
                upstream.append(tf.add_n(found) if len(found) > 1 else found[0])
            if key in self._of_logits[cell.micro]:
                targets.append(logits.behind(value).logits)
                upstream.append(self._of_logits[cell.micro][key])
        if not targets:
            return []
        sources = [*watched.values(), *self._variables]
        found = tape.gradient(targets, sources, output_gradients=upstream)
        for key, gradient in zip(watched, found, strict=False):
            if gradient is not None:
                gradients[key] = gradients[key] + gradient if key in gradients else tf.convert_to_tensor(gradient)
        for at, gradient in enumerate(found[len(watched) :]):
            if gradient is not None:
                self._grown[at] = _added(self._grown[at], gradient)
        sums = [self._grown[at] for at, gradient in enumerate(found[len(watched) :]) if gradient is not None]
        return [gradients[key] for key in watched if key in gradients] + [_latest(grown) for grown in sums]

    def _given(self, cell) -> dict:
        """What a cell's micro-batch has assigned in the stages before: Keras's global seed, above all."""
        earlier = (self._scopes[stage, cell.micro] for stage in self._part.stages if stage < cell.stage)
        return {id(variable): value for scope in earlier for variable, value in scope.assigned}

    def _cut(self, batch: list, micro: int) -> dict:
        found = {}
        for tensor, value in zip(self._part.takes, batch, strict=True):
            mask = backend.get_keras_mask(value)
            found[id(tensor)] = self._pieces.cut(value, micro) if sections.has_batch_axis(tensor) else value
            if mask is not None and sections.has_batch_axis(tensor):
                backend.set_keras_mask(found[id(tensor)], self._pieces.cut(mask, micro))
        return found

    def _parts_of(self, upstream) -> list[dict]:
        """The gradient of what the section gives, by micro-batch."""
        given = list(zip(self._part.gives, upstream, strict=False))  # losses and logits follow
        return [
            {id(tensor): self._pieces.part(value, micro) for tensor, value in given if value is not None}
            for micro in range(self._plan.microbatches)
        ]

    def _parts_of_logits(self, upstream) -> list[dict]:
        known = self._first.behind if self._first else {}
        given = list(zip(known, upstream[len(upstream) - len(known) :], strict=True))
        return [
            {key: self._pieces.part(value, micro) for key, value in given if value is not None}
            for micro in range(self._plan.microbatches)
        ]

    def _by_stage(self, upstream) -> dict[int, list]:
        """The gradient of the losses that layers add, in the order in which `results` has them."""
        left = iter(upstream)
        counts = {stage: len(self._first._losses[stage, 0]) for stage in self._part.stages} if self._first else {}
        return {stage: [next(left) for _ in range(count)] for stage, count in counts.items()}

    def _upstream_losses(self, cell) -> list:
        return [value * self._pieces.share(cell.micro, value.dtype) for value in self._of_losses[cell.stage]]

    def _joined(self, tensor, gradients: list[dict]):
        found = [column.get(id(tensor)) for column in gradients]
        if not sections.has_batch_axis(tensor):
            known = [gradient for gradient in found if gradient is not None]
            return tf.add_n(known) if known else None
        like = [values[id(tensor)] for values in self._values]
        return self._pieces.join([tf.zeros_like(v) if g is None else g for g, v in zip(found, like, strict=True)])

    def _together(self, variable, values: list, before):
        """One value of those that the micro-batches make of a variable, on all replicas the same."""
        if variable.aggregation == "sum" and before is not None:  # what is added has met the other replicas' already
            added = [value - before for value in values]
            if variable.synchronization == "on_read":  # as metrics have: these have not met, so all rows are in them
                added = [self._pieces.counted(micro, value) for micro, value in enumerate(added)]
            return before + tf.add_n(added)
        if not tf.as_dtype(variable.dtype).is_floating:
            return layer_state.agreed(variable, values[0])
        parts = [value * self._pieces.share(micro, value.dtype) for micro, value in enumerate(values)]
        return layer_state.agreed(variable, tf.add_n(parts))

    def _stage_of(self, tensor) -> int:
        return next(stage for stage, made in self._section._gives.items() if any(t is tensor for t in made))

    @contextlib.contextmanager
    def _at(self, cell):
        with device_placement.scope(self._plan.homes[cell.stage]), self._pieces.standing_in(cell.micro):
            yield

    def _in_order(self, device: int, cell, values: dict):
        """Lets a cell wait for the device's last one; `values` are those that may go into it, for who looks on."""
        last, watch = self._last.get(device, []), self._plan.watch
        if watch.is_on:
            edge = self._section._gives[cell.stage] if cell.backward else self._section._takes[cell.stage]
            inputs = [values[id(tensor)] for tensor in edge if id(tensor) in values]
            with tf.control_dependencies(last):
                last = [watch.stamp(inputs, cell, device, self._first is not None, False)]
        return tf.control_dependencies(last)

    def _handed_on(self, cell) -> list:
        values = self._values[cell.micro]
        return [values[id(tensor)] for tensor in self._section._gives[cell.stage] if id(tensor) in values]

    def _note(self, device: int, cell, made: list) -> None:
        """What the device's next cell must wait for."""
        if self._plan.watch.is_on:
            made = [self._plan.watch.stamp(made, cell, device, self._first is not None, True)]
            self._stamps += made
        self._last[device] = made or self._last.get(device, [])


class _Cell(remat.RecordingScope):
    """What one cell assigns; the rule of `state` comes later, over all micro-batches."""

    def agreed(self, variable, value):
        return value


def _copy(value):
    mask = backend.get_keras_mask(value)
    value = tf.identity(value)
    if mask is not None:
        backend.set_keras_mask(value, mask)
    return value


def _latest(grown) -> tf.Tensor:
    return grown[-1].values if isinstance(grown, list) else grown


def _added(grown, gradient):
    """A running sum: the gradients of all micro-batches would otherwise lie there until the last one."""
    if isinstance(gradient, tf.IndexedSlices):
        return [*(grown or []), gradient]
    return gradient if grown is None else grown + gradient


def _closed(grown):
    if not isinstance(grown, list):
        return grown
    return collectives.added(grown)
