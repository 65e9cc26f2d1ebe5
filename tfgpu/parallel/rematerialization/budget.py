"""Chooses which runs of calls to recompute, so that activations fit a memory budget and the least time is lost.

What is kept are the tensors that the gradient of each call reads. Each call and its gradient are traced, not run, so a
batch that does not fit can be measured. A view (a reshape, an identity) counts as the tensor behind it; variables are
not counted.

Source: Chen et al., Training deep nets with sublinear memory cost, 2016; Jain et al., Checkmate, 2020.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import variables
from tfgpu.parallel import model_graph

_VIEWS = {"Identity", "IdentityN", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "EnsureShape"}
_FREE = {"ReadVariableOp", "VarHandleOp", "Const", "Placeholder", "Shape"}

Tensors = dict[str, int]
"""Bytes by a tensor's name."""


@dataclass(frozen=True)
class SavedTensors:
    """The tensors that a model's calls keep, in the order of the calls.

    Args:
        calls: of the model.
        own: for each call, what its gradient reads, including the call's inputs and results.
        inputs: for each call, its inputs: what a recomputed block that begins there must keep.
        produced: for each call, the names of its results.
        outputs: of the model, which the loss keeps.
    """

    calls: tuple[model_graph.Call, ...]
    own: tuple[Tensors, ...]
    inputs: tuple[Tensors, ...]
    produced: tuple[frozenset[str], ...]
    outputs: Tensors

    def inputs_of(self, begin: int, end: int) -> Tensors:
        """What the calls from `begin` to before `end` take from earlier calls."""
        own = set().union(*self.produced[begin:end])
        return {name: size for each in self.inputs[begin:end] for name, size in each.items() if name not in own}

    def peak(self, segments: Sequence[tuple[int, int, bool]]) -> int:
        """The largest number of bytes kept at once in a backward pass.

        Args:
            segments: all calls as (begin, end, whether they are recomputed).
        """
        kept: Tensors = {}
        most = 0
        for begin, end, is_recomputed in segments:
            within = _union(self.own[begin:end])
            inputs = self.inputs_of(begin, end) if is_recomputed else {}
            most = max(most, _sum(kept | inputs | within))
            kept |= inputs if is_recomputed else within
        return max(most, _sum(kept | self.outputs))

    def kept(self, segments: Sequence[tuple[int, int, bool]]) -> int:
        """The bytes kept from the forward to the backward pass."""
        return _sum(_union(self.inputs_of(b, e) if again else _union(self.own[b:e]) for b, e, again in segments))


def measure(model: keras.Model, batch=None, *, rows: int = 8) -> SavedTensors:
    """Traces each call of a functional model with its gradient. Nothing is computed, and nothing changes.

    Args:
        model: functional or Sequential, built.
        batch: inputs as the model takes them; only their shapes matter.
        rows: of the batch, where none is given.

    Raises:
        InputError: the model has no graph, or an input has an unknown size and no batch was given.
    """
    graph, calls = model_graph.functional(model), model_graph.calls(model)
    if batch is None:
        specs = [tf.TensorSpec(model_graph.shape_of_rows(each, rows), each.dtype) for each in graph.inputs]
    else:
        specs = [tf.TensorSpec(np.shape(x), t.dtype) for x, t in zip(tf.nest.flatten(batch), graph.inputs, strict=True)]
    found: list[tuple] = []

    @tf.function(autograph=False)
    def trace(*given):
        found.clear()  # a trace that makes a variable, such as Keras's global seed, is repeated
        values = {id(tensor): value for tensor, value in zip(graph.inputs, given, strict=True)}
        with keras.StatelessScope():
            for call in calls:
                inputs = _bytes_by_name(values[id(tensor)] for tensor in call.inputs)
                own = _trace_call(call, values)
                produced = frozenset(_bytes_by_name(values[id(tensor)] for tensor in call.outputs))
                found.append((own, inputs, produced))
            found.append(_bytes_by_name(values[id(tensor)] for tensor in graph.outputs))
        return tf.zeros([])

    trace.get_concrete_function(*specs)
    outputs = found.pop()
    own, inputs, produced = zip(*found, strict=True)
    return SavedTensors(tuple(calls), own, inputs, produced, outputs)


