"""What each layer of a model costs: the bytes of its variables and results, and the time of a step, measured."""

import time
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError
from tfgpu.parallel import model_graph

_ROUNDS = 3


@dataclass(frozen=True)
class Cost:
    """What one call of a layer costs.

    Args:
        name: the layer's.
        parameter_bytes: of its variables; 0 where an earlier call had them.
        activation_bytes: of its results, for the rows that were measured.
        seconds: of one forward and backward pass; the least of a few.
    """

    name: str
    parameter_bytes: int
    activation_bytes: int
    seconds: float


def measure(model: keras.Model, batch=None, *, rows: int = 8) -> list[Cost]:
    """Measures each call of a functional model, in the order in which Keras makes them; its state stays as it is.

    Args:
        model: functional or Sequential, built.
        batch: inputs as the model takes them; None makes zeros.
        rows: of the zeros.

    Raises:
        InputError: the model has no graph, or an input has a size that is not known, and no batch was given.
    """
    graph = model_graph.functional(model)
    given = tf.nest.flatten(batch) if batch is not None else [_zeros(tensor, rows) for tensor in graph.inputs]
    values = {id(made): tf.convert_to_tensor(value) for made, value in zip(graph.inputs, given, strict=True)}
    found, seen = [], set()
    for call in model_graph.calls(model):
        seconds = _time_of(call, values)
        variables = [v for layer in call.layers for v in layer.variables if id(v) not in seen]
        seen.update(map(id, variables))
        results = sum(_bytes(values[id(made)]) for made in call.makes)
        found.append(Cost(call.name, sum(map(_bytes, variables)), results, seconds))
    return found


def _time_of(call: model_graph.Call, values: dict) -> float:
    """Runs a call and its gradient; leaves its results among the values."""
    needs = [values[id(tensor)] for tensor in call.needs]
    weights = [v.value for layer in call.layers for v in layer.trainable_variables]

    @tf.function(autograph=False)
    def step(*given):
        with keras.StatelessScope(), tf.GradientTape() as tape:
            tape.watch([value for value in given if value.dtype.is_floating])
            mine = dict(values) | {id(tensor): value for tensor, value in zip(call.needs, given, strict=True)}
            model_graph.run([call], mine, model_graph.in_training)
            results = [mine[id(made)] for made in call.makes]
        floats = [value for value in results if value.dtype.is_floating]
        gradients = tape.gradient(floats, [*given, *weights])
        return results, [value for value in gradients if value is not None]

    results, _ = step(*needs)
    values |= {id(made): value for made, value in zip(call.makes, results, strict=True)}
    taken = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        tf.nest.map_structure(lambda value: tf.convert_to_tensor(value).numpy(), step(*needs)[1])
        taken.append(time.perf_counter() - begin)
    return min(taken)


def _bytes(value) -> int:
    return int(np.prod(value.shape)) * tf.as_dtype(value.dtype).size


def _zeros(tensor, rows: int) -> tf.Tensor:
    shape = (tensor.shape[0] or rows, *tensor.shape[1:])
    if None in shape:
        raise InputError(f"The input {tensor.name!r} has a size that is not known: {tensor.shape}. Give a batch of it.")
    return tf.zeros(shape, tensor.dtype)
