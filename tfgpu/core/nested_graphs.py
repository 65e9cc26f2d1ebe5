"""tf.functions and conditions in a step: in a graph of their own, replicas could not communicate."""

import contextlib
import functools
import threading
from collections.abc import Callable, Container, Iterator

import tensorflow as tf

from tfgpu.compat import distribute
from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrap, wrapped
from tfgpu.core import batch_rows, collectives, step_context
from tfgpu.core.replication import replica_context
from tfgpu.core.state import layer_state
from tfgpu.errors import InputError

_met = step_context.Slot("nested_graphs.met")  # conditions, while a step is tried
_takes_other = step_context.Slot("nested_graphs.takes_other")
_decided = step_context.Slot("nested_graphs.decided")
_stays_whole = step_context.Slot("nested_graphs.stays_whole")  # the next tf.function is called as one


def inline_functions() -> None:
    """Traces a `@tf.function` (a layer's `call`, a `train_step`) into the step that calls it.

    TensorFlow makes a separate graph for it, in which `merge_call` fails: a BatchNormalization or an optimizer in it
    could not communicate with the other replicas, and a loss would not know its share of the rows. The same goes for a
    function that `strategy.run` runs. One with `jit_compile=True` stays separate, for XLA.
    """

    @wrap("Function.__call__")
    def call(stock, self, *args, **kwargs):
        is_tried = step_context.current().is_trying and tf.executing_eagerly()  # its numbers are looked at
        in_step = not tf.executing_eagerly() and (step_context.step() is not None or batch_rows.can_communicate())
        if _stays_whole.get() or not (is_tried or in_step) or private.asks_for_xla(self):
            with _stays_whole.set_to(False):
                return stock(self, *args, **kwargs)
        return private.python_function_of(self)(*args, **kwargs)


def vectorize_apart() -> None:
    """Gives what TensorFlow vectorizes, jacobians too, a graph of its own.

    TensorFlow rewrites the operations of one row for all rows, and would rewrite collectives among them.
    """
    for name in ("vectorized_map", "GradientTape.jacobian", "GradientTape.batch_jacobian"):

        @wrap(f"tf.{name}")
        def vectorize(stock, *args, **kwargs):
            return _apart(stock, *args, **kwargs)


def _apart(stock: Callable, *args, **kwargs):
    """Calls what vectorizes within a tf.function; in a trial, which runs eagerly, TensorFlow makes one itself."""
    is_eager, status = tf.executing_eagerly(), private.autograph_status()

    def call():
        with status:
            return stock(*args, **kwargs)

    context = replica_context()
    is_alone = context is None or context.num_replicas_in_sync == 1
    if is_alone and not step_context.current().is_trying:
        return stock(*args, **kwargs)
    try:
        with _stays_whole.set_to(True):
            return stock(*args, **kwargs) if is_eager else own(call)()
    except ValueError as error:
        found = error if isinstance(error, collectives.CannotCommunicate) else error.__context__  # of TensorFlow's own
        if not isinstance(found, collectives.CannotCommunicate):
            raise
        raise InputError(
            f"Replicas cannot communicate inside `{stock.__name__}`, but BatchNormalization, layers that mix rows, and "
            "second gradients over the whole batch need that. Use `tape.gradient` instead."
        ) from error


def communicate_in_conditions() -> None:
    """Lets replicas communicate in a branch of `tf.cond`, as an `optimizer.apply` after every fourth batch must.

    TensorFlow gives each replica a condition of its own, whose branches the others cannot enter. Here all replicas
    enter one condition together. They must agree on its predicate, and no gradient is taken of it.
    """

    @wrap("cond_module.cond")
    def cond(stock, pred, true_fn=None, false_fn=None, *args, **kwargs):
        if (decided := _decided.get()) is not None:
            decided.append(pred)
        if (met := _met.get()) is not None and tf.executing_eagerly():
            place = _code(true_fn), _code(false_fn)
            met[place] = True
            others = _takes_other.get()
            pred = tf.logical_not(pred) if others is not None and place in others else pred
        if step_context.current().is_trying and tf.executing_eagerly():
            with layer_state.inside_a_graph():
                return stock(pred, true_fn, false_fn, *args, **kwargs)
        sent = step_context.current().sent
        before = {} if sent is None else dict(vars(sent))
        try:
            return stock(pred, true_fn, false_fn, *args, **kwargs)
        except collectives.CannotCommunicate as error:
            if sent is not None:
                vars(sent).update(before)  # what it could not send
            facts = step_context.step()
            if facts is None or not _is_in_replica_graph():
                raise
            _check_can_meet(error, pred, true_fn, sees_whole_batch=facts.whole is not None)
        branches = _Branch(true_fn), _Branch(false_fn)
        found = replica_context().merge_call(_together, args=(_agreed(pred), step_context.current(), *branches))
        return branches[0].packed(found)

    @wrap("keras.ops.cond")
    def keras_cond(stock, pred, true_fn, false_fn):
        """Without a graph, Keras's takes a branch without a `tf.cond`: a trial would not know of it."""
        is_tried = step_context.current().is_trying and tf.executing_eagerly() and tf.is_tensor(pred)
        return tf.cond(pred, true_fn, false_fn) if is_tried else stock(pred, true_fn, false_fn)

    for name in ("map_fn", "switch_case", "while_loop"):

        @wrap(f"tf.{name}")
        def run(stock, *args, **kwargs):
            is_tried = step_context.current().is_trying and tf.executing_eagerly()
            with layer_state.inside_a_graph() if is_tried else contextlib.nullcontext():
                return stock(*args, **kwargs)


