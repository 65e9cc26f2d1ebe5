"""Runs the `call` of a layer whose sublayers are split over devices.

`call` is Python code of the user's. It runs as ever on the first device. Between a column-parallel sublayer and the
row-parallel one, its tensors are the first device's part; when it comes to the row, it runs once more for each other
device, which ends at the row and leaves the device's part of the row's input there. The sum over the devices is what
the row returns, and `call` goes on on the first device. What was computed before the column is not computed again:
sublayers return what they returned, and operations between them, whose results nobody reads, are pruned from the graph.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import quantized
from tfgpu.compat.keras import in_symbolic_scope
from tfgpu.compat.patch import override
from tfgpu.core import step_context
from tfgpu.core.randomness import rng
from tfgpu.errors import InputError
from tfgpu.parallel import compiled_calls, device_placement
from tfgpu.parallel.tensor import axes, collectives, local_shards
from tfgpu.parallel.tensor.blocks import Block, split_style
from tfgpu.parallel.tensor.parallel_layers import take_input_in_parts
from tfgpu.parallel.tensor.variable_splits import split_variables

_now = step_context.Slot("tensor.block_pass")
"""The `_Pass` of the innermost block that runs in this thread."""
_UNSET = object()


class _Reached(BaseException):
    """A pass has come to the row that it runs for; not an error, so that no handler of the user's takes it for one."""


def split(block: Block, placements: Sequence[device_placement.DevicePlacement], strategy) -> None:
    """Splits the variables of a block over devices, in place. From now on its `call` runs on them."""
    local_shards.draw_seeds_once()
    placements = tuple(placements)
    split_variables(block.splits, placements, strategy)
    for style, sublayer in block.sublayers():
        if style == "row":
            take_input_in_parts(sublayer, placements)
        _intercept(block, style, sublayer)
    stock = block.layer.call
    signature = inspect.signature(stock)

    @functools.wraps(stock)
    def call(*args, **kwargs):
        if in_symbolic_scope():
            return stock(*args, **kwargs)
        if local_shards.is_computing():
            raise InputError(
                f"{block.path!r} is split over devices, and is called between a column and a row of a layer around "
                "it. Give it the style 'whole' in that layer's plan."
            )
        return _Run(block, placements, stock, signature.bind(*args, **kwargs)).result()

    override(block.layer, "call", call, by=__name__)


@contextlib.contextmanager
def directly(layer: keras.layers.Layer, dropout: keras.layers.Layer | None) -> Iterator[Mapping[str, object]]:
    """In the block, sublayers of a layer whose `call` runs compute what they are called with.

    Args:
        layer: it may be split over devices, or not.
        dropout: the sublayer whose part of a draw is drawn.

    Yields:
        The attributes that the layer has on a device, for `attributes`.
    """
    now = _now.get()
    if now is None:
        yield {}
        return
    block = now.run.block
    style = next((style for style, sublayer in block.sublayers() if sublayer is dropout), None)
    with now.draws(style), _now.set_to(None):
        yield dict(block.counts) if block.layer is layer else {}


def _intercept(block: Block, style, sublayer: keras.layers.Layer) -> None:
    """Makes a sublayer ask the pass of its block what to compute."""
    name = quantized.call_name(sublayer)
    stock = getattr(sublayer, name)

    @functools.wraps(stock)
    def call(*args, **kwargs):
        now = _now.get()
        if now is None or now.run.block is not block:
            return stock(*args, **kwargs)
        return now.sublayer(sublayer, style, stock, args, kwargs)

    override(sublayer, name, call, by=__name__, listed="*.call *.quantized_call")


@dataclass
class _Entry:
    """One call of a sublayer in a run.

    Attributes:
        layer: the sublayer.
        is_in_region: whether each device calls it, between a column and a row.
        whole: the result, of a call that is made once for all devices.
        inputs: of a column, its input on each device.
        parts: results, or a row's inputs, by the number of the device.
    """

    layer: keras.layers.Layer
    is_in_region: bool
    whole: object = _UNSET
    inputs: Sequence = ()
    parts: dict = field(default_factory=dict)


