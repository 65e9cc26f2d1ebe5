"""Layers that lie in parts on several devices: each computes with its part of the kernel, and one sum joins them.

A kernel is cut by its outputs ("column") or its inputs ("row"). A column-parallel layer takes the whole input and makes
a part of the output; a row-parallel one takes a part of the input and makes a term of the output. One after the other,
with what works element by element between them, they need one sum forwards, and one backwards for the input's gradient.
Attention is such a pair by heads; an embedding is cut by its rows.

The parts run the layer's own code. Where it reads a kernel, it finds a stand-in (`Slices`), which is the part of the
device that is computing, and outside of a segment the whole. Seeds are drawn once for all parts, and dropout takes its
piece of what one device draws.

Source: Shoeybi et al., Megatron-LM, 2019.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.legacy.saving import legacy_h5_format
from keras.src.random.seed_generator import SeedGenerator

from tfgpu.compat.patch import wrap
from tfgpu.core import logits, rng
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, model_graph, sharded_variable
from tfgpu.parallel.tensor import axes, losses

_here = threading.local()

SUM, SUM_BACK = "tensor_sum", "tensor_sum_back"
"""What the sums over devices are called in a graph, forwards and backwards; each is one all-reduce."""


class Slices(sharded_variable.ShardedVariable):
    """Stands for a layer's variable: the part of the device that computes, outside of a segment the whole."""

    def __tf_tensor__(self, dtype=None, name=None):
        at = _at()
        if at is None:
            return super().__tf_tensor__(dtype, name)
        value = tf.convert_to_tensor(self.shards[at])
        return tf.cast(value, dtype or value.dtype)

    def assign(self, value) -> None:
        at = _at()
        if at is None:
            super().assign(value)
        else:
            self.shards[at].assign(value)


class Once:
    """Stands for the bias of a sum's terms: the first term has it, the others have zeros."""

    def __init__(self, variable: keras.Variable):
        self._variable = variable

    def __getattr__(self, name: str):
        return getattr(self._variable, name)

    def __tf_tensor__(self, dtype=None, name=None):
        value = tf.convert_to_tensor(self._variable) if not _at() else tf.zeros(self.shape, self._variable.value.dtype)
        return tf.cast(value, dtype or value.dtype)


@dataclass
class _Computing:
    """Which device's part is computing."""

    at: int
    seeds: list
    drawn: int = 0


def _at() -> int | None:
    now = getattr(_here, "now", None)
    return None if now is None else now.at


@contextlib.contextmanager
def _computing(at: int, count: int, axis: int, seeds: list):
    """Lets the block compute with the parts of one device.

    Args:
        at: which, of `count`.
        axis: of activations that are cut, from the last.
        seeds: those that the first device has drawn; empty for the first.
    """
    before, _here.now = getattr(_here, "now", None), _Computing(at, seeds)
    try:
        with rng.slicing(rng.Slice(axis, at, count)):
            yield
    finally:
        _here.now = before


@functools.cache
def _draw_seeds_once() -> None:
    @wrap(SeedGenerator, "next")
    def next_seed(stock, self, ordered=True):
        now = getattr(_here, "now", None)
        if now is None:
            return stock(self, ordered)
        if now.at == 0:
            now.seeds.append(stock(self, ordered))
        now.drawn += 1
        return now.seeds[now.drawn - 1]


