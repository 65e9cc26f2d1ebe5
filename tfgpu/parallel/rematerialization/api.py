"""Activations computed anew in the backward pass, in a model as it is: by layer, by block, or to a budget of memory.

`remat.py` runs the layers again: dropout draws the same mask, BatchNormalization counts a batch once. What the gradient
of each call keeps (`saved_tensors.py`) and how long the call takes (`costs.py`) decide which layers those are.
"""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfgpu.core.error_messages import in_units
from tfgpu.errors import InputError
from tfgpu.parallel import costs, model_graph
from tfgpu.parallel.rematerialization import budget, recomputed_layers, saved_tensors

WAYS = ("layers", "blocks", "auto")
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_FORWARD = 1 / 3
"""The part of a forward and backward pass that the forward pass takes."""


def recompute(
    model: keras.Model,
    where: str | Iterable[str] = "blocks",
    *,
    memory: str | int | None = None,
    rows: int | None = None,
    batch: Any = None,
) -> keras.Model:
    """Lets parts of a model keep only their inputs for the backward pass, before the model is compiled.

    The weights become what they would have become, and the model saves as ever: an ordinary file, which opens
    anywhere and knows nothing of this. For a block in a model that shall always be recomputed, wrap it in
    `tfgpu.models.Recompute`.

    Args:
        model: built. Any Keras model for patterns and `"layers"`; else a functional or Sequential one.
        where: patterns of layers, of which each is run again by itself (`["block_*"]`, `["encoder/*"]` for layers
            within a layer); `"layers"`: each of the model's layers by itself; `"blocks"`: runs of layers, cut so that
            the peak is lowest; `"auto"`: what loses the least time within `memory`, with a table of it.
        memory: for `"auto"`: what all activations of a step may take at once, such as `"512MB"`, `"2GiB"` or a
            number of bytes. Weights, gradients, slots and what an operation needs while it runs come on top.
        rows: for `"blocks"` and `"auto"`: how many rows a replica's batch has; None takes those of `batch`, or 32.
        batch: inputs as the model takes them, where a size other than the rows' is not known.

    Returns:
        The same model, to be compiled and fitted.

    Raises:
        InputError: nothing fits, which names the least that would; a pattern matches no layer; the model has been
            compiled, is a pipeline, has no graph, or was given to `recompute` before.

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
    for layer in _direct(model) if where == "layers" else _matching(model, where):
        recomputed_layers.recompute_layer(layer)
    return model


def _check(model: keras.Model, where, memory, rows, batch) -> None:
    if isinstance(where, str) and where not in WAYS:
        raise InputError(f"`where` must be {', '.join(map(repr, WAYS))} or a list of patterns. Received: {where!r}.")
    if (memory is None) == (where == "auto"):
        raise InputError(
            "where='auto' needs `memory`, such as memory='512MB'; the other ways take none. "
            f"Received: where={where!r}, memory={memory!r}."
        )
    if where not in ("blocks", "auto") and (rows is not None or batch is not None):
        raise InputError("`rows` and `batch` are for where='blocks' and where='auto', which measure the model.")
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise InputError(f"`rows` must be a whole number from 1. Received: {rows!r}.")
    if rows is not None and batch is not None:
        raise InputError("Give `rows` or `batch`, not both: a batch has its rows.")
    if getattr(model, "compiled", False):
        raise InputError("The model has been compiled already. Call `recompute` before `compile`.")
    if not model.built:
        raise InputError(f"{model.name!r} is not built. Call it on a batch first, or begin it with keras.Input.")
    recomputed_layers.check_free(model)


def _direct(model: keras.Model) -> list[keras.layers.Layer]:
    return [layer for layer in model.layers if not isinstance(layer, keras.layers.InputLayer)]


def _matching(model: keras.Model, patterns: Iterable[str]) -> list[keras.layers.Layer]:
    """The layers that a pattern matches, but for those within another one of them."""
    layers, patterns = model_graph.layers_within(model), list(patterns)
    if not patterns:
        raise InputError("`where` names no layer. Give patterns, such as ['block_*'], or 'blocks'.")
    for pattern in patterns:
        if not fnmatch.filter(layers, pattern):
            near = difflib.get_close_matches(pattern, layers, 3, 0.3) or list(layers)[:3]
            raise InputError(f"No layer of {model.name!r} is called {pattern!r}. There are {', '.join(near)}, ...")
    found: dict[str, keras.layers.Layer] = {}
    for path, layer in layers.items():  # each after the one that holds it
        inside = any(path.startswith(f"{other}/") for other in found)
        chosen = any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
        if chosen and not inside and not isinstance(layer, keras.layers.InputLayer):
            found[path] = layer
    return list({id(layer): layer for layer in found.values()}.values())


def _blocks(model: keras.Model, where: str, memory, rows: int | None, batch) -> list[Sequence[model_graph.Call]]:
    facts = saved_tensors.measure(model, batch, rows=rows or 32)
    if where == "blocks":
        parts = budget.smallest(facts, [sum(own.values()) for own in facts.own])
    else:
        limit = _bytes_of(memory)
        seconds = [cost.seconds * _FORWARD for cost in costs.measure(model, _few(batch))]
        parts = budget.cheapest(facts, seconds, limit)
        if parts is None:
            raise _nothing_fits(model, facts, limit, rows, batch)
        _show(facts, parts, seconds, limit)
    return [facts.calls[begin:end] for begin, end, anew in parts if anew]


def _few(batch):
    """Some rows of a batch, to take times with."""
    return None if batch is None else tf.nest.map_structure(lambda value: value[:8], batch)


def _bytes_of(memory: str | int) -> int:
    """A number of bytes from what a person writes.

    Example:
        >>> _bytes_of("1.5 KiB"), _bytes_of("2MB")
        (1536, 2000000)
    """
    match = re.fullmatch(r"\s*([0-9.]+)\s*([A-Za-z]*)\s*", str(memory))
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    except (TypeError, KeyError, ValueError):
        size = 0
    if size < 1 or isinstance(memory, bool):
        raise InputError(f"`memory` is a size such as '512MB', '2GiB' or a number of bytes. Received: {memory!r}.")
    return size


def _nothing_fits(model: keras.Model, facts: saved_tensors.SavedTensors, limit: int, rows, batch) -> InputError:
    least = facts.peak(budget.smallest(facts, [1.0] * len(facts.calls)))
    count = rows or (np.shape(tf.nest.flatten(batch)[0])[0] if batch is not None else 32)
    return InputError(
        f"Nothing fits: {count} rows of {model.name!r} keep {in_units(least)} at least, with all that helps computed "
        f"anew. The budget is {in_units(limit)}. Take {max(1, int(count * limit / least))} row(s) at most "
        "(gradient_accumulation_steps keeps the update the same), a 16-bit policy, or several devices."
    )


def _show(facts: saved_tensors.SavedTensors, parts: budget.Segments, seconds: Sequence[float], limit: int) -> None:
    table = Table("layers", "", "keeps", "without", "time again")
    for begin, end, anew in parts:
        names = [facts.calls[begin].name] + ([facts.calls[end - 1].name] if end - begin > 1 else [])
        without = facts.between([(begin, end, False)])
        keeps = facts.between([(begin, end, True)]) if anew else without
        again = f"{sum(seconds[begin:end]) * 1e3:.2f} ms" if anew else ""
        table.add_row(" to ".join(names), "anew" if anew else "kept", in_units(keeps), in_units(without), again)
    whole = [(0, len(facts.calls), False)]
    lost = sum(sum(seconds[begin:end]) for begin, end, anew in parts if anew)
    console = Console()
    console.print(table)
    console.print(
        f"The activations' peak: {in_units(facts.peak(parts))} of {in_units(limit)}; without recomputation "
        f"{in_units(facts.peak(whole))}. About {lost / (sum(seconds) / _FORWARD or 1):.0%} more time a step.",
        highlight=False,
    )