def _trace_call(call: model_graph.Call, values: dict) -> Tensors:
    """What the gradient of a call reads; adds the call's results to the values."""
    inputs = [values[id(tensor)] for tensor in call.inputs]
    if not inputs:
        return {}
    graph = inputs[0].graph
    before = len(graph.get_operations())
    with tf.GradientTape() as tape:
        floats = [value for value in inputs if value.dtype.is_floating]
        tape.watch(floats)
        model_graph.run([call], values, model_graph.in_training)
    made = [value for value in (values[id(tensor)] for tensor in call.outputs) if value.dtype.is_floating]
    forward = len(graph.get_operations())
    weights = [variables.own_copy(v.value) for v in getattr(call.operation, "trainable_variables", ())]
    if made:
        tape.gradient(made, [*floats, *weights])
    operations = graph.get_operations()
    own = {op.name for op in operations[before:forward]}
    names = _bytes_by_name(inputs)
    found: Tensors = {}
    for op in operations[forward:]:
        for tensor in map(_behind_views, op.inputs):
            if tensor.name in names or (tensor.op.name in own and tensor.op.type not in _FREE):
                found[tensor.name] = _bytes(tensor, [*inputs, *made])
    return found


def _behind_views(tensor) -> tf.Tensor:
    """The tensor that a view shows."""
    while tensor.op.type in _VIEWS:
        tensor = tensor.op.inputs[tensor.value_index]
    return tensor


def _bytes_by_name(tensors: Iterable) -> Tensors:
    return {tensor.name: _bytes(tensor) for tensor in map(_behind_views, tensors)}


def _bytes(tensor, like: Sequence = ()) -> int:
    """A tensor's bytes. What a loop keeps has no size in the graph, and counts as the largest tensor of `like`."""
    if tensor.shape.is_fully_defined() and tensor.dtype not in (tf.variant, tf.resource):
        return int(np.prod(tensor.shape)) * tensor.dtype.size
    return max((_bytes(one) for one in like), default=0) if tensor.dtype != tf.resource else 0


def _union(all_of: Iterable[Tensors]) -> Tensors:
    found: Tensors = {}
    for tensors in all_of:
        found |= tensors
    return found


_MAX_PLACES, _MAX_CHOICES, _HALVINGS = 160, 48, 24

Segments = tuple[tuple[int, int, bool], ...]
"""All calls as (begin, end, whether they are recomputed)."""


def cheapest(saved: SavedTensors, seconds: Sequence[float], budget: int) -> Segments | None:
    """The segments whose peak fits the budget and that lose the least time; None where none fit.

    By dynamic programming over the places to cut at: bytes kept before a place, against time lost.

    Args:
        saved: what the calls keep.
        seconds: that running each call again takes.
        budget: in bytes.
    """
    whole = ((0, len(saved.calls), False),)
    if saved.peak(whole) <= budget:
        return whole
    return _Search(saved).run(seconds, budget)


def smallest(saved: SavedTensors, seconds: Sequence[float]) -> Segments:
    """The segments with the lowest peak, to about one part in a thousand, that lose the least time."""
    search, no_cost = _Search(saved), [0.0] * len(saved.calls)
    high = saved.peak(((0, len(saved.calls), False),))
    low, best = 0, None
    for _ in range(_HALVINGS):
        middle = (low + high) // 2
        found = search.run(no_cost, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, saved.peak(found))
        if high - low <= high // 1000:
            break
    if best is None:
        return ((0, len(saved.calls), False),)
    return search.run(seconds, high) or best


class _Step(NamedTuple):
    """A segment from one place to a later one.

    Attributes:
        end: the number of the later place.
        is_recomputed: whether its calls run again.
        kept: bytes that it keeps for the backward pass.
        within: bytes that are kept while its backward pass runs.
        shared: bytes of `kept` that a segment before it keeps already, if that one is not recomputed.
    """

    end: int
    is_recomputed: bool
    kept: int
    within: int
    shared: int


class _Choice(NamedTuple):
    """A way to reach a place: bytes kept so far, seconds lost so far, the last step and where it began."""

    kept: int
    lost: float
    begin: int = 0
    step: _Step | None = None
    before: "_Choice | None" = None


