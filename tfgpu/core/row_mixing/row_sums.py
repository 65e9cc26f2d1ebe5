"""Sums over replicas, and all replicas' rows in one tensor, with the gradients that one device has."""

import contextlib
import functools
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgpu.core import batch_rows, collectives, logits, step_context, travel

_in_jacobian = step_context.Slot("row_sums.in_jacobian")


class Meets(Exception):
    """A function that is tried on drawn rows brings the replicas' rows together by itself."""


class Waits(Meets):
    """A part of a trial needs what the other parts say."""


class Meetings:
    """Where replicas of a function that is tried would meet: its parts run one after another, and more than once.

    A part that comes to a meeting leaves what it says there, and waits. The next time it goes on with what all say.

    Args:
        count: of the parts.
    """

    def __init__(self, count: int):
        self._count, self._said, self._part, self._at = count, [], 0, 0

    def begin(self, part: int) -> None:
        """A part begins, from 0."""
        self._part, self._at = part, 0

    @property
    def were_held(self) -> bool:
        """Whether the parts have met."""
        return bool(self._said)

    def exchange(self, values: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """What each part says at this meeting, in their order.

        Raises:
            Waits: not all have said it yet.
        """
        if self._at == len(self._said):
            self._said.append({})
        said = self._said[self._at]
        said.setdefault(self._part, list(values))
        if len(said) < self._count:
            raise Waits("it combines values of all replicas")
        self._at += 1
        return [said[part] for part in range(self._count)]

    def reduced(self, reduce_op: object, value: object) -> object:
        """What `ReplicaContext.all_reduce` gives, with its gradient."""
        is_mean = getattr(reduce_op, "value", reduce_op).upper() == "MEAN"

        def reduce(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            sums = [tf.add_n(each) for each in zip(*self.exchange(values), strict=True)]
            return [each / tf.cast(self._count, each.dtype) for each in sums] if is_mean else sums

        leaves = [tf.convert_to_tensor(each) for each in tf.nest.flatten(value)]
        return tf.nest.pack_sequence_as(value, _linear(reduce, reduce)(*leaves))

    def gathered(self, rows: tf.Tensor) -> tf.Tensor:
        """The rows of all parts, with the gradient of `all_rows`."""
        start, count = 0, int(rows.shape[0])

        def gather(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            nonlocal start
            parts = [each for (each,) in self.exchange(values)]
            start = sum(int(each.shape[0]) for each in parts[: self._part])
            return [tf.concat(parts, 0)]

        def own(upstream: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            return [tf.add_n([each for (each,) in self.exchange(upstream)])[start : start + count]]

        (found,) = _linear(gather, own)(rows)
        return found


def over_replicas(values: list[tf.Tensor], *, are_apart: bool = False, are_used_alike: bool = False) -> list[tf.Tensor]:
    """Sums tensors over all replicas, in one differentiable collective.

    The step weighs the replicas' gradients by their shares of the batch. In Keras's `train_step` the loss itself is
    weighed, so the gradient of a sum is the sum of the upstream gradients. In a user's own step each replica multiplies
    its gradients by its own share at the end. A gradient of another replica's loss needs that replica's share instead:
    so each upstream gradient is weighed before the sum, and the sum is divided by this replica's share.

    Args:
        values: of the same shapes on all replicas.
        are_apart: a value whose sum has no part in the loss has no gradient (None), although other values have one.
        are_used_alike: all replicas compute the same of the sums, so that these have the same gradient on each.
    """
    facts = step_context.step()
    weigh_at_end = facts is not None and not facts.loss_is_weighed

    def add(values: list) -> list:
        return collectives.all_reduce(values, in_groups=True)

    def add_weighed(values: list) -> list:
        sums = add([step_context.times_share(value) for value in values])
        return [tf.math.divide_no_nan(total, tf.cast(facts.share, total.dtype)) for total in sums]

    def add_gradients(values: list) -> list:
        if are_used_alike and _in_jacobian.get():
            return [value * step_context.num_replicas(value.dtype) for value in values]
        return add_weighed(values) if weigh_at_end else add(values)

    function = _linear_apart if are_apart and len(values) > 1 else _linear
    return function(add, add_gradients)(*values)


def in_jacobian() -> contextlib.AbstractContextManager:
    """In the block gradients are taken of one number after another, in a loop in which replicas cannot meet."""
    return _in_jacobian.set_to(True)


def _linear(forward: Callable[[list], list], backward: Callable[[list], list]) -> Callable:
    """A linear function with its gradient, whose own gradient is the function: derivatives of any order are right."""

    @tf.custom_gradient
    def apply(*values):
        def gradient(*upstream):
            upstream = [tf.convert_to_tensor(each) for each in upstream]  # slices, of some rows of a sum (`tf.gather`)
            with _beside(upstream[0]):
                return _linear(backward, forward)(*upstream)

        return forward(list(values)), gradient

    return apply


def _linear_apart(forward: Callable[[list], list], backward: Callable[[list], list]) -> Callable:
    """As `_linear`, where a value whose result has no gradient has none (None).

    TensorFlow hands zeros to a function of several results for those that have no gradient. Zeros would go on to
    weights that have no part in the loss, which the optimizer leaves alone on one device, and would then decay. So each
    result notes that its gradient came; that of the function runs after them.
    """

    def apply(*values):
        came: set[int] = set()

        @tf.custom_gradient
        def together(*values):
            def gradient(*upstream):
                places = sorted(came)
                came.clear()  # a persistent tape may ask again, for another loss
                function = _linear_apart if len(places) > 1 else _linear
                with _beside(upstream[places[0]]):
                    sums = function(backward, forward)(*(upstream[at] for at in places))
                found = dict(zip(places, sums, strict=True))
                return [found.get(at) for at in range(len(upstream))]

            return forward(list(values)), gradient

        return [_noting(came, at, value) for at, value in enumerate(together(*values))]

    return apply


def _beside(value: tf.Tensor) -> contextlib.AbstractContextManager:
    """Runs the operations of the block where a tensor is: gradients have no device, and a replica may have several."""
    return tf.device(value.device) if value.device else contextlib.nullcontext()


def _noting(came: set[int], at: int, value: tf.Tensor) -> tf.Tensor:
    """The value; its gradient adds `at` to `came`."""

    def gradient(upstream):
        came.add(at)
        return upstream

    return tf.custom_gradient(lambda value: (value, gradient))(value)


def of_batch(value: tf.Tensor) -> tf.Tensor:
    """The sum over the whole batch, from a replica's sum over its rows; for your own layers and losses.

    Use it where neither a mean over rows nor a variable's `aggregation="sum"` fits, as in a running sum
    `x = 0.9 x + 0.1 sum(rows)`. Every replica must call it, outside `tf.cond` and loops. It is differentiable.

    Args:
        value: a sum over this replica's rows, a tensor of floats.

    Returns:
        The sum over all replicas' rows; `value` itself on one device and outside a step (of `fit`, `evaluate` or a
        `strategy.run` by hand). With
        `tfgpu.strategies.averaging()`, where replicas do not communicate in a step, an estimate: this replica's sum
        divided by its share of the batch.

    Example:
        In a layer's `call`: `self.total.assign(0.9 * self.total + 0.1 * of_batch(keras.ops.sum(x, axis=0)))`.

        >>> float(of_batch(tf.constant(3.0)))  # one device sees all rows
        3.0
    """
    if step_context.step() is None and not batch_rows.can_communicate():
        return value
    if step_context.has_local_forward():
        return tf.math.divide_no_nan(value, tf.cast(step_context.share(), value.dtype))
    (total,) = over_replicas([tf.where(step_context.has_rows(), value, tf.zeros_like(value))])
    return total


def most(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """The maximum of each value over the replicas that hold rows; not differentiable."""
    if not values or step_context.has_local_updates():
        return values
    if step_context.current().is_trying and step_context.step() is None:
        return [tf.reduce_max(tf.stack(each), 0) for each in zip(*meetings().exchange(values), strict=True)]
    lowest = [tf.fill(tf.shape(v), v.dtype.min) for v in values]
    mine = [tf.where(step_context.has_rows(), v, low) for v, low in zip(values, lowest, strict=True)]
    tables = collectives.all_reduce([travel.at_own_place(value) for value in mine])
    return [tf.reduce_max(table, 0) for table in tables]


def meetings() -> Meetings:
    """The meetings of the trial that runs here.

    Raises:
        Meets: there are none in this trial, or in the piece of it that runs.
    """
    recorder = step_context.current().recorder
    if recorder is None or recorder.meetings is None or recorder.is_split:
        raise Meets("it combines values of all replicas")
    return recorder.meetings


def all_rows(rows: tf.Tensor, *, are_used_alike: bool = False) -> tf.Tensor:
    """The rows of all replicas, in the order of the batch, on each replica; differentiable for floats.

    Takes numbers of any dtype, and booleans. A stand-in row, of a replica without rows, is left out. A replica that
    communicates with no other gets its own rows. `are_used_alike` is as in `over_replicas`.
    """
    return logits.carried(rows, functools.partial(_all_rows, are_used_alike=are_used_alike))


def _all_rows(rows: tf.Tensor, *, are_used_alike: bool) -> tf.Tensor:
    if step_context.current().is_trying and step_context.step() is None:
        return meetings().gathered(tf.convert_to_tensor(rows))
    if step_context.has_local_forward():
        return rows
    sent = tf.cast(rows, tf.float32) if rows.dtype == tf.float16 else travel.to_sum(rows)
    offset, count, total = _place(rows)
    own = tf.where(step_context.has_rows(), sent, tf.zeros_like(sent))
    table = tf.pad(own, [[offset, total - offset - count], *[[0, 0]] * (own.shape.rank - 1)])
    table = tf.ensure_shape(table, [_known_total(rows), *sent.shape[1:]])
    if rows.dtype.is_floating:
        (table,) = over_replicas([table], are_used_alike=are_used_alike)
    else:
        (table,) = collectives.all_reduce([table])
    return tf.ensure_shape(travel.from_sum(table, rows.dtype), [_known_total(rows), *rows.shape[1:]])


def own_rows(table: tf.Tensor, rows: tf.Tensor) -> tf.Tensor:
    """The rows of a table of all replicas' rows that belong to this replica's `rows`."""
    if step_context.has_local_forward():
        return table
    offset, count, _ = _place(rows)
    return table[offset : offset + count]


def _place(rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """The offset of these rows in the table of all replicas' rows, their number, and the number of rows in the table.

    A model may make several rows of each example, and a replica without rows holds a stand-in row.
    """
    facts, count = batch_rows.known_rows(), tf.shape(rows)[0]
    an_example = tf.maximum(count // tf.maximum(facts.local, 1), 1)
    return facts.offset * an_example, count, facts.total * an_example


def _known_total(rows: tf.Tensor) -> int | None:
    """The number of rows in the table if it is static: then many steps can run in one call."""
    facts = batch_rows.known_rows()
    local, total = tf.get_static_value(facts.local), tf.get_static_value(facts.total)
    if rows.shape[0] is None or local is None or total is None:
        return None
    return int(total) * max(rows.shape[0] // max(int(local), 1), 1)
