"""Arguments with the rows of all replicas, results cut back to a replica's own, and state that counts once."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

import keras
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.core import batch_rows, collectives, logits, replication, step_context, worker_rows
from tfgpu.core.row_mixing import row_sums
from tfgpu.core.row_mixing.trials.drawn_inputs import rows_each
from tfgpu.core.state import layer_state
from tfgpu.errors import InputError


def may_meet() -> bool:
    """Whether this is a replica of several in a step, or in a `strategy.run` by hand, and sees its own rows."""
    context = replication.replica_context()
    is_one_of_several = context is not None and context.num_replicas_in_sync > 1
    return is_one_of_several and batch_rows.local_rows() is not None and not step_context.has_local_forward()


def is_in_step() -> bool:
    """Whether this thread runs a replica's step, or one of a `strategy.run` by hand."""
    return batch_rows.local_rows() is not None


def can_meet() -> bool:
    """Whether replicas that `may_meet` can communicate here: not in a condition, a loop or a tf.function of its own."""
    graph = getattr(threading.current_thread(), "graph", None)
    is_apart = not tf.executing_eagerly() and graph is not tf.compat.v1.get_default_graph()
    return not is_apart and batch_rows.can_communicate()


def check_can_meet(named: str) -> None:
    """Refuses to gather in a condition, a loop or a tf.function of its own.

    Args:
        named: what needs all rows, as the begin of a sentence.

    Raises:
        InputError: replicas cannot meet here.
    """
    if not can_meet():
        raise InputError(
            f"{named} needs all rows of the batch, but is called in a tf.cond, a loop or a tf.function, where "
            "replicas cannot communicate. Call it outside, or mark its class with `tfgpu.by_rows` if it may see one "
            "replica's rows."
        )


def with_rows(arguments: object) -> list[tf.Tensor]:
    """The tensors of a structure that have rows of the batch."""
    leaves = keras.tree.flatten(arguments)
    found = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor) and rows_each(leaf) is not None]
    return list({id(leaf): leaf for leaf in found}.values())


def can_travel(arguments: object) -> bool:
    """Whether everything that may have rows can be gathered: no ragged or sparse tensors, and no texts."""
    leaves = keras.tree.flatten(arguments)
    has_texts = any(leaf.dtype == tf.string for leaf in with_rows(arguments))
    return not has_texts and not any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves)


def of_all_replicas(arguments: object, named: str) -> object:
    """The same structure, of the whole batch: every tensor with rows has those of all replicas, masks included.

    Args:
        arguments: a structure.
        named: what needs them, as the begin of a sentence.

    Raises:
        InputError: replicas cannot meet here, or the rows are texts, ragged or sparse.
    """
    check_can_meet(named)
    if not can_travel(arguments):
        raise InputError(
            f"{named} needs all rows of the batch, but its inputs are strings, ragged or sparse, which cannot be sent "
            "between replicas. Convert them to dense numbers first, or mark its class with `tfgpu.by_rows` if it "
            "treats each row separately."
        )
    rows = with_rows(arguments)
    found = {id(leaf): with_mask(leaf) for leaf in rows}
    return keras.tree.map_structure(lambda leaf: found.get(id(leaf), leaf), arguments)


def with_mask(rows: tf.Tensor, *, are_used_alike: bool = False) -> tf.Tensor:
    """`row_sums.all_rows`, and those of the rows' mask."""
    found = row_sums.all_rows(rows, are_used_alike=are_used_alike)
    return private.carry_mask(rows, found, row_sums.all_rows)


def are_rows(value: object, axis: object) -> bool:
    """Whether these are rows of the step's batch, which `ReplicaContext.all_gather` puts one after another."""
    leaves = tf.nest.flatten(value)
    return tf.get_static_value(axis) == 0 and all(isinstance(v, tf.Tensor) and rows_each(v) is not None for v in leaves)


