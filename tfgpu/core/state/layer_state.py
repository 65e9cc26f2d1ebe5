"""A layer's own state: what becomes of a variable that a layer assigns while replicas run a step.

On one device such a variable is made of the whole batch; under replicas each one sees its own rows. The rule, within a
step of `fit`, `evaluate` or `Trainer` and in a `strategy.run` by hand on rows of a batch, for `assign`, `assign_add`
and `assign_sub` of a `keras.Variable`:

=====================  =================================================================================================
`aggregation`          every replica ends with
=====================  =================================================================================================
`"none"` or `"mean"`   the average of the replicas' values, each weighed by its rows of the batch: a running mean of the
                       batch's means is one device's to rounding. Values that agree stay as they are, to the bit.
                       Whole numbers and truth values have no average: the first replica's.
`"sum"`                the sum of the assigned values; `assign_add` and `assign_sub` sum what they add. For counts and
                       sums over the batch: `self.add_weight(..., aggregation="sum")`.
`"only_first_replica"` the first replica's value.
=====================  =================================================================================================

A value made only of constants and of variables that all replicas agree on (`steps.assign_add(1)`, a decay, a moving
copy of weights) is the same on every replica and costs nothing. Any other assignment costs one collective. A replica
without rows adds nothing. Replicas do not agree on `on_read` variables.

Each replica keeps its own value: of a variable with `synchronization="on_read"` (as metrics have; TensorFlow puts the
values together when it is read outside); of Keras's layers whose state is alike everywhere already (BatchNormalization,
SpectralNormalization, seed generators; `rnn_states` has those of a stateful RNN); and where a layer assigns a plain
`tf.Variable`. Within `tf.cond`, `tf.while_loop` or a compiled function each keeps its own, too, since replicas cannot
meet there: a trial sees code that assigns there what depends on its rows, and it gets all rows (`noting_assignments`).

Between two averagings (`tfgpu.strategies.averaging()`) an average stays each replica's own, and is averaged with the
weights.

A statistic that is no mean and no sum cannot be told from one. The running sum `x = 0.9 x + 0.1 sum(rows)`, say, needs
the sum from all replicas first: `sums.of_batch(sum(rows))`.
"""

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import tensorflow as tf

from tfgpu.compat import slots, variables
from tfgpu.compat.keras import in_stateless_scope
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_rows, collectives, replication, step_context
from tfgpu.core.state import variable_rows


@dataclass
class Noted:
    """What a trial assigns, by the variables' `id`.

    Attributes:
        added: to which something was added.
        inside: assigned in a condition or a loop, which in a step is a graph of its own.
        depth: how many conditions and loops the code is in.
    """

    added: set[int] = field(default_factory=set)
    inside: set[int] = field(default_factory=set)
    depth: int = 0


_noted = step_context.Slot("layer_state.noted")


def assign_for_all() -> None:
    """Makes what a layer assigns to its variables one device's, by the rule above."""

    @wrap("Variable.direct_assign")
    def direct_assign(stock, self, value):
        if step_context.has_local_updates():
            step_context.step().assigned_variables[id(self)] = self
        if replication.replica_context() is None and self.synchronization == "on_read" and variables.has_copies(self):
            # TensorFlow would sum the replicas' new values, on workers by a collective, for the caller to ignore.
            return variables.held(self).assign(value, read_value=False)
        if step_context.current().assigns_alike:
            replication.check_is_replicated(self)
            return put_own(self, _once(self, value))
        if not _is_shared():
            _tell_own(self, value)
            return stock(self, value)
        replication.check_is_replicated(self)
        if self.synchronization == "on_read":
            mark_as_differing(self)
            return stock(self, agreed(self, value))
        return put_own(self, agreed(self, value))

    @wrap("Variable.assign")
    def assign(stock, self, value):
        if (noted := _noted.get()) is not None and noted.depth:
            noted.inside.add(id(self))
        return stock(self, value)

    for name, sign in (("assign_add", 1), ("assign_sub", -1)):
        _sum_what_is_added(name, sign)
    for layer in ("keras.layers.BatchNormalization", "keras.layers.SpectralNormalization"):
        _keep_own(layer, "call")
    _keep_own("SeedGenerator", "next")
    variable_rows.reach_rows_of_replicated_variables()


def _tell_own(variable, value: tf.Tensor) -> None:
    """Says that each replica of a loop by hand keeps a value of its own, where they cannot meet."""
    context = step_context.current()
    if context.given_rows is None or context.keeps_own_state or step_context.gradients_are_summed():
        return
    is_alike = variable.synchronization == "on_read" or in_stateless_scope() or batch_rows.can_communicate()
    if not is_alike and not is_same_everywhere(value):
        batch_rows.tell_apart(f"the variable {variable.path!r}", "each replica keeps the value of its own rows")


def agreed(variable, value: tf.Tensor) -> tf.Tensor:
    """What the rule makes of a value that this replica assigns: one device's, where replicas assign together."""
    if not _is_shared():
        return value
    if variable.synchronization == "on_read":
        return _kept_without_rows(variable, value)
    if variable.aggregation == "sum":
        return _sum(value)
    if is_same_everywhere(value):
        return value
    if not _has_average(variable):
        return _first(value)
    return _kept_without_rows(variable, value) if step_context.has_local_forward() else _average(value)


def put(variable, value: tf.Tensor) -> None:
    """Assigns a value to which the rule has been applied: to this replica's copy, or to a stateless scope."""
    if not _is_on_replica() or in_stateless_scope():
        with step_context.scope(keeps_own_state=True):
            variable.assign(value)
    else:
        put_own(variable, value)


