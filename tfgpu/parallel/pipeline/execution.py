"""Runs a functional model's training step in stages and micro-batches, inside the model's own `call`.

The model is called on the whole batch and returns the whole batch's outputs. So the loss, its divisors, sample weights,
metrics and the optimizer stay Keras's own, on the whole batch. Inside the call, sections of layers run stage by stage
and micro-batch by micro-batch; their gradient does the same backward, in the order of a schedule. Layers that mix the
rows of a batch (BatchNormalization) run between the sections on all rows.

The second forward pass, which the gradient needs, equals the first: see `rematerialization/remat.py`.
"""

import contextlib
from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import get_mask, set_mask
from tfgpu.compat.tensorflow import without_recording
from tfgpu.core import logits, replication
from tfgpu.parallel import model_graph
from tfgpu.parallel.pipeline.passes import BackwardPass, ForwardPass
from tfgpu.parallel.pipeline.sections import PipelineProgram, Section
from tfgpu.parallel.rematerialization import remat


def install(model: keras.Model, program: PipelineProgram) -> None:
    """Makes a functional model train by a program. Runs without `training=True`, or outside replicas, stay as they are.

    Raises:
        InputError: the model's run was replaced before.
    """

    def run(values: dict, operation_fn: Callable) -> None:
        in_replica = replication.replica_context() is not None  # elsewhere random draws do not know their rows
        for section in program.sections:
            if section.takes_micro_batches and in_replica:
                _SectionStep(section, program, operation_fn).run(values)
            else:
                for calls in section.stages.values():
                    model_graph.run(calls, values, operation_fn)

    model_graph.override_run(model, run, "pipeline")
    slots.of(model_graph.functional(model)).pipeline_program = program


def program_of(model: keras.Model) -> PipelineProgram | None:
    """The program that `install` gave a model, or None."""
    return slots.get(model_graph.functional(model), "pipeline_program") if model_graph.is_functional(model) else None


class _SectionStep:
    """A section in one training step: its forward pass now, its backward pass when TensorFlow asks for the gradient."""

    def __init__(self, section: Section, program: PipelineProgram, operation_fn: Callable):
        self._section, self._program, self._operation_fn = section, program, operation_fn
        self._call_state = remat.copied_call_state()

    def run(self, values: dict) -> None:
        """Adds the section's outputs to the values, its losses to a layer, and its assignments to the variables."""
        self._batch = [values[id(tensor)] for tensor in self._section.inputs]
        self._positions = [at for at, value in enumerate(self._batch) if remat.is_differentiable(value)]
        block = tf.custom_gradient(lambda *given: self._forward(given))
        results = block(*(self._batch[at] for at in self._positions))
        outputs, losses, found_logits = self._first.split(results)
        self._put_outputs(outputs, found_logits, values)
        for loss in losses:
            model_graph.loss_owner(self._section.layers).add_loss(loss)
        self._first.assign_state()

    def _forward(self, given):
        """The results, and the function that computes their gradient."""
        # TensorFlow's own tape need not record the forward pass: the gradient below takes its place.
        with without_recording() if self._program.recompute else contextlib.nullcontext():
            first = ForwardPass(self._section, self._program, self._operation_fn, self._batch_of(given))
            first.run()
        self._first = first

        def gradient(*upstream, variables=()):
            arrived = tf.nest.flatten(upstream, expand_composites=True)
            with remat.call_state(self._call_state), tf.control_dependencies(arrived):
                copies = [tf.identity(value) for value in given]
                return BackwardPass(first, self._batch_of(copies), upstream, variables).run(self._positions)

        return first.results(), gradient

    def _batch_of(self, given) -> list:
        """The section's inputs, with these tensors at the differentiable positions; masks stay."""
        batch = list(self._batch)
        for at, value in zip(self._positions, given, strict=True):
            mask = get_mask(batch[at])
            batch[at] = value
            if mask is not None:
                set_mask(value, mask)
        return batch

    def _put_outputs(self, outputs: list, found_logits: list, values: dict) -> None:
        left = iter(found_logits)
        for tensor, value in zip(self._section.outputs, outputs, strict=True):
            kind, mask = self._first.logits_kinds.get(id(tensor)), self._first.mask_of(tensor)
            values[id(tensor)] = value if kind is None else logits.Logits(next(left), kind).attach_to(value)
            if mask is not None:
                set_mask(values[id(tensor)], mask)