@dataclass
class Segment:
    """Calls that run in parts; to the model, one call.

    Attributes:
        inner: the calls, each after those whose results it needs.
        kind: `"pair"` (the last call sums), `"sum"` (each part is a term), `"column"` (the parts lie side by side), or
            `"row"` (the one call takes its input in parts, and sums).
        cuttings: what is cut.
        axis: of activations that are cut, from the last.
        needs: symbolic tensors that go in, and `makes`, that come out.
        places: homes of the parts; None before `settle`, until when the segment runs whole.
    """

    inner: tuple[model_graph.Call, ...]
    kind: str
    cuttings: tuple[axes.VariableSplit, ...]
    axis: int = -1
    places: tuple[device_placement.DevicePlacement, ...] | None = None
    needs: tuple = field(init=False, repr=False)
    makes: tuple = field(init=False, repr=False)

    def __post_init__(self) -> None:
        own = {id(tensor) for call in self.inner for tensor in call.makes}
        needed = {id(t): t for call in self.inner for t in call.needs if id(t) not in own}
        self.needs, self.makes = tuple(needed.values()), self.inner[-1].makes

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

    def run(self, values: dict[int, object], operation_fn: Callable) -> None:
        """As `graphs.Call.run`."""
        if self.places is None or in_symbolic_scope():
            model_graph.run(self.inner, values, operation_fn)
            return
        copies = [self._handed_out(values[id(tensor)]) for tensor in self.needs]
        last = self.inner[-1]
        apart = self.inner[:-1] if self.kind in ("pair", "row") else self.inner
        found, seeds = [], []
        for at, place in enumerate(self.places):
            mine = {id(tensor): copy[at] for tensor, copy in zip(self.needs, copies, strict=True)}
            with device_placement.scope(place), _computing(at, len(self.places), self.axis, seeds):
                model_graph.run(apart, mine, operation_fn)
            found.append(mine)
        (made,) = self.makes
        if self.kind in ("pair", "row"):
            terms = [mine[id(last.needs[0])] for mine in found]
            values[id(made)] = operation_fn(last.operation)(terms)
            return
        results = [mine[id(made)] for mine in found]
        with device_placement.scope(self.places[0]):
            joined = _added(results) if self.kind == "sum" else tf.concat(results, self.axis)
        mask = backend.get_keras_mask(results[0])
        if mask is not None:
            backend.set_keras_mask(joined, mask)
        found = logits.together(results) if self.kind != "sum" else None
        if found is not None:
            with device_placement.scope(self.places[0]):
                joined = logits.Behind(tf.concat(found[0], self.axis), found[1]).put(joined)
        if self.kind == "column":
            losses.remember_shards(joined, results, self.places)
        values[id(made)] = joined

    def _handed_out(self, value) -> list:
        return _split(value, self.places, self.axis) if self.kind == "row" else _spread(value, self.places)

    def settle(self, places: Sequence[device_placement.DevicePlacement], strategy: tf.distribute.Strategy) -> None:
        """Cuts the variables, and puts the parts at home. From now on the segment runs in parts."""
        _draw_seeds_once()
        losses.install()
        self.places = tuple(places)
        by_layer: dict = {}
        for cutting in self.cuttings:
            by_layer.setdefault(id(cutting.layer), []).append(cutting)
        for group in by_layer.values():
            _cut(group, self.places, strategy)
        last = self.inner[-1].operation
        if self.kind in ("pair", "row"):
            _sum_terms(last, self.places)


def embed_by_rows(layer: keras.layers.Embedding, places: Sequence[device_placement.DevicePlacement], strategy) -> None:
    """Cuts an embedding's table by its rows: each device looks up what it has, and one sum joins them."""
    places = tuple(places)
    _cut([axes.VariableSplit(layer, "_embeddings", 0)], places, strategy)
    table, rows = layer._embeddings, layer.input_dim
    each = rows // len(places)

    def call(inputs):
        ids = inputs if inputs.dtype in (tf.int32, tf.int64) else tf.cast(inputs, tf.int32)
        terms = []
        for at, (place, copy) in enumerate(zip(places, _spread(ids, places), strict=True)):
            with device_placement.scope(place):
                mine = tf.where(copy < 0, copy + rows, copy) - at * each
                is_here = (mine >= 0) & (mine < each)
                found = tf.gather(table.shards[at].value, tf.where(is_here, mine, 0))
                terms.append(tf.cast(tf.where(is_here[..., None], found, 0), layer.compute_dtype))
        with device_placement.scope(places[0]):
            return _added(terms)

    object.__setattr__(layer, "call", call)


def _cut(
    cuttings: Sequence[axes.VariableSplit], places: tuple[device_placement.DevicePlacement, ...], strategy
) -> None:
    """Replaces variables of one layer by their parts, in the order of the layer's variables."""
    _refuse_old_files()
    layer = cuttings[0].layer
    order = [*layer._trainable_variables, *layer._non_trainable_variables]
    made: dict[int, list] = {id(variable): [variable] for variable in order}
    for cutting in cuttings:
        variable = getattr(layer, cutting.attribute)
        if cutting.axis is None:
            object.__setattr__(layer, cutting.attribute, Once(variable))
            continue
        may_train = any(variable is other for other in layer._trainable_variables)
        pieces = _pieces(variable, cutting.axis, places, strategy, may_train)
        made[id(variable)] = pieces
        sharded_variable.mark_shards(pieces, sharded_variable.AxisSharding(cutting.axis), variable.path)
        object.__setattr__(layer, cutting.attribute, Slices(pieces))
    layer._tracker.unlock()
    for variable in order:
        layer._untrack_variable(variable)
    for variable in order:
        trains = variable.trainable
        for piece in made[id(variable)]:
            layer._track_variable(piece)
            piece.trainable = trains
    layer._tracker.lock()
    layer.input_spec = None
    sharded_variable.save_merged(layer)
    for name in ("enable_lora", "quantize"):
        object.__setattr__(layer, name, functools.partial(_refuse, layer, name))


