"""Tries blocks on random rows, whole and split: a plan that does not fit its class is an error, not another result."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers as layers_private
from tfgpu.compat import quantized
from tfgpu.compat.keras import global_seed_generator, tree
from tfgpu.errors import InputError
from tfgpu.parallel import model_graph
from tfgpu.parallel.tensor.blocks import Block

_log = logging.getLogger(__name__)
_ROWS, _LENGTH = 2, 4
_TOLERANCE = {"float32": 1e-3, "float64": 1e-3}  # of the largest number; a wrong plan is wrong by far more
_TOLERANCE_16 = 0.1


@dataclass(frozen=True)
class Trial:
    """One call of a layer that holds blocks.

    Attributes:
        layer: the layer that the model calls.
        blocks: those within it.
        arguments: what it is given, by position and by name.
        states: what a call changes, each with the value that it begins with.
        expected: what it returned when it was whole.
    """

    layer: keras.layers.Layer
    blocks: tuple[Block, ...]
    arguments: tuple[Sequence, dict]
    states: list[tuple[keras.Variable, np.ndarray]]
    expected: list[np.ndarray]

    def check(self) -> None:
        """Calls the layer, which is split by now, again.

        Raises:
            InputError: it returns something else.
        """
        names = ", ".join(sorted({type(block.layer).__name__ for block in self.blocks}))
        try:
            found = _results(self.layer, self.arguments, self.states)
        except (ValueError, TypeError, tf.errors.OpError) as error:
            raise InputError(
                f"{self.layer.name!r} cannot run with the plan of {names}: {error}. Count heads by attributes in the "
                "plan ('heads'), and name every sublayer that is split."
            ) from error
        for mine, other in zip(found, self.expected, strict=True):
            size = max(1.0, float(np.abs(other).max(initial=0)))
            apart = float(np.abs(mine - other).max(initial=0)) if mine.shape == other.shape else np.inf
            if not apart <= _TOLERANCE.get(self.layer.compute_dtype, _TOLERANCE_16) * size:
                raise InputError(
                    f"The plan of {names} changes what {self.layer.name!r} computes: on random rows by {apart:.2g}, of "
                    f"{size:.2g}. Between a column and its row each column, or head, must be computed by itself; an "
                    "attribute that counts heads is 'heads' in the plan, and a Dropout on another axis than the last "
                    "has that axis."
                )


def record(model: keras.Model, blocks: Sequence[Block]) -> list[Trial]:
    """Calls each kind of layer that holds blocks once, whole. The model does not change."""
    found, seen = [], set()
    for graph in _graphs(model):
        for call in model_graph.calls(graph):
            for layer in call.layers:
                held = {id(each) for each in (layer, *model_graph.layers_within(layer).values())}
                inside = tuple(block for block in blocks if id(block.layer) in held)
                kind = type(layer), tuple(tuple(variable.shape) for variable in layer.variables)
                if inside and kind not in seen and not model_graph.is_functional(layer):
                    seen.add(kind)
                    values = {id(symbolic): _made_up(symbolic.shape, symbolic.dtype) for symbolic in call.inputs}
                    found += _recorded(layer, inside, call.node.arguments.fill_in(values))
    return found if model_graph.has_graph(model) else found + _by_build_shapes(blocks)


def _graphs(model: keras.Model) -> list[keras.Model]:
    within = [each for each in model_graph.layers_within(model).values() if model_graph.is_functional(each)]
    return [model_graph.functional(each) for each in (model, *within) if model_graph.has_graph(each)]


def _by_build_shapes(blocks: Sequence[Block]) -> list[Trial]:
    """Calls of blocks in a model without a graph, whose inputs are known by the shape that they were built with."""
    found, kinds = [], set()
    for block in blocks:
        shape = (block.layer.get_build_config() or {}).get("input_shape")
        kind = type(block.layer), tuple(tuple(variable.shape) for variable in block.layer.variables)
        if shape and all(size is None or isinstance(size, int) for size in shape) and kind not in kinds:
            kinds.add(kind)
            given = _made_up(shape, block.layer.compute_dtype)
            found += _recorded(block.layer, (block,), ((given,), {}))
    return found


def _recorded(layer: keras.layers.Layer, blocks: tuple[Block, ...], arguments: tuple) -> list[Trial]:
    states = [(variable, np.asarray(variable)) for variable in _states(layer)]
    try:
        expected = _results(layer, arguments, states)
    except (ValueError, TypeError, tf.errors.OpError) as error:
        _log.info("%s is not tried with its plan, as it does not run on random rows: %s", layer.name, error)
        return []
    return [Trial(layer, blocks, arguments, states, expected)]


def _made_up(shape: Sequence[int | None], dtype: str) -> tf.Tensor:
    """Random numbers, or ones, in the shape of a symbolic tensor."""
    shape, dtype = [size or (_LENGTH if at else _ROWS) for at, size in enumerate(shape)], tf.as_dtype(dtype)
    if not dtype.is_floating:
        return tf.ones(shape, dtype)
    return tf.cast(np.random.default_rng(0).normal(size=shape), dtype)


def _states(layer: keras.layers.Layer) -> list[keras.Variable]:
    """What a call may change: the seeds of random draws, and variables that were made to be assigned."""
    within = layers_private.layers_within(layer)
    own = {id(v) for each in within for v in layers_private.own_variables(each)}
    assigned = [v for each in within for v in quantized.assigned_variables(each)]
    seeds = global_seed_generator()
    shared = [seeds.state] if seeds is not None else []
    return [variable for variable in layer.variables if id(variable) not in own] + assigned + shared


def _results(layer: keras.layers.Layer, arguments: tuple, states: Sequence[tuple]) -> list[np.ndarray]:
    """What a call in training returns; afterward, the layer is as before."""
    for variable, value in states:
        variable.assign(value)
    try:
        results = model_graph.in_training(layer)(*arguments[0], **arguments[1])
    finally:
        layers_private.clear_losses(layer)
        for variable, value in states:
            variable.assign(value)
    return [np.asarray(tf.cast(value, tf.float32)) for value in tree.flatten(results) if tf.is_tensor(value)]
