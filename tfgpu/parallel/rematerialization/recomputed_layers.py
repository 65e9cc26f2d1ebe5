"""Makes layers, or runs of calls of a functional model, recompute their activations, in place.

The layers, and the files that the model saves, stay as they are: only how this process runs them changes.
"""

from collections.abc import Callable, Sequence

import keras

from tfgpu.compat import slots
from tfgpu.compat.patch import override
from tfgpu.errors import InputError
from tfgpu.parallel import model_graph
from tfgpu.parallel.rematerialization import remat

_OVERRIDE = "recompute"


def recompute_layer(layer: keras.layers.Layer) -> None:
    """Makes a layer keep only its inputs for the backward pass."""
    stock = layer.call

    def within(*args, **kwargs):
        return stock(*args, **kwargs)

    within.__self__ = model_graph.loss_owner([layer])
    call = remat.remat(within)
    call.__wrapped__ = stock  # for those who ask for the signature
    slots.of(layer).recomputes = True
    override(layer, "call", call, by=__name__)


def is_recomputed(layer: keras.layers.Layer) -> bool:
    """Whether `recompute_layer` or `recompute_calls` has changed how a layer or a model runs."""
    if slots.get(layer, "recomputes", False):
        return True
    return model_graph.is_functional(layer) and model_graph.override_name(layer) == _OVERRIDE


def recompute_calls(model: keras.Model, blocks: Sequence[Sequence[model_graph.Call]]) -> None:
    """Makes runs of calls of a functional model keep only their inputs in training.

    Args:
        model: functional or Sequential.
        blocks: runs of consecutive calls of `model_graph.calls(model)`.

    Raises:
        InputError: the model has no graph, or its run was replaced before.
    """
    block_of = {id(call.node): tuple(block) for block in blocks for call in block}
    runs: list[tuple] = []
    for call in model_graph.calls(model):
        block = block_of.get(id(call.node))
        if block is None or not runs or runs[-1] is not block:
            runs.append((call,) if block is None else block)
    outputs = _outputs_of(runs, model_graph.functional(model).outputs)

    def run(values: dict, operation_fn: Callable) -> None:
        for calls, needed_later in zip(runs, outputs, strict=True):
            if id(calls[0].node) in block_of:
                _run_block(calls, needed_later, values, operation_fn)
            else:
                model_graph.run(calls, values, operation_fn)

    model_graph.override_run(model, run, _OVERRIDE)


def _outputs_of(runs: Sequence[Sequence[model_graph.Call]], model_outputs: Sequence) -> list[tuple]:
    """For each run, the symbolic tensors that it computes and that later runs, or the model's outputs, need."""
    found, later = [], {id(tensor) for tensor in model_outputs}
    for calls in reversed(runs):
        found.append(tuple(tensor for call in calls for tensor in call.outputs if id(tensor) in later))
        later |= {id(tensor) for tensor in model_graph.inputs_of(calls)}
    return found[::-1]


def _run_block(block: Sequence[model_graph.Call], outputs: tuple, values: dict, operation_fn: Callable) -> None:
    inputs = model_graph.inputs_of(block)

    def within(*given):
        inner = {id(tensor): value for tensor, value in zip(inputs, given, strict=True)}
        model_graph.run(block, inner, operation_fn)
        return [inner[id(tensor)] for tensor in outputs]

    within.__self__ = model_graph.loss_owner(layer for call in block for layer in call.layers)
    results = remat.remat(within)(*(values[id(tensor)] for tensor in inputs))
    values |= {id(tensor): value for tensor, value in zip(outputs, results, strict=True)}


def check_not_spread(model: keras.Model) -> None:
    """Refuses a model that a pipeline runs, or that recomputes something already.

    Raises:
        InputError: as described.
    """
    layers = [model, *model_graph.layers_within(model).values()]
    if any(model_graph.is_functional(layer) and model_graph.override_name(layer) == "pipeline" for layer in layers):
        raise InputError(
            "The model is a pipeline, which recomputes what it does not keep. Remove `recompute`, or choose with "
            "`pipeline(recompute=...)`."
        )
    check_not_recomputed(model)


def check_not_recomputed(model: keras.Model) -> None:
    """Refuses a model that recomputes something already.

    Raises:
        InputError: as described.
    """
    if any(is_recomputed(layer) for layer in [model, *model_graph.layers_within(model).values()]):
        raise InputError(
            "The model was already given to `recompute`. Build a new model, and call `recompute` once, for all layers, "
            "after `apply` or `shard`; for a pipeline, choose with `pipeline(recompute=...)`."
        )
