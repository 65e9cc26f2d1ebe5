"""A `train_step` or `test_step` that sees the whole batch, while the model's calls stay on each replica's rows.

The user's code runs on every replica, on the same numbers: the whole batch, the outputs of all replicas' rows, and the
gradients of the whole batch. What it computes of them (a loss over pairs of rows, a norm of gradients, a second
update) is then one device's, whatever it is. Three hooks make it so:

- A call of a layer gets this replica's rows of its arguments, unless it is one of Keras's without variables. Its
  outputs are gathered; losses that it adds and outputs without rows are averaged by rows.
- `tape.gradient` sums over replicas. Each replica holds a part of the derivative of one and the same number, so the
  derivative begins with 1/N on each of N replicas. Where it passes a gathered tensor, the parts are summed.
- An assignment is the same on all replicas. Metrics, whose state is summed over replicas later, move on the first one.

In a condition, a loop or a function within the step replicas cannot meet: there each computes all rows by itself.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import layers
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, collectives, replication, step_context, travel, worker_rows
from tfgpu.core.row_mixing import gathering, row_sums
from tfgpu.core.sparse import index_origin
from tfgpu.core.state import python_places
from tfgpu.core.step_context import RowRange, Step
from tfgpu.errors import InputError

_UNEQUAL = (
    "A layer was called with tensors of unequal numbers of rows, in a train_step that sees the whole batch. Give what "
    "has no rows of the batch a first axis of 1, or mark the step with `@tfgpu.by_rows`."
)


@dataclass
class WholeBatch:
    """What a replica knows while its step sees the whole batch.

    Attributes:
        facts: of the step by rows.
        at: the replica's place among the shards of a batch.
        count: the number of replicas.
        own_rows: of a tensor of the whole batch, by `id`: the tensor, this replica's rows of it, and which they are. No
            gradient flows from those rows to the tensor.
    """

    facts: Step
    at: int | tf.Tensor
    count: int
    own_rows: dict = field(default_factory=dict)


def show_whole_batch() -> None:
    """Wraps what a step that sees the whole batch calls: layers, `add_loss` and the gradient of a tape."""

    @wrap("keras.Layer.__call__")
    def call(stock, self, *args, **kwargs):
        whole, recorder = _whole(), step_context.current().recorder
        if recorder is not None and not _needs_no_rows(self):
            return recorder.noting_outputs(functools.partial(stock, self, *args, **kwargs))
        if whole is None or _needs_no_rows(self):
            return stock(self, *args, **kwargs)
        return _call_by_rows(whole, functools.partial(stock, self), self, args, kwargs)

    @wrap("keras.Layer.add_loss")
    def add_loss(stock, self, loss):
        facts, recorder = step_context.step(), step_context.current().recorder
        if recorder is not None and recorder.is_split:
            loss = keras.tree.map_structure(lambda each: each * (recorder.stop - recorder.start) / recorder.total, loss)
        by_rows = facts is not None and facts.is_within_whole and not facts.local_forward
        if by_rows and _can_meet():  # what a layer on all rows adds is the whole batch's already
            loss = keras.tree.map_structure(_mean_by_rows, loss)
        return stock(self, loss)

    @wrap("tf.GradientTape.gradient")
    def gradient(stock, self, target, sources, output_gradients=None, *args, **kwargs):
        whole = _whole()
        if whole is None:
            return stock(self, target, sources, output_gradients, *args, **kwargs)
        return _gradient(whole, functools.partial(stock, self), target, sources, output_gradients, args, kwargs)

    @wrap("tf.GradientTape.jacobian")
    def jacobian(stock, self, target, sources, *args, **kwargs):
        if _whole() is None:
            return stock(self, target, sources, *args, **kwargs)
        return _jacobian(functools.partial(stock, self, target), sources, args, kwargs)

    @wrap("tf.GradientTape.batch_jacobian")
    def batch_jacobian(stock, self, target, source, *args, **kwargs):
        if _whole() is None:
            return stock(self, target, source, *args, **kwargs)
        return _jacobian(functools.partial(stock, self, target), source, args, kwargs)

    @wrap("tf.GradientTape.watch")
    def watch(stock, self, tensor):
        whole = _whole()
        for each in tf.nest.flatten(tensor) if whole is not None else ():
            whole.own_rows.pop(id(each), None)
        return stock(self, tensor)


def _gradient(whole: WholeBatch, stock: Callable, target, sources, output_gradients, args: tuple, kwargs: dict):
    """What one device has: the sum of the replicas' parts; of a gathered tensor, the rows' gradients together."""
    given = tf.nest.map_structure(lambda _: None, target) if output_gradients is None else output_gradients
    seeds = tf.nest.map_structure(lambda of, by: _seed(of, by, whole.count), target, given)
    kept = [whole.own_rows.get(id(source)) for source in tf.nest.flatten(sources)]
    asked = [source if k is None else k[1] for source, k in zip(tf.nest.flatten(sources), kept, strict=True)]
    found = tf.nest.flatten(stock(target, asked, seeds, *args, **kwargs))
    for at, known in enumerate(kept):
        if known is not None and found[at] is not None:
            with step_context.scope(step=_facts_by_rows(whole, known[2])):
                found[at] = row_sums.all_rows(found[at])
    others = [at for at, known in enumerate(kept) if known is None]
    sums = _summed([found[at] for at in others], [asked[at] for at in others])
    for at, total in zip(others, sums, strict=True):
        found[at] = total
    return tf.nest.pack_sequence_as(sources, found)


def _jacobian(stock: Callable, sources, args: tuple, kwargs: dict):
    """As `_gradient`: each replica derives its part of all numbers, and the parts are summed after the loop."""
    whole, flat = _whole(), tf.nest.flatten(sources)
    if any(id(each) in whole.own_rows for each in flat):
        raise InputError("A jacobian needs `tape.watch(x)` before the model is called on `x`.")
    with row_sums.in_jacobian(), step_context.scope(step=dataclasses.replace(step_context.step(), whole=None)):
        found = tf.nest.flatten(stock(sources, *args, **kwargs))
    parts = [None if each is None else each / tf.cast(whole.count, each.dtype) for each in found]
    return tf.nest.pack_sequence_as(sources, _summed(parts, flat))


def run(step: Callable, data):
    """Runs a step, which the context describes by rows, on the whole batch; returns its logs.

    Args:
        step: `train_step` or `test_step`.
        data: what this replica was given: a `ReplicaBatch`, or its rows alone.
    """
    context, facts = replication.replica_context(), step_context.step()
    at = replication.shard_index(context.strategy, replication.replica_number(context))
    whole = WholeBatch(facts, at, context.num_replicas_in_sync)
    rows = data.data if isinstance(data, batch_sharding.ReplicaBatch) else data
    given = data.whole if isinstance(data, batch_sharding.ReplicaBatch) else None
    batch = tf.nest.map_structure(_gathered, rows) if given is None else given
    for all_rows, own in zip(tf.nest.flatten(batch), tf.nest.flatten(rows), strict=True):
        if tf.is_tensor(all_rows) and all_rows.shape.rank:
            whole.own_rows[id(all_rows)] = all_rows, own, facts.rows
    index_origin.mark(batch, alike=True)
    alike = {"assigns_alike": True, "keeps_own_state": True, "draws_alike": True}
    with step_context.as_one_device(facts.rows.total), step_context.scope(**alike):
        inside = dataclasses.replace(step_context.step(), whole=whole, loss_is_weighed=True, loss_is_sum=False)
        with step_context.scope(step=inside):
            logs = step(batch)
    facts.has_varying_shapes |= inside.has_varying_shapes
    return logs


def sees_whole_batch() -> bool:
    """Whether the code that runs now, on a replica, sees the whole batch, and gradients that are summed."""
    facts = step_context.step()
    return facts is not None and facts.whole is not None


def part_of(gradients: list) -> list:
    """This replica's part of gradients that all replicas hold: the sum of the parts is the gradient."""
    count = step_context.num_replicas("float32")

    def part(gradient):
        if gradient is None:
            return None
        if isinstance(gradient, tf.IndexedSlices):
            return tf.IndexedSlices(part(gradient.values), gradient.indices, gradient.dense_shape)
        return gradient / tf.cast(count, gradient.dtype)

    return [part(gradient) for gradient in gradients]


