"""What a thread knows of the training step that it traces.

`tf.distribute` traces each local replica in its own thread, so each thread has one `StepContext`. Its fields
describe the innermost block that has set them:

    with step_context.scope(draws_alike=True):
        ...

Other packages of tfgpu keep their own per-thread values in a `Slot`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.core.replication import replica_context

if TYPE_CHECKING:
    import keras

    from tfgpu.core.batch_rows import GivenRows
    from tfgpu.core.randomness.row_draws import DrawShard
    from tfgpu.core.randomness.trace_choices import Choices
    from tfgpu.core.row_mixing.trials.step_recorder import Recorder
    from tfgpu.core.row_mixing.whole_batch import WholeBatch
    from tfgpu.core.step_blocks import Run
    from tfgpu.core.traffic import Sent


@dataclass(frozen=True)
class RowRange:
    """Which rows of the global batch a replica holds: int32 scalar tensors.

    Attributes:
        local: how many; 0 where the batch is too small for all replicas.
        offset: rows of the global batch before them; 0 where the replica holds none.
        total: rows of the global batch.
    """

    local: tf.Tensor
    offset: tf.Tensor
    total: tf.Tensor


@dataclass
class Step:
    """The facts of the step that a replica runs.

    Attributes:
        rows: which rows of the global batch it holds.
        share: its rows as a fraction of the global batch (float32 scalar); 0 where it holds only a stand-in row.
        jit: XLA compiles the step (collectives stay outside).
        loss_is_weighed: the loss under the tape is multiplied by the share, so the gradients must not be.
        loss_is_sum: the loss is a vector, whose gradient is a sum over rows and needs no share.
        loss_is_divided: the loss under the tape is divided by the number of replicas, so its gradient is multiplied.
        has_varying_shapes: a collective's shape varies between steps.
        has_added_shapes: the trace knows the number of rows, which the shapes of the user's data do not tell.
        local_updates: gradients are not summed: each replica updates its own weights, which are averaged later.
        local_forward: the forward pass, too, sees this replica's rows only.
        applied_optimizers: those that updated weights in a step of local updates, by `id`.
        assigned_variables: Keras variables that were assigned in a step of local updates, by `id`.
        own_variables: Keras variables of which each replica changes its own copy, by `id`; they are averaged over the
            replicas after each block of steps.
        whole: set while user code sees the whole batch: what it takes to call layers by rows.
        is_within_whole: this is a layer's call by rows within such a step.
    """

    rows: RowRange
    share: tf.Tensor
    jit: bool = False
    loss_is_weighed: bool = False
    loss_is_sum: bool = False
    loss_is_divided: bool = False
    has_varying_shapes: bool = False
    has_added_shapes: bool = False
    local_updates: bool = False
    local_forward: bool = False
    applied_optimizers: dict = field(default_factory=dict)
    assigned_variables: dict = field(default_factory=dict)
    own_variables: dict = field(default_factory=dict)
    whole: "WholeBatch | None" = None
    is_within_whole: bool = False


@dataclass
class StepContext:
    """What one thread knows.

    Attributes:
        run: the `fit` or `evaluate` that calls.
        steps_per_call: the length of the blocks of every `fit` inside, if set.
        gives_row_ranges: epoch iterators created here tell each replica which rows it gets.
        step: the facts of the replica's step; None outside `fit`, `evaluate` and `Trainer`.
        given_rows: the rows that a hand-written `strategy.run` gave to this replica.
        gradients_are_summed: the optimizer works on gradients that are already summed over replicas.
        sent: counts the bytes that go into collectives.
        choices: the choices of Python code that all traces of a step share.
        models: the models whose layers' attributes are this replica's own.
        results: the metric results that the step has read, if they are recorded.
        unread_model: the model whose metrics are read after the block of steps rather than in each step.
        keeps_own_state: a layer's assignments change this replica's copy only.
        assigns_alike: every replica assigns the same values, each to its own copy.
        draws_alike: random draws are the same on all replicas.
        draws_follow_input: random draws have the shape of a layer's input.
        draw_shard: the part of a draw that this device computes.
        draws_by_tensorflow: how many draws by `tf.random` all replicas have made alike.
        draws_as_xla: XLA compiles the step on one device, so random numbers are those that it makes.
        batch_rows: of a full batch, where the data says it.
        losses_are_plain: a metric computes a loss of Keras's, which is then one of this replica's rows alone.
        is_trying: a piece of code is tested on random rows; replicas must not communicate.
        trial_rows: which of the random rows the code is tested on; random draws go by row.
        recorder: records what a step does that is tested on random rows.
        extensions: values of `Slot`s.
    """

    run: "Run | None" = None
    steps_per_call: int | None = None
    gives_row_ranges: bool = False
    step: Step | None = None
    given_rows: "GivenRows | None" = None
    gradients_are_summed: bool = False
    sent: "Sent | None" = None
    choices: "Choices | None" = None
    models: "tuple[keras.Model, ...]" = ()
    results: dict | None = None
    unread_model: "keras.Model | None" = None
    keeps_own_state: bool = False
    assigns_alike: bool = False
    draws_alike: bool = False
    draws_follow_input: bool = False
    draw_shard: "DrawShard | None" = None
    draws_by_tensorflow: int = 0
    draws_as_xla: bool = False
    batch_rows: int | None = None
    losses_are_plain: bool = False
    is_trying: bool = False
    trial_rows: RowRange | None = None
    recorder: "Recorder | None" = None
    extensions: dict[str, Any] = field(default_factory=dict)


class _Thread(threading.local):
    def __init__(self):
        self.context = StepContext()


_thread = _Thread()


def current() -> StepContext:
    """This thread's context."""
    return _thread.context


