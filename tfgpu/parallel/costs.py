"""Measures what each call of a model costs: bytes of variables and results, and the time of a step."""

import time
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.parallel import model_graph

_ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """What one call of a layer costs.

    Args:
        name: the layer's.
        parameter_bytes: of its variables; 0 if an earlier call had them.
        activation_bytes: of its results, for the rows that were measured.
        seconds: of one forward and backward pass; the minimum of a few.
    """

    name: str
    parameter_bytes: int
    activation_bytes: int
    seconds: float


def measure(model: keras.Model, batch=None, *, rows: int = 8) -> list[Cost]:
    """Measures each call of a functional model, in the order in which Keras runs them. The model does not change.

    Args:
        model: functional or Sequential, built.
        batch: inputs as the model takes them; None uses zeros.
        rows: of the zeros.

    Raises:
        InputError: the model has no graph, or an input has an unknown size and no batch was given.
    """
    graph = model_graph.functional(model)
    given = tf.nest.flatten(batch)
    if batch is None:
        given = [tf.zeros(model_graph.shape_of_rows(tensor, rows), tensor.dtype) for tensor in graph.inputs]
    values = {id(symbolic): tf.convert_to_tensor(value) for symbolic, value in zip(graph.inputs, given, strict=True)}
    found, seen = [], set()
    for call in model_graph.calls(model):
        with variables.lent(v for layer in call.layers for v in layer.variables):
            seconds = _time(call, values)
        new = [v for layer in call.layers for v in layer.variables if id(v) not in seen]
        seen.update(map(id, new))
        results = sum(_bytes(values[id(tensor)]) for tensor in call.outputs)
        found.append(Cost(call.name, sum(map(_bytes, new)), results, seconds))
    return found


def _time(call: model_graph.Call, values: dict) -> float:
    """Runs a call and its gradient; adds the call's results to the values."""
    inputs = [values[id(tensor)] for tensor in call.inputs]
    weights = [variables.own_copy(v.value) for layer in call.layers for v in layer.trainable_variables]

    @tf.function(autograph=False)
    def step(*given):
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch([value for value in given if value.dtype.is_floating])
            own = dict(values) | {id(tensor): value for tensor, value in zip(call.inputs, given, strict=True)}
            model_graph.run([call], own, model_graph.in_training)
            results = [own[id(tensor)] for tensor in call.outputs]
        floats = [value for value in results if value.dtype.is_floating]
        gradients = tape.gradient(floats, [*given, *weights])
        return results, [value for value in gradients if value is not None]

    results, _ = step(*inputs)
    values |= {id(tensor): value for tensor, value in zip(call.outputs, results, strict=True)}
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        tf.nest.map_structure(lambda value: tf.convert_to_tensor(value).numpy(), step(*inputs)[1])
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _bytes(value) -> int:
    return int(np.prod(value.shape)) * tf.as_dtype(value.dtype).size
