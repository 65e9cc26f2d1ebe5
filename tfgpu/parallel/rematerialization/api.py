"""`parallel.recompute`: rematerialization of a model's activations by layer, by block, or to fit a memory budget.

`remat.py` runs layers again so that dropout draws the same mask and BatchNormalization counts a batch once.
`budget.py` measures what the gradient of each call keeps and `costs.py` how long each call takes; from both, it chooses
what to recompute.
"""

import fnmatch
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfgpu.core.error_messages import in_units
from tfgpu.errors import InputError, whole_number
from tfgpu.parallel import costs, model_graph, placement
from tfgpu.parallel.planning import hardware
from tfgpu.parallel.rematerialization import budget, recomputed_layers

WAYS = ("layers", "blocks", "auto")
_FORWARD = 1 / 3
"""The forward pass's share of the time of a forward and backward pass."""


def recompute(
    model: keras.Model,
    where: str | Iterable[str] = "blocks",
    *,
    memory: str | int | None = None,
    rows: int | None = None,
    batch: Any = None,
) -> keras.Model:
    """Makes parts of a model keep only their inputs for the backward pass. Call it before `compile`.

    Training gives the same weights as without it, and the model saves as before: an ordinary file, which opens
    anywhere. To recompute a block of a model always, wrap it in `tfgpu.models.Recompute`.

    Args:
        model: built. Any Keras model for patterns and `"layers"`; otherwise functional or Sequential.
        where: patterns of layers, each of which is recomputed by itself (`["block_*"]`; `["encoder/*"]` for layers
            within a layer); `"layers"`: each layer of the model by itself; `"blocks"`: runs of layers, split so that
            the peak is lowest; `"auto"`: the runs that lose the least time within `memory`, printed as a table.
        memory: for `"auto"`: the bytes that all activations of a step may take at once, such as `"512MB"`, `"2GiB"` or
            a number. Weights, gradients, optimizer slots and the workspace of running operations come on top.
        rows: for `"blocks"` and `"auto"`: the rows of a replica's batch; None takes those of `batch`, or 32.
        batch: for `"blocks"` and `"auto"`: inputs as the model takes them, where a size other than the rows is unknown.

    Returns:
        The same model, ready to be compiled and trained.

    Raises:
        InputError: nothing fits the budget (the message names the least that would); a pattern matches no layer; the
            model is compiled, is a pipeline, has no graph, or was given to `recompute` before.

    Example:
        >>> layers = [keras.layers.Dense(8, "relu", name=f"hidden_{at}") for at in range(3)]
        >>> model = recompute(keras.Sequential([keras.Input((4,)), *layers]), ["hidden_*"])
        >>> model.compile("adam", "mse")

    Source: Chen et al., 2016, https://arxiv.org/abs/1604.06174
    """
    _check(model, where, memory, rows, batch)
    if where in ("blocks", "auto"):
        recomputed_layers.recompute_calls(model, _blocks(model, where, memory, rows, batch))
        return model
    for layer in model.layers if where == "layers" else _matching(model, where):
        if not isinstance(layer, keras.layers.InputLayer):
            recomputed_layers.recompute_layer(layer)
    return model


def _check(model: keras.Model, where, memory, rows, batch) -> None:
    if isinstance(where, str) and where not in WAYS:
        raise InputError(f"`where` must be {', '.join(map(repr, WAYS))} or a list of patterns. Received: {where!r}.")
    if (memory is None) == (where == "auto"):
        raise InputError(
            "where='auto' needs `memory`, such as memory='512MB'; other values of `where` take none. "
            f"Received: where={where!r}, memory={memory!r}."
        )
    if where not in ("blocks", "auto") and (rows is not None or batch is not None):
        raise InputError("`rows` and `batch` are for where='blocks' and where='auto', which measure the model.")
    if rows is not None:
        whole_number("rows", rows)
    if rows is not None and batch is not None:
        raise InputError("Give `rows` or `batch`, not both: a batch has its own number of rows.")
    if getattr(model, "compiled", False) and not placement.has_default_compile(model):
        raise InputError("The model is already compiled. Call `recompute` before `compile`.")
    if not model.built:
        raise InputError(f"{model.name!r} is not built. Call it on a batch first, or begin it with keras.Input.")
    recomputed_layers.check_not_spread(model)


def _matching(model: keras.Model, patterns: Iterable[str]) -> list[keras.layers.Layer]:
    """The layers that a pattern matches, except layers within another such layer."""
    layers, patterns = model_graph.layers_within(model), list(patterns)
    if not patterns:
        raise InputError("`where` names no layer. Give patterns, such as ['block_*'], or 'blocks'.")
    model_graph.check_patterns(model, patterns)
    found: dict[str, keras.layers.Layer] = {}
    for path, layer in layers.items():  # each after the one that holds it
        is_inside = any(path.startswith(f"{other}/") for other in found)
        if not is_inside and any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns):
            found[path] = layer
    return list({id(layer): layer for layer in found.values()}.values())


def _blocks(model: keras.Model, where: str, memory, rows: int | None, batch) -> list[Sequence[model_graph.Call]]:
    """The runs of calls to recompute."""
    saved = budget.measure(model, batch, rows=rows or 32)
    if where == "blocks":
        segments = budget.smallest(saved, [sum(own.values()) for own in saved.own])
    else:
        limit = hardware.bytes_of(memory)
        few = None if batch is None else tf.nest.map_structure(lambda value: value[:8], batch)
        seconds = [cost.seconds * _FORWARD for cost in costs.measure(model, few)]
        segments = budget.cheapest(saved, seconds, limit)
        if segments is None:
            raise _nothing_fits(model, saved, limit, rows, batch)
        _print_table(saved, segments, seconds, limit)
    return [saved.calls[begin:end] for begin, end, is_recomputed in segments if is_recomputed]


def _nothing_fits(model: keras.Model, saved: budget.SavedTensors, limit: int, rows, batch) -> InputError:
    least = saved.peak(budget.smallest(saved, [1.0] * len(saved.calls)))
    count = rows or (np.shape(tf.nest.flatten(batch)[0])[0] if batch is not None else 32)
    return InputError(
        f"Nothing fits: {count} rows of {model.name!r} keep at least {in_units(least)}, even with recomputation. "
        f"The budget is {in_units(limit)}. Use {max(1, int(count * limit / least))} row(s) at most "
        "(gradient_accumulation_steps keeps the update the same), a 16-bit policy, or several devices."
    )


def _print_table(saved: budget.SavedTensors, segments: budget.Segments, seconds: Sequence[float], limit: int) -> None:
    table = Table("layers", "", "keeps", "without", "extra time")
    for begin, end, is_recomputed in segments:
        names = [saved.calls[begin].name] + ([saved.calls[end - 1].name] if end - begin > 1 else [])
        without = saved.kept([(begin, end, False)])
        keeps = saved.kept([(begin, end, True)]) if is_recomputed else without
        extra = f"{sum(seconds[begin:end]) * 1e3:.2f} ms" if is_recomputed else ""
        how = "recomputed" if is_recomputed else "kept"
        table.add_row(" to ".join(names), how, in_units(keeps), in_units(without), extra)
    whole = [(0, len(saved.calls), False)]
    lost = sum(sum(seconds[begin:end]) for begin, end, is_recomputed in segments if is_recomputed)
    console = Console()
    console.print(table)
    console.print(
        f"Peak of the activations: {in_units(saved.peak(segments))} of {in_units(limit)}; without recomputation "
        f"{in_units(saved.peak(whole))}. A step takes about {lost / (sum(seconds) / _FORWARD or 1):.0%} more time.",
        highlight=False,
    )