@contextlib.contextmanager
def scope(**fields: Any) -> Iterator[None]:
    """Sets fields of this thread's context inside the block.

    Example:
        >>> with scope(draws_alike=True):
        ...     current().draws_alike
        True
    """
    context = current()
    before = {name: getattr(context, name) for name in fields}
    vars(context).update(fields)
    try:
        yield
    finally:
        vars(context).update(before)


def copied() -> dict[str, Any]:
    """What this thread knows of the rows that it computes on, for `scope`: of use where code runs again."""
    context = current()
    names = ("step", "keeps_own_state", "assigns_alike", "draws_alike", "draws_follow_input", "draw_shard")
    return {name: getattr(context, name) for name in names} | {"extensions": dict(context.extensions)}


def adopt(other: StepContext) -> None:
    """Makes this thread know what another one knew when `other` was its context."""
    _thread.context = dataclasses.replace(other, extensions=dict(other.extensions))


class Slot:
    """A per-thread value that a feature keeps in the step context; None outside any block that sets it.

    Args:
        name: unique in tfgpu, such as `"embeddings.rows"`.

    Example:
        >>> slot = Slot("example.color")
        >>> with slot.set_to("red"):
        ...     slot.get()
        'red'
    """

    def __init__(self, name: str):
        self._name = name

    def get(self) -> Any:
        return current().extensions.get(self._name)

    @contextlib.contextmanager
    def set_to(self, value: Any) -> Iterator[None]:
        """Sets the value inside the block."""
        extensions = current().extensions
        before = extensions.get(self._name)
        extensions[self._name] = value
        try:
            yield
        finally:
            extensions[self._name] = before


def step() -> Step | None:
    """The facts of the step that this replica runs, or None outside a step."""
    return current().step if replica_context() is not None else None


@contextlib.contextmanager
def as_one_device(total: tf.Tensor | int) -> Iterator[None]:
    """Inside the block, this replica holds all `total` rows, and communicates with no other."""
    rows = RowRange(*(tf.convert_to_tensor(number, tf.int32) for number in (total, 0, total)))
    facts, whole = current().step, {"rows": rows, "share": tf.constant(1.0), "local_forward": True}
    with scope(step=Step(**whole) if facts is None else dataclasses.replace(facts, **whole)):
        yield


def gradients_are_summed() -> bool:
    """Whether this replica applies gradients that are already summed over replicas."""
    return current().gradients_are_summed


def has_local_updates() -> bool:
    """Whether this replica updates its own weights in this step."""
    return step() is not None and step().local_updates


def has_local_forward() -> bool:
    """Whether the forward pass of this step sees this replica's rows only."""
    return step() is not None and step().local_forward


def rows() -> RowRange | None:
    """Which rows of the step's global batch this replica holds, or None outside a step."""
    facts = step()
    return facts.rows if facts is not None else None


def share() -> tf.Tensor | None:
    """This replica's fraction of the global batch (float32 scalar), or None outside a step."""
    facts = step()
    return facts.share if facts is not None else None


def times_share(value: tf.Tensor) -> tf.Tensor:
    """`value` times the share; 0 if this replica holds no rows, even if `value` is NaN (the mean of an empty batch)."""
    return tf.math.multiply_no_nan(value, tf.cast(share(), value.dtype))


def _local_rows() -> tf.Tensor | None:
    """How many rows this replica holds, in a step or in a `strategy.run` by hand."""
    facts, given = rows(), current().given_rows
    if facts is not None:
        return facts.local
    return None if given is None or replica_context() is None else given.local


def has_rows(dtype=tf.bool) -> tf.Tensor:
    """Whether this replica holds rows of the batch, as a scalar of `dtype`; True where replicas hold none."""
    found = _local_rows()
    return tf.cast(True if found is None else found > 0, dtype)


def surely_has_rows() -> bool:
    """Whether it is known before the step runs that this replica holds rows; True where replicas hold none."""
    found = _local_rows()
    return found is None or bool(tf.get_static_value(found))


def rows_are_even() -> bool:
    """Whether it is known before the step runs that all replicas hold the same number of rows."""
    found, context = rows(), replica_context()
    if found is None or context is None:
        return False
    local, total = tf.get_static_value(found.local), tf.get_static_value(found.total)
    return local is not None and total is not None and local * context.num_replicas_in_sync == total


def num_replicas(dtype: str = "float32") -> tf.Tensor:
    """The number of replicas that train together, as a scalar of `dtype`."""
    return tf.constant(replica_context().num_replicas_in_sync, dtype)


def xla_scope(facts: Step) -> contextlib.AbstractContextManager:
    """Lets XLA compile what it can of the block, if the step asks for it; collectives stay outside."""
    return tf.xla.experimental.jit_scope() if facts.jit else contextlib.nullcontext()


def outside_xla():
    """Keeps the operations of the block out of XLA's clusters, in a step that XLA compiles."""
    facts = current().step
    is_compiled = facts is not None and facts.jit
    return tf.xla.experimental.jit_scope(compile_ops=False) if is_compiled else contextlib.nullcontext()


def is_in_xla() -> bool:
    """Whether XLA compiles what is traced now: in a step that asks for it, or in `tf.function(jit_compile=True)`."""
    facts = step()
    return (facts is not None and facts.jit) or private.is_compiled_by_xla(tf.compat.v1.get_default_graph())


def draws_as_xla() -> bool:
    """Whether random numbers are those that XLA makes: it compiles what is traced now, or would on one device."""
    if tf.executing_eagerly():
        return False
    return current().draws_as_xla or is_in_xla()