def _whole() -> WholeBatch | None:
    """What a step that sees the whole batch knows, where replicas can meet."""
    facts = step_context.step()
    return facts.whole if facts is not None and facts.whole is not None and _can_meet() else None


def _can_meet() -> bool:
    # A replica's thread begins in this graph; in the graph of a branch, a loop or a function, merge_call fails.
    return getattr(threading.current_thread(), "graph", None) is tf.compat.v1.get_default_graph()


def _needs_no_rows(layer: keras.layers.Layer) -> bool:
    """Whether a layer is one of Keras's without variables (dropout, pooling): cheap, and alike on all replicas.

    The answer must be the same on all replicas, one of which may be building the layer: so it is False for what is
    built when it is called.
    """
    is_own = not type(layer).__module__.startswith("keras.")
    return not is_own and layer.built and len(layers.layers_within(layer)) == 1 and not layer.variables


def _call_by_rows(whole: WholeBatch, stock: Callable, layer: keras.layers.Layer, args: tuple, kwargs: dict):
    tensors = [t for t in keras.tree.flatten((args, kwargs)) if _has_rows(t)]
    if not tensors:
        return stock(*args, **kwargs)
    rows, held = _rows_of(whole, tensors[0])
    first = tensors[0].shape[0]
    args, kwargs = keras.tree.map_structure(
        lambda t: _own(whole, t, rows, held) if _has_rows(t) and t.shape[0] == first else t, (args, kwargs)
    )
    given = next(t for t in keras.tree.flatten((args, kwargs)) if _has_rows(t))
    held = held if given.shape[0] is None else given.shape[0]
    facts = _facts_by_rows(whole, rows)
    fields = {"assigns_alike": False, "keeps_own_state": False, "draws_alike": False}
    with step_context.scope(step=facts, **fields):
        with _gathered_attributes(whole, layer, held, rows):
            outputs = layer(*args, **kwargs)  # `own_layers` gives it all rows if it mixes them
        outputs = keras.tree.map_structure(lambda out: _of_batch(whole, out, held, rows), outputs)
    step_context.step().has_varying_shapes |= facts.has_varying_shapes
    return outputs