class _Run:
    """One call of a block."""

    def __init__(self, block: Block, placements: tuple, stock: Callable, arguments: inspect.BoundArguments):
        self.block, self.placements, self._stock = block, placements, stock
        self.entries: list[_Entry] = []
        self.seeds: dict[int, list] = {}  # by the number of the sublayer's call with which a region begins
        self._copies: dict[int, tuple] = {}
        self._arguments = self._split_arguments(arguments)

    def result(self):
        """What the layer returns."""
        join = self.block.plan.styles.get("call")
        if join is not None:
            results = [self.run_pass(at) for at in range(len(self.placements))]
            with device_placement.scope(self.placements[0]):
                return collectives.sum_terms(results) if join == "sum" else tf.concat(results, join)
        result = self.run_pass(0)
        parts = self.block.plan.results
        further = result[1:] if isinstance(result, (tuple, list)) else ()
        if not any(tf.is_tensor(value) and value.shape.rank in parts for value in further):
            return result
        others = [self.run_pass(at)[1:] for at in range(1, len(self.placements))]
        joined = [self._along(value, parts, values) for value, *values in zip(further, *others, strict=True)]
        return type(result)([result[0], *joined])

    def run_pass(self, at: int):
        """Runs `call` for one device, to its end or to a row."""
        changed = dict(self.block.counts) | ({"add_loss": lambda loss: None} if at else {})
        with contextlib.ExitStack() as outer:
            outer.enter_context(device_placement.scope(self.placements[at]))
            outer.enter_context(local_shards.attributes(self.block.layer, changed))
            now = _Pass(self, at)
            outer.enter_context(_now.set_to(now))
            outer.callback(now.close_region)
            if "call" in self.block.plan.styles:
                now.open_region()
            found = self._arguments[at]
            return self._stock(*found.args, **found.kwargs)

    def copies(self, value: tf.Tensor) -> list[tf.Tensor]:
        """A tensor on each device; the same copies wherever it is used, so that their gradients are summed once."""
        if id(value) not in self._copies:
            self._copies[id(value)] = value, collectives.copy_to_all(value, self.placements)
        return self._copies[id(value)][1]

    def part_for(self, at: int, entry: _Entry) -> tf.Tensor:
        """A row's input on a device that is not the first."""
        if at not in entry.parts:
            with contextlib.suppress(_Reached):
                self.run_pass(at)
        return entry.parts[at]

    def own_heads(self, parts: Sequence[tf.Tensor], axis: int, heads: int) -> list[tf.Tensor]:
        """Of keys and values that are whole on each device, the head that each device's queries use."""

        def head(at: int, value: tf.Tensor) -> tf.Tensor:
            return tf.split(value, heads, axis)[at // self.block.repeats]

        return collectives.on_each(head, self.placements, range(len(parts)), parts)

    def _split_arguments(self, arguments: inspect.BoundArguments) -> list[inspect.BoundArguments]:
        """What `call` is given on each device."""
        found = [inspect.BoundArguments(arguments.signature, dict(arguments.arguments)) for _ in self.placements]
        repeats = self.block.repeats
        split = dict(self.block.plan.arguments)
        inputs = list(arguments.arguments)[:1] if "call" in self.block.plan.styles else []
        for name in [*split, *inputs]:
            value = arguments.arguments.get(name)
            if value is None:
                continue
            if name not in split:
                parts = self.copies(tf.convert_to_tensor(value))
            elif repeats == 1:
                parts = collectives.scatter(value, self.placements, split[name])
            else:
                heads = len(self.placements) // repeats
                parts = self.own_heads(collectives.copy_to_all(value, self.placements), split[name], heads)
            for own, part in zip(found, parts, strict=True):
                own.arguments[name] = part
        return found

    def _along(self, value: tf.Tensor, parts: Mapping[int, int], others: Sequence):
        """A result beside the first: the devices' parts side by side, if it is one."""
        if not tf.is_tensor(value) or value.shape.rank not in parts:
            return value
        with device_placement.scope(self.placements[0]):
            axis = parts[value.shape.rank]
            repeats = self.block.repeats if axis == -2 else 1  # of a cache, by heads of keys
            return tf.concat([value, *others][::repeats], axis)


class _Pass:
    """One run of a block's `call`, for one device.

    Args:
        run: the call of the block.
        at: the number of the device.
    """

    def __init__(self, run: _Run, at: int):
        self.run, self._at = run, at
        self._position = 0
        self._region: contextlib.ExitStack | None = None

    def open_region(self) -> None:
        """From here on, variables are the device's shards, and draws its part of one device's."""
        if self._region is None:
            self._region = contextlib.ExitStack()
            seeds = self.run.seeds.setdefault(self._position, [])
            shard = local_shards.computing(self._at, len(self.run.placements), -1, seeds)
            self._region.enter_context(shard)

    def close_region(self) -> None:
        """From here on, tensors are whole."""
        if self._region is not None:
            self._region.close()
            self._region = None

    def sublayer(self, layer: keras.layers.Layer, style, stock: Callable, args: tuple, kwargs: dict):
        """What a sublayer returns to `call`."""
        entry = self._entry(layer, style)
        if style == "row":
            return self._row(entry, stock, args, kwargs)
        if style in ("column", "key_value"):
            return self._column(entry, stock, args, kwargs, split_style(style, self.run.block.repeats) is None)
        if not entry.is_in_region:
            if entry.whole is _UNSET:
                with self._outside():
                    entry.whole = self._compiled(layer, stock, args, kwargs, 0)
            return entry.whole
        if self._at not in entry.parts:
            with self.draws(style):
                entry.parts[self._at] = self._compiled(layer, stock, args, kwargs, self._at)
        return entry.parts[self._at]

    def _entry(self, layer: keras.layers.Layer, style) -> _Entry:
        """The record of the next call; the first device's pass makes it."""
        entries, at = self.run.entries, self._position
        self._position += 1
        if at == len(entries):
            is_split = style in ("column", "key_value", "row")
            entries.append(_Entry(layer, self._region is not None and style != "whole" and not is_split))
            if entries[at].is_in_region and quantized.assigned_variables(layer):
                raise InputError(
                    f"{layer.name!r} keeps a state, and {self.run.block.path!r} calls it on each device's part. Give "
                    "it the style 'whole' in the plan, if its inputs are whole."
                )
        if entries[at].layer is not layer:
            raise InputError(
                f"{self.run.block.path!r} calls {layer.name!r} on one device where it calls "
                f"{entries[at].layer.name!r} on another: its `call` depends on more than its arguments, so it cannot "
                "be split. Leave it whole: `plan={...}` without it."
            )
        return entries[at]

    def _column(self, entry: _Entry, stock: Callable, args: tuple, kwargs: dict, is_whole: bool):
        """A column's part on this device; of keys and values that are whole, the head of this device's queries."""
        run = self.run
        if not entry.inputs and is_whole:
            with self._outside():
                whole = run.copies(stock(*args, **kwargs))
                heads = len(run.placements) // run.block.repeats
                entry.inputs = run.own_heads(whole, axes.axis_of(entry.layer, "column"), heads)
        elif not entry.inputs:
            with self._outside():
                entry.inputs = run.copies(tf.convert_to_tensor(args[0] if args else kwargs["inputs"]))
        self.open_region()
        own = entry.inputs[self._at]
        if is_whole:
            return own
        if self._at not in entry.parts:
            given = ((own, *args[1:]), kwargs) if args else ((), {**kwargs, "inputs": own})
            entry.parts[self._at] = self._compiled(entry.layer, stock, *given, self._at)
        return entry.parts[self._at]

    def _row(self, entry: _Entry, stock: Callable, args: tuple, kwargs: dict):
        """The sum over the devices. The pass of another device ends here until there is one."""
        if entry.whole is _UNSET:
            entry.parts[self._at] = args[0] if args else kwargs["inputs"]
            if self._at:
                raise _Reached
            with self._outside():
                terms = [self.run.part_for(at, entry) for at in range(len(self.run.placements))]
                entry.whole = stock(terms)
        self.close_region()
        return entry.whole

    def _compiled(self, layer: keras.layers.Layer, stock: Callable, args: tuple, kwargs: dict, at: int):
        """What a sublayer computes on one device, by XLA where that is asked for."""
        return compiled_calls.run(layer, stock, args, kwargs, self.run.placements[at].local_device)

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        """In the block, whole tensors are computed on the first device, as outside this pass."""
        first = device_placement.scope(self.run.placements[0])
        with _now.set_to(None), local_shards.computing_whole(), first:
            yield

    def draws(self, style: str | int | tuple[int, int] | None) -> contextlib.AbstractContextManager:
        """In the block, draws are this device's part along the axis that a plan gives a Dropout."""
        if style is None or isinstance(style, str):
            return contextlib.nullcontext()
        axis = style if isinstance(style, int) else style[self.run.block.repeats > 1]
        return rng.sharding(rng.DrawShard(axis, self._at, len(self.run.placements)))