@contextlib.contextmanager
def noting_conditions() -> Iterator[dict]:
    """In the block, which runs eagerly, notes each `tf.cond` by its place in the code: the keys of what this yields."""
    met: dict = {}
    with _met.set_to(met):
        yield met


@contextlib.contextmanager
def taking_other_branches(of: Container[object]) -> Iterator[None]:
    """In the block, which runs eagerly, each `tf.cond` at these places takes the branch that it would not take."""
    with noting_conditions(), _takes_other.set_to(of):
        yield


class Everywhere:
    """All places, also those of conditions within a branch that no run has taken yet."""

    def __contains__(self, place: object) -> bool:
        return True


def _code(branch: Callable | None) -> object:
    """What is the same of a branch in each run."""
    return getattr(branch, "__code__", None)


@contextlib.contextmanager
def counting_decisions() -> Iterator[list]:
    """In the block, which runs eagerly, notes what decides by a number: conditions, and loops that end by one.

    Noted are eager tensors that are taken for true or false, as `tf.while_loop` does.
    """

    def decide(stock, self):
        if (decided := _decided.get()) is not None:
            decided.append(self)
        return stock(self)

    with wrapped(private.EagerTensor, decide, "__bool__"), _decided.set_to([]):
        yield _decided.get()


def _check_can_meet(error: InputError, pred, true_fn: Callable, *, sees_whole_batch: bool) -> None:
    """Refuses a condition into which replicas cannot go together.

    Raises:
        InputError: a gradient is taken of it, its predicate may differ, or no trial has seen its branches.
    """
    if private.is_recorded():
        raise InputError(f"{error} A tf.cond works if no gradient is taken through it, but here one is.") from error
    if not layer_state.is_same_everywhere(pred):
        raise InputError(
            f"{error} A tf.cond works if its condition depends only on variables and constants; replicas may disagree "
            "on this one."
        ) from error
    if private.is_of_autograph(true_fn) and not sees_whole_batch:
        raise InputError(
            f"{error} Or keep the `if` on a tensor, and mark the step with `@tfgpu.on_all_rows`."
        ) from error


def _is_in_replica_graph() -> bool:
    """Whether this is a replica, in the graph in which it began."""
    graph = getattr(threading.current_thread(), "graph", None)
    return replica_context() is not None and graph is not None and graph is tf.compat.v1.get_default_graph()


class _Branch:
    """A branch of a replica's condition.

    Args:
        function: takes nothing, and returns a structure of tensors, operations and None.
    """

    def __init__(self, function: Callable):
        self._function, self._found = function, None

    def run(self) -> list[tf.Tensor]:
        """Runs the branch in a replica; returns its tensors, one at least."""
        self._found = self._function()
        tensors = [tf.constant(0)]
        for leaf in tf.nest.flatten(self._found):
            if isinstance(leaf, tf.Operation):
                with tf.control_dependencies([leaf]):
                    tensors.append(tf.constant(True))
            elif leaf is not None:
                tensors.append(tf.convert_to_tensor(leaf))
        return tensors

    def packed(self, tensors: list[tf.Tensor]):
        """The structure that the branch returned, with the condition's tensors."""
        rest = iter(tensors[1:])
        return tf.nest.map_structure(lambda leaf: None if leaf is None else next(rest), self._found)


def _agreed(pred) -> tf.Tensor:
    """A replica's predicate. If replicas disagree the step fails; otherwise they would wait for each other forever."""
    pred = tf.cast(pred, tf.bool)
    (count,) = collectives.sum_small([tf.cast(pred, tf.float32)])
    agree = (count == 0) | (count == replica_context().num_replicas_in_sync)
    said = "Replicas disagree on the condition of a tf.cond in which they communicate. Replicas on which it is true:"
    with step_context.outside_xla():  # XLA leaves assertions out
        checked = tf.debugging.Assert(agree, [said, count])
    with tf.control_dependencies([checked]):
        return tf.identity(pred)


def _together(strategy, pred, context, when_true, when_false) -> list:
    """In cross-replica context: one condition, whose branches run on each replica."""

    def run(branch) -> list[list[tf.Tensor]]:
        found = strategy.extended.call_for_each_replica(_run_branch, args=(branch, context))
        return [list(strategy.experimental_local_results(leaf)) for leaf in found]

    first = strategy.experimental_local_results(pred)[0]
    columns = tf.cond(first, functools.partial(run, when_true), functools.partial(run, when_false))
    return [distribute.regroup(tuple(column)) for column in columns]


def _run_branch(branch: _Branch, context: step_context.StepContext) -> list[tf.Tensor]:
    step_context.adopt(context)
    return branch.run()


def own(function: Callable, **how) -> private.Function:
    """Makes a tf.function without autograph that TensorFlow does not confuse with others.

    TensorFlow counts tracings by the Python function's code object, which all functions from `do_not_convert` share:
    five models that trace their steps once each would look like one function that is retraced, with a warning.

    Args:
        function: the Python function.
        **how: further arguments of `tf.function`.
    """
    function = functools.partial(function)  # a partial has no code object, so TensorFlow counts by its wrapper
    wrapper = tf.autograph.experimental.do_not_convert(function)
    wrapper.__wrapped__ = function
    return tf.function(wrapper, **how)