def _facts_by_rows(whole: WholeBatch, rows: RowRange) -> Step:
    """The facts of a call on a replica's rows of a batch, which need not be the step's."""
    share = tf.math.divide_no_nan(tf.cast(rows.local, tf.float32), tf.cast(rows.total, tf.float32))
    as_weighed = {"loss_is_weighed": True, "loss_is_sum": False, "is_within_whole": True}
    return dataclasses.replace(whole.facts, rows=rows, share=share, **as_weighed)


def _has_rows(value) -> bool:
    return tf.is_tensor(value) and not isinstance(value, tf.Variable) and bool(value.shape.rank)


def _rows_of(whole: WholeBatch, tensor) -> tuple[RowRange, int | tf.Tensor]:
    """Which rows of a tensor of all rows are this replica's, and how many it holds: one that stands in included."""
    if id(tensor) in whole.own_rows:
        _, own, rows = whole.own_rows[id(tensor)]
        return rows, worker_rows.rows_in(own)
    local, offset, total, held = worker_rows.row_range(worker_rows.rows_in(tensor), whole.at, whole.count)
    found = RowRange(*(tf.convert_to_tensor(n, tf.int32) for n in (local, offset, total)))
    index_origin.mark((found.local, found.offset), alike=False)
    return found, held


def _own(whole: WholeBatch, tensor, rows: RowRange, held):
    """This replica's rows of a tensor of all rows."""
    kept = whole.own_rows.get(id(tensor))
    if kept is not None:
        return kept[1]
    if tensor.shape[0] is None:
        same = tf.debugging.assert_equal(worker_rows.rows_in(tensor), rows.total, _UNEQUAL)
        with tf.control_dependencies([same]):
            tensor = tf.identity(tensor)
    own = worker_rows.sliced(tensor, rows.offset, held)
    return private.carry_mask(tensor, own, lambda mask: worker_rows.sliced(mask, rows.offset, held))