class _Search:
    """The places to cut at, and the segments between them."""

    def __init__(self, saved: SavedTensors):
        self._saved = saved
        count = len(saved.calls)
        crossing = [sum(saved.inputs_of(at, count).values()) for at in range(count)]
        chosen = sorted(range(1, count), key=lambda at: (crossing[at], at))[:_MAX_PLACES]
        self._places = [0, *sorted(chosen), count]
        self._steps = [list(self._steps_from(number)) for number in range(len(self._places) - 1)]

    def _steps_from(self, number: int):
        saved, places = self._saved, self._places
        before = self._kept_between(number - 1) if number else {}
        inputs, within, made = {}, {}, set()
        for end in range(number + 1, len(places)):
            for at in range(places[end - 1], places[end]):
                inputs |= {name: size for name, size in saved.inputs[at].items() if name not in made}
                made |= saved.produced[at]
                within |= saved.own[at]
            if end == number + 1:
                yield _Step(end, False, _sum(within), _sum(within), _shared(within, before))
            yield _Step(end, True, _sum(inputs), _sum(inputs | within), _shared(inputs, before))

    def _kept_between(self, number: int) -> Tensors:
        """What the calls from one place to the next keep."""
        return _union(self._saved.own[self._places[number] : self._places[number + 1]])

    def run(self, seconds: Sequence[float], budget: int) -> Segments | None:
        """The segments that fit the budget and lose the least time, or None."""
        before = [0.0]
        for each in seconds:
            before.append(before[-1] + each)
        # For each place, choices whose last segment was recomputed (0), and whose last segment was kept (1).
        table: list[list[list[_Choice]]] = [[[], []] for _ in self._places]
        table[0][0].append(_Choice(0, 0.0))
        for number, steps in enumerate(self._steps):
            for was_kept in (0, 1):
                choices = table[number][was_kept] = _undominated(table[number][was_kept])
                for step in steps:
                    lost = before[self._places[step.end]] - before[self._places[number]] if step.is_recomputed else 0.0
                    shared = step.shared if was_kept else 0
                    target = table[step.end][0 if step.is_recomputed else 1]
                    for choice in choices:  # fewest bytes first
                        if choice.kept + step.within - shared > budget:
                            break
                        kept = choice.kept + step.kept - shared
                        target.append(_Choice(kept, choice.lost + lost, number, step, choice))
        ends = self._within_budget(table[-1], budget)
        return self._segments(min(ends, key=lambda choice: (choice.lost, choice.kept))) if ends else None

    def _within_budget(self, last: list[list[_Choice]], budget: int) -> list[_Choice]:
        """The choices at the end that fit the budget together with the model's outputs."""
        outputs, own = self._saved.outputs, self._kept_between(len(self._places) - 2)
        size = _sum(outputs)
        found = [choice for choice in last[0] if choice.kept + size <= budget]
        return found + [choice for choice in last[1] if choice.kept + size - _shared(outputs, own) <= budget]

    def _segments(self, choice: _Choice) -> Segments:
        """The segments that led to a choice; neighbors that are kept are joined."""
        found: list[tuple[int, int, bool]] = []
        while choice.step is not None:
            begin, end, is_recomputed = self._places[choice.begin], self._places[choice.step.end], choice.step[1]
            if not is_recomputed and found and not found[-1][2]:
                end = found.pop()[1]
            found.append((begin, end, is_recomputed))
            choice = choice.before
        return tuple(reversed(found))


def _undominated(choices: list[_Choice]) -> list[_Choice]:
    """The choices that no other one beats in both bytes and seconds, fewest bytes first; of many, an even selection."""
    found: list[_Choice] = []
    for choice in sorted(choices, key=lambda one: one[:2]):
        if not found or choice.lost < found[-1].lost:
            found.append(choice)
    step = len(found) / _MAX_CHOICES
    return found if step <= 1 else [found[int(at * step)] for at in range(_MAX_CHOICES - 1)] + found[-1:]


def _shared(one: Tensors, other: Tensors) -> int:
    return sum(size for name, size in one.items() if name in other)


def _sum(tensors: Tensors) -> int:
    return sum(tensors.values())
