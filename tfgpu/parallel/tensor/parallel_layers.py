"""Layers that are split over several devices: each device computes with its shard of the kernel, and a sum joins them.

A kernel is split by its outputs ("column") or its inputs ("row"). A column-parallel layer takes the whole input and
computes a part of the output; a row-parallel layer takes a part of the input and computes a term of the output. One
after the other, with element-wise layers between them, they need one sum in the forward pass, and one in the backward
pass for the gradient of the input. Attention is such a pair by heads; an embedding is split by its rows.

Random draws equal one device's: seeds are drawn once, and dropout takes its slice of what one device draws.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import quantized
from tfgpu.compat.keras import get_mask, in_symbolic_scope, set_mask
from tfgpu.compat.patch import override
from tfgpu.core import logits
from tfgpu.parallel import compiled_calls, device_placement, model_graph
from tfgpu.parallel.tensor import axes, collectives, losses, quantized_splits
from tfgpu.parallel.tensor.local_shards import computing, draw_seeds_once, on_shards
from tfgpu.parallel.tensor.variable_splits import split_variables


@dataclass
class Segment:
    """Calls that run on several devices; to the model, they are one call (see `model_graph.Call`).

    Attributes:
        inner: the calls, each after the calls that it depends on.
        kind: `"pair"` (the last call is row-parallel, the others compute its input in parts), `"sum"` (each device
            computes a term), `"column"` (the results lie side by side), or `"row"` (one row-parallel call).
        splits: how variables are split.
        axis: the axis of activations that is split, from the last.
        placements: of the shards; None before `split_variables`, until when the calls run as usual.
        inputs: symbolic tensors that go in.
        outputs: symbolic tensors that come out.
    """

    inner: tuple[model_graph.Call, ...]
    kind: str
    splits: tuple[axes.VariableSplit, ...]
    axis: int = -1
    placements: tuple[device_placement.DevicePlacement, ...] | None = None
    inputs: tuple = field(init=False, repr=False)
    outputs: tuple = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.inputs, self.outputs = model_graph.inputs_of(self.inner), self.inner[-1].outputs

    @property
    def name(self) -> str:
        return self.inner[0].name

    @property
    def operation(self) -> "Segment":
        return self

    @property
    def node(self) -> "Segment":
        return self

    @property
    def layers(self) -> tuple[keras.layers.Layer, ...]:
        return tuple(layer for call in self.inner for layer in call.layers)

    @property
    def ends_row_parallel(self) -> bool:
        """Whether the last call takes its input in parts."""
        return self.kind in ("pair", "row")

    def split_variables(self, placements: Sequence[device_placement.DevicePlacement], strategy) -> None:
        """Splits the variables over devices. From now on the segment runs on them."""
        draw_seeds_once()
        self.placements = tuple(placements)
        split_variables(self.splits, self.placements, strategy)
        if self.ends_row_parallel:
            take_input_in_parts(self.inner[-1].operation, self.placements)

    def run(self, values: dict[int, object], operation_fn: Callable) -> None:
        """As `model_graph.Call.run`."""
        if self.placements is None or in_symbolic_scope():
            model_graph.run(self.inner, values, operation_fn)
            return
        found, last, (output,) = self._run_on_each(values, operation_fn), self.inner[-1], self.outputs
        if self.ends_row_parallel:
            parts = [own[id(last.inputs[0])] for own in found]
            values[id(output)] = operation_fn(last.operation)(parts)
        else:
            values[id(output)] = self._joined([own[id(output)] for own in found])

    def _run_on_each(self, values: dict[int, object], operation_fn: Callable) -> list[dict]:
        """The values of each device, after all calls but a row-parallel one."""
        if self.kind == "row":
            inputs = [collectives.scatter(values[id(tensor)], self.placements, self.axis) for tensor in self.inputs]
        else:
            inputs = [collectives.copy_to_all(values[id(tensor)], self.placements) for tensor in self.inputs]
        calls = self.inner[:-1] if self.ends_row_parallel else self.inner
        found, seeds = [], []
        for at, placement in enumerate(self.placements):
            own = {id(tensor): copies[at] for tensor, copies in zip(self.inputs, inputs, strict=True)}
            with device_placement.scope(placement), computing(at, len(self.placements), self.axis, seeds):
                self._run_on_one(calls, own, operation_fn, placement.local_device)
            found.append(own)
        return found

    def _run_on_one(self, calls: tuple, values: dict, operation_fn: Callable, device: str) -> None:
        """Runs calls on one device; where XLA compiles them, it does so together."""
        if not calls or not compiled_calls.is_wanted():
            return model_graph.run(calls, values, operation_fn)
        (last,) = calls[-1].outputs

        def compute():
            model_graph.run(calls, values, operation_fn)
            return values[id(last)]

        first = next(layer for call in calls for layer in call.layers)

        def one_by_one():
            for call in calls:
                self._run_on_one((call,), values, operation_fn, device)
            return values[id(last)]

        by_pieces = one_by_one if len(calls) > 1 else None
        values[id(last)] = compiled_calls.run(first, compute, (), {}, device, by_pieces)

    def _joined(self, results: list[tf.Tensor]) -> tf.Tensor:
        """The whole output, from one result per device."""
        with device_placement.scope(self.placements[0]):
            joined = collectives.sum_terms(results) if self.kind == "sum" else tf.concat(results, self.axis)
        mask = get_mask(results[0])
        if mask is not None:
            set_mask(joined, mask)
        found = logits.find_all(results) if self.kind != "sum" else None
        if found is not None:
            with device_placement.scope(self.placements[0]):
                joined = logits.Logits(tf.concat(found[0], self.axis), found[1]).attach_to(joined)
        if self.kind == "column":
            losses.remember_shards(joined, results, self.placements)
        return joined


def take_input_in_parts(layer: keras.layers.Layer, placements: tuple[device_placement.DevicePlacement, ...]) -> None:
    """Makes a row-parallel layer accept a list with one part of its input per device."""
    name = quantized.call_name(layer)
    stock = getattr(layer, name)

    def term(at: int, value: tf.Tensor) -> tf.Tensor:
        return compiled_calls.run(layer, axes.term, (layer, value), {}, placements[at].local_device)

    @functools.wraps(stock)
    def call(inputs, *args, **kwargs):
        if not isinstance(inputs, (list, tuple)):
            return stock(inputs, *args, **kwargs)
        if quantized.mode(layer) is not None:
            total = quantized_splits.row_total(layer, stock, inputs, placements)
            with device_placement.scope(placements[0]):
                return axes.finished(layer, total)
        terms = on_shards(term, placements, inputs)
        with device_placement.scope(placements[0]):
            return axes.finished(layer, collectives.sum_terms(terms))

    override(layer, name, call, by=__name__, listed="*.call *.quantized_call")
