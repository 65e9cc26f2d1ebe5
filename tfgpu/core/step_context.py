"""What one replica knows of the others while it runs a step.

`tf.distribute` runs each local replica in a thread of its own, so the facts of a step lie in a `threading.local`.
Outside a step of `fit`, `evaluate`, `predict` or `Trainer` there are none, and every question here answers `None`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import keras
import numpy as np
import tensorflow as tf

from tfgpu.core import traffic
from tfgpu.errors import InputError

_PACK_BYTES = 1 << 20
"""Of one variable's slices on all replicas together, up to which they travel with the dense gradients."""
_BASE = 1 << 12  # of the two digits of a row's number: each is exact in float32

_here = threading.local()


@dataclass(frozen=True)
class Rows:
    """Where a replica's rows lie in the global batch: int32 scalar tensors.

    Attributes:
        local: rows that this replica holds; 0 where the batch was too small for it.
        offset: rows before its own in the global batch; 0 where it has none.
        total: rows of the global batch.
    """

    local: tf.Tensor
    offset: tf.Tensor
    total: tf.Tensor


@dataclass
class Step:
    """The facts of the step that a replica is running.

    Attributes:
        rows: where its rows lie in the global batch.
        share: its part of the global batch, 0 to 1 (float32 scalar); 0 where it has only a row that stands in.
        jit: the step is compiled by XLA (collectives then stay outside).
        loss_is_weighed: the loss under the tape is multiplied by the share, so the gradients must not be.
        loss_is_sum: the loss is a vector, whose gradient is a sum over rows: it needs no share.
        loss_is_divided: the loss under the tape is divided by the number of replicas: its gradient is to be multiplied.
        varies: a collective has another shape in another step.
        apart: the gradients do not meet: each replica updates its own weights, which are averaged later.
        alone: besides, the forward pass sees this replica's rows only.
        optimizers: those that updated weights, by `id`, in a step apart.
        assigned: Keras variables that were assigned, by `id`, in a step apart.
    """

    rows: Rows
    share: tf.Tensor
    jit: bool = False
    loss_is_weighed: bool = False
    loss_is_sum: bool = False
    loss_is_divided: bool = False
    varies: bool = False
    apart: bool = False
    alone: bool = False
    optimizers: dict = field(default_factory=dict)
    assigned: dict = field(default_factory=dict)