def by_replica(rows: tf.Tensor) -> tf.Tensor:
    """What `ReplicaContext.all_gather` gives in a step: all rows, those of replica 0 first.

    TensorFlow's own knows no uneven rows, has the gradient of a sum of the replicas' losses, and fails in a loop.
    """
    context, facts, table = replication.replica_context(), step_context.rows(), row_sums.all_rows(rows)
    count = context.num_replicas_in_sync
    places = [replication.shard_index(context.strategy, replica) for replica in range(count)]
    if step_context.has_local_forward() or places == sorted(places):
        return table
    each = tf.maximum(tf.shape(rows)[0] // tf.maximum(facts.local, 1), 1)
    ranges = [worker_rows.row_range(facts.total, place, count) for place in places]
    return tf.gather(table, tf.concat([tf.range(at * each, (at + local) * each) for local, at, *_ in ranges], 0))


def own_rows(leaf: object, has_rows: bool | None = None) -> object:
    """This replica's rows of a result of the whole batch, and of its mask.

    Args:
        leaf: a tensor; anything else is returned as it is.
        has_rows: whether it has rows; None says so by its shape.
    """
    if not tf.is_tensor(leaf) or isinstance(leaf, tf.Variable) or not leaf.shape.rank:
        return leaf
    facts = batch_rows.known_rows()
    total, local = tf.get_static_value(facts.total), tf.get_static_value(facts.local)
    leading, says_shape = leaf.shape[0], has_rows is None
    if says_shape:
        has_rows = leading is None or (total is not None and bool(leading) and leading % int(total) == 0)
    is_told_later = not has_rows and says_shape and total is None and bool(leading)
    if not (has_rows or is_told_later):
        return leaf
    each = tf.shape(leaf)[0] // facts.total
    least = 0 if step_context.step() is None else 1  # a step has a stand-in row for none
    first, after = facts.offset * each, (facts.offset + tf.maximum(facts.local, least)) * each
    if is_told_later:
        are_rows = tf.equal(leading, facts.total)
        first, after = tf.where(are_rows, first, 0), tf.where(are_rows, after, leading)

    def cut(rows: tf.Tensor) -> tf.Tensor:
        found = rows[first:after]
        if None in (leading, total, local):
            return found
        return tf.ensure_shape(found, [max(int(local), least) * (leading // int(total)), *rows.shape[1:]])

    return private.carry_mask(leaf, logits.carried(leaf, cut), lambda mask: own_rows(mask, True))


def part_by_hand(value: tf.Tensor, reduction: str | None) -> tf.Tensor:
    """This replica's part of a loss that is one number, where a loop by hand sums the replicas' gradients.

    Keras returns one number unchanged, which such a loop would count once for each replica. A mean that Keras takes
    counts by the replica's share already.

    Args:
        value: what a loss's `call` returns.
        reduction: the loss's.
    """
    share = None
    if step_context.step() is None and value.shape.rank == 0 and reduction not in (None, "none"):
        share = batch_rows.known_share()
    if share is not None and (recorder := step_context.current().recorder) is not None:
        recorder.has_shares = True
    return value if share is None else tf.math.multiply_no_nan(value, tf.cast(share, value.dtype))


@contextlib.contextmanager
def as_whole_batch(variables: Iterable[keras.Variable]) -> Iterator[None]:
    """Within the block this replica computes what one device does, from all rows.

    Args:
        variables: what may be assigned within. Those that the replicas sum up when they are read (a metric's) count
            once.
    """
    summed = [each for each in variables if each.synchronization == "on_read" and each.aggregation == "sum"]
    held = collectives.all_reduce([tf.identity(layer_state.own(each)) for each in summed]) if summed else []
    for variable, value in zip(summed, held, strict=True):
        layer_state.put_own(variable, value)
    facts = batch_rows.known_rows()
    with step_context.as_one_device(facts.total), layer_state.assigning_alike():
        yield
    is_first = tf.logical_and(facts.local > 0, facts.offset == 0)
    for variable in summed:
        value = tf.identity(layer_state.own(variable))
        layer_state.put_own(variable, tf.where(is_first, value, tf.zeros_like(value)))
