"""Which rows of the global batch a replica holds: known from the data, or from a small collective between replicas."""

import contextlib
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import collectives, step_context, travel
from tfgpu.core.replication import replica_context, replica_number, shard_index
from tfgpu.core.sparse import index_origin
from tfgpu.core.step_context import RowRange, Step

_log = logging.getLogger(__name__)


@dataclass
class GivenRows:
    """The rows that a hand-written `strategy.run` gave to this replica.

    Attributes:
        local: their number, int32 scalar.
        graph: the graph in which the replica began; None if it runs eagerly.
        scalar_ways: by metric, how it counts one number (`row_mixing.scalar_updates`), in the order of first updates.
        are_even: it is known that all replicas hold the same number of rows.
        counted: names of the metrics that have counted one number in this call, by their `id`s.
        range: which rows of the global batch they are, once the replicas have exchanged their numbers of rows.
    """

    local: tf.Tensor
    graph: tf.Graph | None
    scalar_ways: Mapping[str, str]
    are_even: bool = False
    range: RowRange | None = None
    counted: dict[int, str] = field(default_factory=dict)


def begin_step(local: tf.Tensor, place: tuple[tf.Tensor, tf.Tensor] | None = None, **facts: bool) -> Step:
    """Returns the facts of the step that this replica begins.

    Args:
        local: rows of this replica, int32 scalar.
        place: the number of rows of the batch before them, and of the whole batch; None if the data does not tell: the
            replicas then exchange their numbers in a small collective.
        facts: `jit`, `has_added_shapes`, `local_updates` and `local_forward` of `Step`.
    """
    offset, total = _exchanged_place(local) if place is None else place
    index_origin.mark((local, offset), alike=False)
    return Step(RowRange(local, offset, total), _share_of(local, total), **facts)


@contextlib.contextmanager
def given(local: tf.Tensor, scalar_ways: Mapping[str, str], *, are_even: bool = False) -> Iterator[None]:
    """Inside the block, this replica holds `local` rows of a batch; for use outside a step.

    Args:
        local: int32 scalar.
        scalar_ways, are_even: as in `GivenRows`.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    with step_context.scope(given_rows=GivenRows(local, graph, scalar_ways, are_even)):
        yield


def known_rows() -> RowRange | None:
    """Which rows this replica holds: the step's, else those that a hand-written `strategy.run` was given.

    In a hand-written loop the first call exchanges the numbers of rows, in the graph in which the replicas began and
    outside any condition or loop in it. Inside a tf.function that a replica calls, the result is None.
    """
    context = step_context.current()
    found = context.given_rows
    if context.recorder is not None and context.recorder.parts:
        return context.trial_rows
    if step_context.step() is not None or found is None or replica_context() is None or not _is_within(found.graph):
        return step_context.rows()
    if found.range is None:
        with contextlib.nullcontext() if found.graph is None else found.graph.as_default():
            found.range = RowRange(found.local, *_exchanged_place(found.local))
    return found.range


def local_rows() -> tf.Tensor | None:
    """How many rows this replica holds (int32 scalar): the step's, else those that a `strategy.run` was given, or None.

    It costs no collective.
    """
    found = step_context.current().given_rows
    if step_context.step() is not None:
        return step_context.rows().local
    return None if found is None or replica_context() is None else found.local


def known_share() -> tf.Tensor | None:
    """This replica's fraction of the global batch (float32 scalar); None where `known_rows` is None."""
    found = known_rows()
    if step_context.step() is not None or found is None:
        return step_context.share()
    return _share_of(found.local, found.total)


def can_communicate() -> bool:
    """Whether replicas can run a collective here.

    True in a step, and in a hand-written `strategy.run` outside any condition, loop or tf.function in it.
    """
    found = step_context.current().given_rows
    if step_context.step() is not None or found is None or replica_context() is None:
        return step_context.step() is not None
    return found.graph is (None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())


def counts_alike(what: str) -> None:
    """Warns once of what a replica of a `strategy.run` by hand counts without its share of the batch, if that matters.

    Args:
        what: "the loss 'mse'".
    """
    found = step_context.current().given_rows
    if found is not None and not found.are_even:
        tell_apart(what, "it counts each replica alike, which differs where replicas hold different numbers of rows")


def tell_apart(what: str, becomes: str) -> None:
    """Warns once of what a replica of a `strategy.run` by hand does where it cannot communicate.

    Args:
        what: "the variable 'mean'".
        becomes: in what it differs from one device's.
    """
    context, replica = step_context.current(), replica_context()
    if context.given_rows is None or context.is_trying or replica is None or replica.num_replicas_in_sync == 1:
        return
    warn_once(
        f"In a function of `strategy.run`, {what} is in a condition, a loop or a tf.function, where replicas cannot "
        f"communicate: {becomes}. Move it to the function that `strategy.run` runs.",
    )


def warn_once(message: str) -> None:
    """Warns on a replica, once for each strategy."""
    told = vars(slots.of(replica_context().strategy)).setdefault("told", set())
    if message not in told:
        told.add(message)
        _log.warning(message)


def _is_within(graph: tf.Graph | None) -> bool:
    """Whether the default graph is `graph`, or a condition or loop in it; `graph` is None for eager execution."""
    if tf.executing_eagerly():
        return graph is None
    found = tf.compat.v1.get_default_graph()
    while found is not None and found is not graph and getattr(found, "is_control_flow_graph", False):
        found = found.outer_graph
    return found is graph


def _share_of(local: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.cast(local, tf.float32), tf.cast(total, tf.float32))


def _exchanged_place(local: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Exchanges the replicas' numbers of rows; returns the rows before this replica's, and the rows of the batch."""
    replica = replica_context()
    if replica.num_replicas_in_sync == 1:
        return tf.constant(0), local
    at = shard_index(replica.strategy, replica_number(replica))
    mine = travel.at_own_place(tf.cast(local, tf.float32), at)
    counts = tf.cast(collectives.sum_small([mine])[0], tf.int32)
    return tf.where(local > 0, tf.reduce_sum(counts[:at]), 0), tf.reduce_sum(counts)
