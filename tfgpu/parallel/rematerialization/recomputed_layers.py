"""Layers, and runs of calls of a functional model, whose activations are computed anew: put in, in place.

The layers stay what they are, and so does what the model saves: only how this process runs them changes.
"""

from collections.abc import Callable, Sequence

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import model_graph
from tfgpu.parallel.rematerialization import remat


def recompute_layer(layer: keras.layers.Layer) -> None:
    """Lets a layer keep only what goes into it, each time it is called."""
    stock = layer.call

    def within(*args, **kwargs):
        return stock(*args, **kwargs)

    within.__self__ = model_graph.loss_owner([layer])
    method = remat.remat(within)
    method.__wrapped__ = stock  # whoever asks for the arguments sees the layer's own
    method.tfgpu_recomputes = True
    object.__setattr__(layer, "call", method)


def is_recomputed(layer: keras.layers.Layer) -> bool:
    """Whether `recompute_layer` or `recompute_calls` has changed how a layer or a model runs."""
    by_itself = getattr(layer.__dict__.get("call"), "tfgpu_recomputes", False)
    return by_itself or model_graph.is_functional(layer) and model_graph.override_name(layer) == _RECOMPUTED


_RECOMPUTED = "recompute"


def recompute_calls(model: keras.Model, blocks: Sequence[Sequence[model_graph.Call]]) -> None:
    """Lets runs of calls of a functional model keep only what goes into them, in training.

    Args:
        model: functional or Sequential.
        blocks: runs of calls that follow each other in `graphs.calls(model)`.

    Raises:
        InputError: the model has no graph, or its calls run in another way already.
    """
    calls = model_graph.calls(model)
    block_of = {id(call.node): tuple(block) for block in blocks for call in block}
    runs: list[tuple] = []
    for call in calls:
        block = block_of.get(id(call.node))
        if block is None or not runs or runs[-1] is not block:
            runs.append((call,) if block is None else block)
    later = _needed_after(runs, model_graph.functional(model).outputs)

    def run(values: dict, operation_fn: Callable) -> None:
        for part, gives in zip(runs, later, strict=True):
            if id(part[0].node) in block_of:
                _run_block(part, gives, values, operation_fn)
            else:
                model_graph.run(part, values, operation_fn)

    model_graph.override_run(model, run, _RECOMPUTED)


def takes(calls: Sequence[model_graph.Call]) -> tuple:
    """The symbolic tensors that a run of calls needs from before it."""
    own = {id(tensor) for call in calls for tensor in call.makes}
    return tuple({id(t): t for call in calls for t in call.needs if id(t) not in own}.values())


def _needed_after(runs: Sequence[Sequence[model_graph.Call]], outputs: Sequence) -> list[tuple]:
    """For each run, the symbolic tensors that it makes and that are needed after it."""
    found, later = [], {id(tensor) for tensor in outputs}
    for part in reversed(runs):
        found.append(tuple(t for call in part for t in call.makes if id(t) in later))
        later |= {id(tensor) for tensor in takes(part)}
    return found[::-1]


def _run_block(block: Sequence[model_graph.Call], gives: tuple, values: dict, operation_fn: Callable) -> None:
    needed = takes(block)

    def within(*given):
        inner = {id(tensor): value for tensor, value in zip(needed, given, strict=True)}
        model_graph.run(block, inner, operation_fn)
        return [inner[id(tensor)] for tensor in gives]

    within.__self__ = model_graph.loss_owner(layer for call in block for layer in call.layers)
    made = remat.remat(within)(*(values[id(tensor)] for tensor in needed))
    values |= {id(tensor): value for tensor, value in zip(gives, made, strict=True)}


def check_free(model: keras.Model) -> None:
    """Refuses a model that a pipeline, or an earlier call, runs in a way of its own.

    Raises:
        InputError: as said.
    """
    layers = [model, *model_graph.layers_within(model).values()]
    if any(model_graph.is_functional(layer) and model_graph.override_name(layer) == "pipeline" for layer in layers):
        raise InputError(
            "The model is in stages already, which recompute what they do not keep. Leave `recompute` out, or choose "
            "by `pipeline(recompute=...)`."
        )
    check_not_recomputed(model)


def check_not_recomputed(model: keras.Model) -> None:
    """Refuses a model of which something is recomputed.

    Raises:
        InputError: as said.
    """
    if any(is_recomputed(layer) for layer in [model, *model_graph.layers_within(model).values()]):
        raise InputError(
            "The model has been given to `recompute` before. Make it anew; name all layers at once, or, for a "
            "pipeline, choose by `pipeline(recompute=...)`."
        )