@functools.cache
def _refuse_old_files() -> None:
    @wrap(legacy_h5_format, "save_weights_to_hdf5_group")
    def save(stock, f, model):
        if any(sharded_variable.shard_info(variable) is not None for variable in model.weights):
            raise InputError(
                f"{model.name!r} has layers in parts, which a file of the old format (.h5) cannot hold as one. Save to "
                "a file that ends with .keras or .weights.h5."
            )
        return stock(f, model)


def _refuse(layer: keras.layers.Layer, name: str, *args, **kwargs) -> None:
    raise InputError(
        f"`{name}` changes the kernel of {layer.name!r}, which lies in parts. Call it on the model that `save` writes."
    )


def _pieces(variable: keras.Variable, axis: int, places, strategy, may_train: bool) -> list[keras.Variable]:
    value = np.asarray(variable._value.numpy())
    variable._value = None  # so that its memory is free before the new ones take any
    found = []
    for at, (place, piece) in enumerate(zip(places, np.split(value, len(places), axis), strict=True)):
        with strategy.scope(), device_placement.scope(place):
            made = backend.Variable(
                piece,
                dtype=variable.dtype,
                trainable=may_train,
                autocast=variable._autocast,
                aggregation=variable.aggregation,
                synchronization=variable.synchronization,
                name=f"{variable.name}_{at}",
            )
        made._path = f"{variable.path}_{at}"
        made.regularizer, made.constraint = variable.regularizer, variable.constraint
        found.append(made)
    return found


def _sum_terms(layer: keras.layers.Layer, places: tuple[device_placement.DevicePlacement, ...]) -> None:
    """Lets a row-parallel layer take its input in parts."""
    stock = layer.call

    @functools.wraps(stock)
    def call(inputs, *args, **kwargs):
        if not isinstance(inputs, (list, tuple)):
            return stock(inputs, *args, **kwargs)
        terms = []
        for at, (place, value) in enumerate(zip(places, inputs, strict=True)):
            with device_placement.scope(place), _computing(at, len(places), -1, []):
                terms.append(axes.term(layer, value))
        with device_placement.scope(places[0]):
            return axes.finished(layer, _added(terms))

    object.__setattr__(layer, "call", call)


def _added(terms: Sequence[tf.Tensor]) -> tf.Tensor:
    return tf.add_n(list(terms), name=SUM)


def _spread(value: tf.Tensor, places: Sequence[device_placement.DevicePlacement]) -> list[tf.Tensor]:
    """A copy at each home; the gradients of all copies are summed once."""

    def copies(given):
        found = []
        for place, each in zip(places, given, strict=True):
            with device_placement.scope(place):
                found.append(tf.identity(each))
        return found

    @tf.custom_gradient
    def summed(given):
        def gradient(*upstream):
            with device_placement.scope(places[0]):
                return tf.add_n(list(upstream), name=SUM_BACK)

        return [tf.identity(given) for _ in places], gradient

    value = tf.convert_to_tensor(value)
    if not value.dtype.is_floating:
        return _masked(value, copies([value] * len(places)), lambda mask: copies([mask] * len(places)))
    with device_placement.scope(places[0]):  # what a custom gradient makes goes through one more operation there
        found = summed(value)
    return _masked(value, copies(found), lambda mask: copies([mask] * len(places)))


def _split(value: tf.Tensor, places: Sequence[device_placement.DevicePlacement], axis: int) -> list[tf.Tensor]:
    found = []
    for place, piece in zip(places, tf.split(value, len(places), axis), strict=True):
        with device_placement.scope(place):
            found.append(tf.identity(piece))
    return _masked(value, found, lambda mask: [mask] * len(places))


def _masked(value, found: list, copies: Callable) -> list:
    mask = backend.get_keras_mask(value)
    if mask is not None:
        for copy, of_copy in zip(found, copies(mask), strict=True):
            backend.set_keras_mask(copy, of_copy)
    return found
