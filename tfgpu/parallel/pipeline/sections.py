"""Splits a staged model into sections: runs of layers that take micro-batches, and layers that take the whole batch."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import keras
import numpy as np
import tensorflow as tf

from tfgpu.core import replication
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, model_graph


class CellClock:
    """Measures when each cell begins and ends, in the steps that are traced while it is on.

    A timestamp is a Python operation that depends on the cell's inputs or results, and reads one number of each, so
    that a GPU has computed them. TensorFlow would run stateful timestamps one after the other, so it is stateless; and
    it would remove a stateless operation whose result nothing uses, so the result is the shape of a random draw of no
    numbers, which is stateful but may run in any order.

    Attributes:
        note: called with the cell, the number of its device, whether it repeats a forward pass, whether it has ended,
            and the time in seconds. None turns the clock off.
    """

    def __init__(self):
        self.note: Callable | None = None

    @property
    def is_on(self) -> bool:
        """Whether the current replica takes timestamps: only the first one does."""
        if self.note is None:
            return False
        context = replication.replica_context()
        return context is None or tf.get_static_value(context.replica_id_in_sync_group) == 0

    def stamp(self, values: Sequence, *about) -> tf.Tensor:
        """An operation that notes the time as soon as these values are computed."""
        note = self.note

        def take(*_):
            note(*about, time.perf_counter())
            return np.zeros(1, "int32")

        samples = [tf.reshape(value, [-1])[:1] for value in values]
        shape = tf.numpy_function(take, samples or [tf.zeros([])], tf.int32, stateful=False)
        return tf.raw_ops.RandomUniform(shape=shape, dtype=tf.float32, seed=1, seed2=1)


def after(stamps: Sequence[tf.Tensor], results: list) -> list:
    """The same results, where the first one depends on the timestamps, so that TensorFlow runs them."""
    at = next((at for at, value in enumerate(results) if value is not None), None)
    if stamps and at is not None:
        with tf.control_dependencies(stamps):
            results[at] = tf.nest.map_structure(tf.identity, results[at], expand_composites=True)
    return results


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
"""Layers whose result for a row depends on other rows, or that assign a trainable weight."""


@dataclass(frozen=True)
class Section:
    """Consecutive calls of a model.

    Attributes:
        stages: the section's calls by the number of their stage.
        needs_whole_batch: the calls take all rows at once, not micro-batches.
        inputs: symbolic tensors from before the section.
        outputs: symbolic tensors that are needed after it.
    """

    stages: dict[int, tuple[model_graph.Call, ...]]
    needs_whole_batch: bool
    inputs: tuple = field(default=(), repr=False)
    outputs: tuple = field(default=(), repr=False)

    @property
    def takes_micro_batches(self) -> bool:
        """Whether there is something to overlap: several stages that take micro-batches."""
        return not self.needs_whole_batch and len(self.stages) > 1

    @property
    def layers(self) -> list[keras.layers.Layer]:
        return [layer for calls in self.stages.values() for call in calls for layer in call.layers]

    @cached_property
    def stage_inputs(self) -> dict[int, tuple]:
        """By stage, the symbolic tensors that it takes from earlier stages or from before the section."""
        return {stage: model_graph.inputs_of(calls) for stage, calls in self.stages.items()}

    @cached_property
    def stage_outputs(self) -> dict[int, tuple]:
        """By stage, the symbolic tensors that later stages, or calls after the section, take."""
        found = {}
        for stage, calls in self.stages.items():
            taken = {id(t) for other, inputs in self.stage_inputs.items() if other > stage for t in inputs}
            taken |= {id(tensor) for tensor in self.outputs}
            found[stage] = tuple(tensor for call in calls for tensor in call.outputs if id(tensor) in taken)
        return found


@dataclass(frozen=True)
class PipelineProgram:
    """How a staged model runs in training.

    Attributes:
        sections: in order.
        placements: of each stage.
        microbatches: how many.
        forward_order: pairs of a device's number and a cell (`schedule.Cell`), in the order in which the forward pass
            adds them to the graph.
        backward_order: the same for the backward pass. Where it contains forward cells, those run again; otherwise what
            the stages exchange is kept from the first forward pass.
        recompute: the backward pass runs the forward pass again; otherwise all activations are kept.
        clock: measures cells on request.
    """

    sections: tuple[Section, ...]
    placements: tuple[device_placement.DevicePlacement, ...]
    microbatches: int
    forward_order: tuple[tuple, ...]
    backward_order: tuple[tuple, ...]
    recompute: bool = True
    clock: CellClock = field(default_factory=CellClock, repr=False, compare=False)

    @property
    def keeps_boundaries(self) -> bool:
        """Whether the tensors that stages exchange are kept from the first forward pass."""
        return all(cell.backward for _, cell in self.backward_order)


def split_into_sections(
    staged: Sequence[tuple[model_graph.Call, int]], outputs: Sequence, needs_whole_batch: Callable
) -> tuple[Section, ...]:
    """Groups calls into sections.

    Args:
        staged: each call with the number of its stage, in order.
        outputs: symbolic tensors that the model returns.
        needs_whole_batch: whether a call must see all rows at once.

    Raises:
        InputError: a stage returns a tensor without a batch axis.
    """
    found, later = [], {id(tensor) for tensor in outputs}
    for is_whole, members in reversed(_grouped(staged, needs_whole_batch)):
        stages: dict[int, list] = {}
        for call, stage in members:
            stages.setdefault(stage, []).append(call)
        calls = [call for call, _ in members]
        inputs = model_graph.inputs_of(calls)
        used_later = {id(t): t for call in calls for t in call.outputs if id(t) in later}
        ordered = {stage: tuple(stages[stage]) for stage in sorted(stages)}
        found.append(Section(ordered, is_whole, inputs, tuple(used_later.values())))
        later |= {id(tensor) for tensor in inputs}
    for section in found:
        if section.takes_micro_batches:
            _check_batch_axes(section)
    return tuple(reversed(found))


def _grouped(staged: Sequence[tuple[model_graph.Call, int]], needs_whole_batch: Callable) -> list[tuple[bool, list]]:
    """Runs of calls that take micro-batches, and single calls that take the whole batch."""
    groups: list[tuple[bool, list]] = []
    for call, stage in staged:
        is_whole = needs_whole_batch(call)
        if is_whole or not groups or groups[-1][0]:
            groups.append((is_whole, []))
        groups[-1][1].append((call, stage))
    return groups


def _check_batch_axes(section: Section) -> None:
    calls = [call for calls in section.stages.values() for call in calls]
    used = {id(tensor) for call in calls for tensor in call.inputs} | {id(tensor) for tensor in section.outputs}
    for call in calls:
        if not all(has_batch_axis(tensor) for tensor in call.outputs if id(tensor) in used):
            raise InputError(
                f"{call.name!r} returns {[tuple(t.shape) for t in call.outputs]}, which has no batch axis to split "
                "into micro-batches. Make the first axis the batch's, of any size, or use `parallel.place`."
            )


def is_known_to_mix_rows(call: model_graph.Call) -> bool:
    """Whether a call is of a layer of `WHOLE_BATCH`, or of a layer that holds one."""
    return any(isinstance(each, WHOLE_BATCH) for each in model_graph.with_layers_within(call.layers))


def has_batch_axis(tensor) -> bool:
    """Whether a symbolic tensor has a row for each example."""
    return len(tensor.shape) > 0 and tensor.shape[0] is None