def _sum_what_is_added(name: str, sign: int) -> None:
    @wrap(f"Variable.{name}")
    def assign_more(stock, self, value):
        if (noted := _noted.get()) is not None:
            noted.added.add(id(self))
        if not _is_shared() or self.aggregation != "sum" or self.synchronization == "on_read":
            return stock(self, value)
        total = self.value + sign * _sum(tf.cast(tf.convert_to_tensor(value), self.value.dtype))
        put(self, total)
        return total


def _keep_own(owner: str, name: str) -> None:
    @wrap(f"{owner}.{name}")
    def call(stock, self, *args, **kwargs):
        with step_context.scope(keeps_own_state=True):
            return stock(self, *args, **kwargs)


@contextlib.contextmanager
def noting_assignments() -> Iterator[Noted]:
    """Notes what the block, a trial, assigns."""
    with _noted.set_to(Noted()):
        yield _noted.get()


@contextlib.contextmanager
def inside_a_graph() -> Iterator[None]:
    """The block, in a trial, is a branch or a loop, which in a step is a graph of its own."""
    noted = _noted.get() or Noted()
    noted.depth += 1
    try:
        yield
    finally:
        noted.depth -= 1


def assigning_alike():
    """For the length of the block every replica assigns what the others do, each to its own copy."""
    return step_context.scope(assigns_alike=True, keeps_own_state=True)


def _is_shared() -> bool:
    """Whether this assignment is one that replicas make together, and where they can meet."""
    if not _is_on_replica() or step_context.gradients_are_summed() or step_context.current().keeps_own_state:
        return False
    # A replica's thread begins in this graph; in the graph of a branch, a loop or a function, merge_call fails.
    return getattr(threading.current_thread(), "graph", None) is tf.compat.v1.get_default_graph()


def _is_on_replica() -> bool:
    """Whether this is a replica of several in a step, or in a `strategy.run` by hand on rows of a batch."""
    if step_context.step() is not None:
        return True
    context = replication.replica_context()
    is_given = step_context.current().given_rows is not None and not step_context.current().is_trying
    return is_given and context is not None and context.num_replicas_in_sync > 1 and batch_rows.can_communicate()


def move_own(variable) -> None:
    """Says that this replica's step moves its own copy of a variable: after a block of steps they are averaged."""
    mark_as_differing(variable)
    if step_context.step() is not None:
        step_context.step().own_variables[id(variable)] = variable


def mark_as_differing(variable) -> None:
    """Says that each replica has a value of its own of this variable."""
    slots.of(variables.local_copy(variable)).differs_by_replica = True


def is_same_everywhere(value) -> bool:
    """Whether a value in a graph is made only of constants and of variables that are the same on every replica."""
    if not tf.is_tensor(value):
        return True
    if not hasattr(value, "graph"):
        return False  # an eager value has no history
    left, seen = [value.op], set()
    while left:
        op = left.pop()
        if op in seen or op.type == "Const":
            continue
        seen.add(op)
        if op.type == "ReadVariableOp":
            copy = variables.read_by(op)
            if copy is None or slots.get(copy, "differs_by_replica"):
                return False
            continue
        if not op.inputs or (op.op_def is not None and op.op_def.is_stateful):
            return False
        left += [tensor.op for tensor in op.inputs]
    return True


def _has_average(variable) -> bool:
    return variable.aggregation != "only_first_replica" and tf.as_dtype(variable.dtype).is_floating


def _average(value: tf.Tensor) -> tf.Tensor:
    """The replicas' average by rows; in float64, so that equal values come back as they were."""
    rows = batch_rows.known_rows()
    local, total = rows.local, rows.total
    part = tf.math.multiply_no_nan(tf.cast(value, tf.float64), tf.cast(local, tf.float64))
    (part,) = collectives.all_reduce([part])
    return tf.cast(part / tf.cast(total, tf.float64), value.dtype)


def _sum(value: tf.Tensor) -> tf.Tensor:
    (part,) = collectives.all_reduce([tf.where(step_context.has_rows(), value, tf.zeros_like(value))])
    return part


def _first(value: tf.Tensor) -> tf.Tensor:
    wide = tf.float64 if value.dtype.is_floating else tf.int64
    is_first = replication.replica_context().replica_id_in_sync_group == 0
    (part,) = collectives.all_reduce([tf.where(is_first, tf.cast(value, wide), tf.zeros_like(value, wide))])
    return tf.cast(part, value.dtype)


def _once(variable, value: tf.Tensor) -> tf.Tensor:
    """Of a value that all replicas assign, and whose sum over them is read: that of the first, else what it was."""
    facts, is_summed = step_context.step(), variable.synchronization == "on_read" and variable.aggregation == "sum"
    if not is_summed or facts is None or facts.whole is None or step_context.gradients_are_summed():
        return value
    kept = tf.cast(own(variable), value.dtype)
    return tf.where(replication.replica_context().replica_id_in_sync_group == 0, value, kept)


def _kept_without_rows(variable, value: tf.Tensor) -> tf.Tensor:
    if step_context.surely_has_rows():
        return value
    return tf.where(step_context.has_rows(), value, tf.cast(variable.value, value.dtype))


def own(variable) -> tf.Variable:
    """This replica's copy of a Keras variable."""
    return variables.local_copy(variable)


def put_own(variable, value: tf.Tensor) -> tf.Tensor:
    """Assigns this replica's copy alone: with an `aggregation` TensorFlow would put the values together once more."""
    copy = own(variable)
    copy.assign(tf.cast(value, copy.dtype))
    return value