def _of_batch(whole: WholeBatch, value, held, rows: RowRange):
    """What the replicas' values are for the whole batch: their rows together, or the mean by rows."""
    if not tf.is_tensor(value) or isinstance(value, tf.Variable):
        return value
    if not _has_rows(value) or not _are_rows(value, held):
        return _mean_by_rows(value)
    found = gathering.with_mask(value, are_used_alike=True)
    whole.own_rows[id(found)] = found, value, rows
    return found


def _are_rows(value, held) -> bool:
    """Whether the first axis is the batch's: a multiple of the rows held, or unknown as they are."""
    rows = value.shape[0]
    if isinstance(held, int):
        return rows is None or (held > 0 and rows % held == 0)
    return rows is None


def _gathered(value):
    return row_sums.all_rows(value) if _has_rows(value) else value


def _mean_by_rows(value):
    """The mean over replicas, each weighed by its rows; of whole numbers, the first replica's."""
    value = tf.convert_to_tensor(value)
    if value.dtype.is_floating:
        return row_sums.over_replicas([step_context.times_share(value)], are_used_alike=True)[0]
    is_first = replication.replica_context().replica_id_in_sync_group == 0
    return collectives.all_reduce([tf.where(is_first, value, tf.zeros_like(value))])[0]


@contextlib.contextmanager
def _gathered_attributes(whole: WholeBatch, layer: keras.layers.Layer, held, rows) -> Iterator[None]:
    """Gathers tensors that the user's layers keep in attributes while they run: a model's `self.z`, say."""
    own = [each for each in layers.layers_within(layer) if not type(each).__module__.startswith("keras.")]
    before = [dict(vars(each)) for each in own]
    yield
    for each, was in zip(own, before, strict=True):
        for name, value in list(vars(each).items()):
            if value is not was.get(name) and isinstance(value, python_places.TENSORS):
                vars(each)[name] = _of_batch(whole, value, held, rows)


def _seed(target, given, count: int):
    """With what the derivative of a target begins on each replica."""
    if given is not None:
        return given / tf.cast(count, given.dtype)
    target = tf.convert_to_tensor(target)
    return tf.ones_like(target) / tf.cast(count, target.dtype)


def _summed(gradients: list, sources: list) -> list:
    """The replicas' parts of gradients, added up; the largest of numbers that replace their variable (float8)."""
    largest = [at for at, each in enumerate(sources) if getattr(each, "overwrite_with_gradient", False)]
    slices = [at for at, each in enumerate(gradients) if isinstance(each, tf.IndexedSlices)]
    dense = [at for at, each in enumerate(gradients) if each is not None and at not in {*largest, *slices}]
    found = list(gradients)
    for places, total in ((largest, row_sums.most), (slices, collectives.sum_gradients), (dense, _differentiable_sum)):
        places = [at for at in places if gradients[at] is not None]
        if places:
            for at, value in zip(places, total([gradients[at] for at in places]), strict=True):
                found[at] = value
    return found


def _differentiable_sum(values: list[tf.Tensor]) -> list[tf.Tensor]:
    sent = travel.to_reduce_dtype(values)
    return travel.from_reduce_dtype(row_sums.over_replicas(sent, are_used_alike=True), values)