def is_spread(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy keeps a copy of the model on each replica, and the replicas meet in collectives."""
    return isinstance(strategy, (tf.distribute.MirroredStrategy, tf.distribute.MultiWorkerMirroredStrategy))


def context() -> tf.distribute.ReplicaContext | None:
    """The replica context under a strategy of replicas (of one replica too: it has `merge_call` as well), else None."""
    found = tf.distribute.get_replica_context()
    return found if found is not None and is_spread(found.strategy) else None


def step() -> Step | None:
    """The facts of the step which this replica is in, or None."""
    return getattr(_here, "step", None) if context() is not None else None


@contextlib.contextmanager
def stepping(facts: Step | None):
    """Makes `facts` the step of this replica for the length of the block; None: it is in no step."""
    before = getattr(_here, "step", None)
    _here.step = facts
    try:
        yield facts
    finally:
        _here.step = before


@contextlib.contextmanager
def holding_all(total: tf.Tensor | int):
    """For the length of the block this replica is as one device that holds all `total` rows, and meets no other."""
    rows = Rows(*(tf.convert_to_tensor(number, tf.int32) for number in (total, 0, total)))
    facts = getattr(_here, "step", None)
    whole = {"rows": rows, "share": tf.constant(1.0), "alone": True}
    with stepping(Step(**whole) if facts is None else dataclasses.replace(facts, **whole)):
        yield


@contextlib.contextmanager
def gradients_met():
    """For the length of the block this replica's optimizer works on gradients that are already summed."""
    before = getattr(_here, "met", False)
    _here.met = True
    try:
        yield
    finally:
        _here.met = before


def have_met() -> bool:
    """Whether this replica is applying gradients that are already summed over replicas."""
    return getattr(_here, "met", False)


def plan_of(strategy: tf.distribute.Strategy):
    """How the replicas of a strategy train apart (an `averaging.Plan`), or None where they train together."""
    return getattr(strategy, "_tfgpu_plan", None)


def is_apart() -> bool:
    """Whether this replica updates weights of its own in this step."""
    return step() is not None and step().apart


def is_alone() -> bool:
    """Whether this replica meets no other in the forward pass of this step."""
    return step() is not None and step().alone


def rows() -> Rows | None:
    """Where this replica's rows lie in the global batch of the running step, or None outside a step."""
    facts = step()
    return facts.rows if facts is not None else None


@dataclass
class Held:
    """What a hand-written `strategy.run` gave this replica: rows that it can be asked for where a draw needs them."""

    local: tf.Tensor
    graph: tf.Graph | None
    rows: Rows | None = None


@contextlib.contextmanager
def holding(local: tf.Tensor):
    """For the length of the block this replica, outside a step, holds `local` rows of a batch."""
    before = getattr(_here, "held", None)
    _here.held = Held(local, None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())
    try:
        yield
    finally:
        _here.held = before


def rows_held() -> Rows | None:
    """Where this replica's rows lie: the step's, else the rows that a hand-written `strategy.run` was given.

    In a hand-written loop the replicas tell each other at the first question, in the graph in which they began, outside
    of any condition or loop within. A tf.function that is called within a replica cannot ask, and gets None.
    """
    held = getattr(_here, "held", None)
    if step() is not None or held is None or context() is None or not _is_within(held.graph):
        return rows()
    if held.rows is None:
        with contextlib.nullcontext() if held.graph is None else held.graph.as_default():
            held.rows = Rows(held.local, *_ask_for_place(held.local))
    return held.rows


def _is_within(graph: tf.Graph | None) -> bool:
    """Whether what is made now is made in `graph`, or in a condition or loop within it; None where eager."""
    if tf.executing_eagerly():
        return graph is None
    found = tf.compat.v1.get_default_graph()
    while found is not None and found is not graph and getattr(found, "is_control_flow_graph", False):
        found = found.outer_graph
    return found is graph


def can_meet() -> bool:
    """Whether replicas can ask each other here: in a step, or in a hand-written `strategy.run` outside any condition,
    loop or tf.function within.
    """
    held = getattr(_here, "held", None)
    if step() is not None or held is None or context() is None:
        return step() is not None
    return held.graph is (None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())


def share() -> tf.Tensor | None:
    """This replica's part of the global batch, 0 to 1 (float32 scalar), or None outside a step."""
    facts = step()
    return facts.share if facts is not None else None


def share_of_rows() -> tf.Tensor | None:
    """This replica's part of the global batch (float32 scalar), by the rows that `rows_held` tells, or None."""
    facts = rows_held()
    if step() is not None or facts is None:
        return share()
    return _share_of(facts.local, facts.total)


def by_share(value: tf.Tensor) -> tf.Tensor:
    """`value` times the share; 0 where this replica has no rows, whatever came of that (a mean of nothing is NaN)."""
    return tf.math.multiply_no_nan(value, tf.cast(share(), value.dtype))


def has_rows(dtype=tf.bool) -> tf.Tensor:
    """Whether this replica holds rows of the batch, as a scalar of `dtype`; True outside a step."""
    found = rows()
    return tf.cast(True if found is None else found.local > 0, dtype)


def has_rows_for_sure() -> bool:
    """Whether it is known, before the step runs, that this replica holds rows; True outside a step."""
    found = rows()
    return found is None or bool(tf.get_static_value(found.local))


def count(dtype: str = "float32") -> tf.Tensor:
    """The number of replicas that train together, as a scalar of `dtype`."""
    return tf.constant(context().num_replicas_in_sync, dtype)


def begin(local: tf.Tensor, place: tuple[tf.Tensor, tf.Tensor] | None = None, **how: bool) -> Step:
    """The facts of the step that this replica begins.

    Args:
        local: rows of this replica, int32 scalar.
        place: rows before its own and rows of the whole batch; None where the data does not tell: the replicas then
            tell each other, in a small collective.
        how: `jit`, `apart` and `alone` as in `Step`.
    """
    if place is None:
        place = _ask_for_place(local)
    offset, total = place
    return Step(Rows(local, offset, total), _share_of(local, total), **how)


def _share_of(local: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(tf.cast(local, tf.float32), tf.cast(total, tf.float32))


def _ask_for_place(local: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    ctx = context()
    if ctx.num_replicas_in_sync == 1:
        return tf.constant(0), local
    at = piece_of(ctx.strategy, tf.cast(ctx.replica_id_in_sync_group, tf.int32))
    mine = tf.one_hot(at, ctx.num_replicas_in_sync) * tf.cast(local, tf.float32)
    counts = tf.cast(sum_small([mine])[0], tf.int32)
    return tf.where(local > 0, tf.reduce_sum(counts[:at]), 0), tf.reduce_sum(counts)


def piece_of(strategy: tf.distribute.Strategy, index):
    """Which piece of the global batch replica number `index` gets, from 0.

    A distributed dataset cuts a batch into one piece a replica and deals them to the workers in turn, so with W
    workers, device d of worker w holds piece d * W + w.
    """
    devices = len(strategy.extended.worker_devices)
    return index % devices * (strategy.num_replicas_in_sync // devices) + index // devices


def sum_small(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Sums a few small tensors over all replicas: on the host where one process holds every replica."""
    if spans_processes(context().strategy):
        return all_reduce(values)
    with uncompiled():
        return _add_here(values)


def _add_here(values: list) -> list:
    """Sums tensors, or joins IndexedSlices, of replicas that lie in this process, on the host."""

    traffic.note(values)

    def add(strategy, *columns):
        with tf.device("CPU:0"):
            return [added(strategy.experimental_local_results(column)) for column in columns]

    with _meeting():
        return list(context().merge_call(add, args=tuple(values)))


def added(parts) -> tf.Tensor | tf.IndexedSlices:
    """The sum of replicas' tensors; of their slices, all of them."""
    if not isinstance(parts[0], tf.IndexedSlices):
        return tf.add_n(parts)
    rows, numbers = (tf.concat([getattr(part, name) for part in parts], 0) for name in ("values", "indices"))
    return tf.IndexedSlices(rows, numbers, parts[0].dense_shape)


def _is_here() -> bool:
    """Whether all replicas compute on this process's CPUs, and nobody has chosen how they sum.

    They then share one memory: a sum needs no collective, which would copy everything into a pack and out of it.
    """
    from tensorflow.python.ops import control_flow_util

    strategy = context().strategy
    if not isinstance(strategy, tf.distribute.MirroredStrategy):
        return False
    if strategy.extended._cross_device_ops is not strategy.extended._collective_ops:
        return False
    is_xla = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    return not is_xla and all(":CPU:" in device.upper() for device in strategy.extended.worker_devices)


def all_reduce(values: list, how: tf.distribute.experimental.CommunicationOptions | None = None) -> list:
    """Sums tensors or IndexedSlices over all replicas, kept out of XLA's clusters; None stays None."""
    if _is_here():
        with uncompiled():
            summed = iter(_add_here([value for value in values if value is not None]))
        return [None if value is None else next(summed) for value in values]
    if step() is not None:
        parts = [v.values if isinstance(v, tf.IndexedSlices) else v for v in values if v is not None]
        step().varies |= not all(part.shape.is_fully_defined() for part in parts)
    with uncompiled():
        packed = {at: value for at, value in enumerate(values) if _can_be_packed(value)}
        values = [None if at in packed else value for at, value in enumerate(values)]
        values += [part for value in packed.values() for part in _pack(value)]
        traffic.note(values)
        summed = [None] * len(values)
        for dtype in dict.fromkeys(value.dtype for value in values if value is not None):  # one kind makes one pack
            places = [at for at, value in enumerate(values) if value is not None and value.dtype == dtype]
            with _meeting():
                total = tf.distribute.ReduceOp.SUM
                parts = context().all_reduce(total, [values[at] for at in places], how or options())
            for at, part in zip(places, parts, strict=True):
                summed[at] = part
        for at, value in reversed(packed.items()):
            numbers, rows = summed.pop(), summed.pop()
            summed[at] = _unpack(rows, numbers, value)
    return summed


def _can_be_packed(value) -> bool:
    """Whether slices go into the pack of the dense gradients: TensorFlow gathers them in six collectives of their own.

    Every worker sends as many rows as all have together, so it pays for few. All must have equally many.
    """
    if not isinstance(value, tf.IndexedSlices) or step() is None or not spans_processes(context().strategy):
        return False
    local, total = tf.get_static_value(step().rows.local), tf.get_static_value(step().rows.total)
    replicas, shape = context().num_replicas_in_sync, value.values.shape
    is_even = local is not None and total is not None and local * replicas == total
    return is_even and shape.is_fully_defined() and replicas * shape.num_elements() * value.dtype.size <= _PACK_BYTES


def _pack(slices: tf.IndexedSlices) -> tuple[tf.Tensor, tf.Tensor]:
    """This replica's rows and their numbers at its place among those of all, with zeros elsewhere, to be summed."""
    count = context().num_replicas_in_sync
    at = piece_of(context().strategy, tf.cast(context().replica_id_in_sync_group, tf.int32))

    def placed(mine):  # zeros, not products with 0: what is no number stays where it is
        padded = tf.pad(mine[None], [[at, count - 1 - at], *[[0, 0]] * mine.shape.rank])
        return tf.ensure_shape(padded, [count, *mine.shape])

    rows, numbers = slices.values, tf.ensure_shape(slices.indices, slices.values.shape[:1])
    digits = tf.stack([numbers // _BASE, numbers % _BASE], axis=1)
    return placed(rows), placed(tf.cast(digits, tf.float32))


def _unpack(rows: tf.Tensor, numbers: tf.Tensor, like: tf.IndexedSlices) -> tf.IndexedSlices:
    high, low = tf.unstack(tf.cast(tf.reshape(numbers, [-1, 2]), like.indices.dtype), axis=1)
    return tf.IndexedSlices(tf.reshape(rows, [-1, *like.values.shape[1:]]), high * _BASE + low, like.dense_shape)


def options():
    """The strategy's own options for collectives: on workers TensorFlow forgets them where replicas ask for a sum."""
    return getattr(context().strategy.extended, "_communication_options", None)


def reduce_gradients_in(strategy: tf.distribute.Strategy, dtype: str) -> None:
    """Lets gradients travel between the replicas of a strategy in a narrower dtype."""
    strategy._tfgpu_reduce_dtype = tf.as_dtype(dtype)


def narrowed(values: list) -> list:
    """Gradients as they travel between replicas: tensors or IndexedSlices; None stays None."""
    dtype = getattr(context().strategy, "_tfgpu_reduce_dtype", None)
    return list(values) if dtype is None else [_cast(v, dtype) if _is_wider(v, dtype) else v for v in values]


def widened(values: list, like: list) -> list:
    """What has travelled, each in the dtype of the value in `like` at its place."""
    return [v if v is None or v.dtype == w.dtype else _cast(v, w.dtype) for v, w in zip(values, like, strict=True)]


def _is_wider(value, dtype: tf.DType) -> bool:
    return value is not None and value.dtype.is_floating and value.dtype.size > dtype.size


def _cast(value, dtype: tf.DType):
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(value.values, dtype), value.indices, value.dense_shape)
    return tf.cast(value, dtype)


def check_has_copies(variable) -> None:
    """Refuses to let every replica change one and the same variable.

    Raises:
        InputError: a Keras variable that was made outside the strategy's scope.
    """
    if isinstance(variable, keras.Variable) and not isinstance(variable._value, tf.distribute.DistributedValues):
        raise InputError(
            f"The variable {variable.path!r} was made outside `strategy.scope()`: all replicas would change one copy. "
            "Make its layer, metric or optimizer inside the scope (or, for a layer that shall not train, set "
            "`trainable = False`)."
        )


def check_has_no_copies(variables) -> None:
    """Refuses to train, in a model of no strategy, variables that replicas have.

    Raises:
        InputError: one of a model that was made in a strategy's scope, or spread over devices.
    """
    for variable in variables:
        if isinstance(variable._value, tf.distribute.DistributedValues):
            raise InputError(
                f"The variable {variable.path!r} is of a model that was made in a strategy's scope, or spread over "
                "devices, and the model that trains it here is not. Make that one in the same scope, or spread it: "
                "first the whole model, then `parallel.place` and the like."
            )


@contextlib.contextmanager
def _meeting():
    """Says what to do where TensorFlow says that `merge_call` was called in another graph.

    Raises:
        InputError: the replicas were to meet in a graph within the step's.
    """
    try:
        yield
    except RuntimeError as error:
        if "merge_call" not in str(error):
            raise
        raise InputError(
            "Replicas cannot meet inside tf.cond, tf.while_loop or a tf.function with jit_compile=True, as Batch"
            "Normalization and `optimizer.apply` must. Move it out, or compute both sides and choose with tf.where."
        ) from error


@contextlib.contextmanager
def compiled(facts: Step):
    """Lets XLA compile what it can of the block where the step asks for it; collectives stay outside."""
    if not facts.jit:
        yield
        return
    with tf.xla.experimental.jit_scope():
        yield


def is_compiled() -> bool:
    """Whether XLA compiles what is made now: in a step that asks for it, or a tf.function with `jit_compile=True`."""
    from tensorflow.python.ops import control_flow_util

    facts = step()
    graph = tf.compat.v1.get_default_graph()
    return (facts is not None and facts.jit) or control_flow_util.GraphOrParentsInXlaContext(graph)


def spans_processes(strategy: tf.distribute.Strategy) -> bool:
    """Whether the replicas lie in several processes."""
    return is_spread(strategy) and strategy.extended._in_multi_worker_mode()


def uncompiled():
    """Keeps what the block makes out of XLA's clusters, in a step that XLA compiles."""
    facts = getattr(_here, "step", None)
    if facts is not None and facts.jit:
        return tf.xla.experimental.jit_scope(compile_ops=False)
    return contextlib.nullcontext()


def sum_over_workers(strategy: tf.distribute.Strategy, numbers) -> np.ndarray:
    """Adds up each process's whole numbers: an int64 vector, the same on all. Every worker must call it."""

    @tf.autograph.experimental.do_not_convert
    def mine(values):
        """Of several replicas in a process one gives them; the same tensor on all would be taken for one replica's."""
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return values * tf.cast(number % len(strategy.extended.worker_devices) == 0, values.dtype)

    @tf.autograph.experimental.do_not_convert
    def total(values):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(mine, args=(values,)), axis=None)

    # One function a strategy: eagerly, TensorFlow warns of the cost, and a new function would be traced each time.
    if not hasattr(strategy, "_tfgpu_total"):
        strategy._tfgpu_total = tf.function(total, autograph=False, reduce_retracing=True)
    return strategy._tfgpu_total(tf.convert_to_tensor(numbers, tf.int64)).numpy()


def run_outside(strategy: tf.distribute.Strategy, make: Callable[[], None]) -> None:
    """Runs `make` as if outside the replicas and outside any graph, under the strategy's scope.

    A replica that creates a variable would make only its own copy; made here, all replicas get theirs at once.
    """
    from tensorflow.python.distribute import distribute_lib

    with tf.init_scope():
        distribute_lib._push_per_thread_mode(distribute_lib._CrossReplicaThreadMode(strategy))
        try:
            with strategy.scope():
                make()
        finally:
            distribute_lib._pop_per_thread_mode()
