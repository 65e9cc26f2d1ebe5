"""Rematerialization: recomputes activations in the backward pass, which saves memory and does not change the result.

`remat(function)` runs a function and keeps only its inputs; the backward pass runs it again. Keras's own `remat` hands
the function to `tf.recompute_grad`, which does not know the state of layers: dropout draws another mask in the second
run, BatchNormalization counts a batch twice, and a layer within a layer forgets that it is training. Here

- assignments of the first run are recorded, combined over replicas as `layer_state.py` says, and made at its end.
  The second run starts from the state that the first one read, takes over its assignments, and assigns nothing;
- the second run has the `training` argument, the masks and the compute dtype of the call;
- losses that the function adds by `add_loss` are returned beside its outputs, so that they have a gradient;
- no operation of the second run can start before the upstream gradient is there; otherwise its activations would be
  kept from the start. XLA ignores control dependencies, so there a number that depends on the gradient is added to the
  inputs, as TensorFlow does (https://github.com/tensorflow/tensorflow/issues/36981).

Gradients flow to the function's arguments, to variables, and to the values that an outer stateless scope has for them.
A tensor that the function reads from elsewhere, or leaves in an attribute, has none. Random draws without a Keras seed
(`tf.random`; Python's `random` in AugMix) differ in the second run.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfgpu.compat import targets, variables
from tfgpu.compat.keras import (
    StatelessScope,
    call_context,
    get_attribute,
    get_mask,
    get_stateless_scope,
    in_symbolic_scope,
    replaced_attributes,
    set_mask,
    tree,
)
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import without_recording
from tfgpu.core import logits, step_context
from tfgpu.core.state import layer_state
from tfgpu.errors import InputError

_CALL_STATE = ("current_call_ctx", "autocast_scope")


def repair_remat() -> None:
    """Makes the second run of `keras.remat`, and so of `keras.RematScope`, equal the first."""

    def keras_remat(stock, f):
        return remat(f)

    for module in ("core", "backend_ops"):  # the second has a name of its own for it in some versions
        if hasattr(targets.owner(module), "remat"):
            wrap(f"{module}.remat")(keras_remat)


def remat(function: Callable) -> Callable:
    """The same function, whose intermediate results are not kept for the backward pass but recomputed.

    Args:
        function: takes and returns tensors in any structure; a layer, or something that calls layers that are built.

    Returns:
        A function with the same arguments and results. Its `__wrapped__` is the original.

    Raises:
        InputError: when called: a floating-point argument is ragged or sparse, or no layer can take a loss that was
            added, or the function creates a variable. When the gradient is taken: the second run assigns other
            variables than the first.

    Example:
        >>> layer = keras.layers.Dropout(0.5, seed=1)
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(x := tf.ones((4, 4)))
        ...     y = remat(layer)(x, training=True)
        >>> bool(tf.reduce_all(tape.gradient(y, x) == y))  # the same mask in both runs
        True
    """

    def call(*args, **kwargs):
        if in_symbolic_scope():
            return function(*args, **kwargs)
        return _Call(function, (args, kwargs)).run()

    return functools.update_wrapper(call, function, updated=())


def copied_call_state() -> dict[str, object]:
    """What Keras knows of the running call, such as `training` and the autocast dtype; for `call_state`."""
    return {name: copy.copy(get_attribute(name)) for name in _CALL_STATE}


def call_state(copied: dict[str, object]) -> contextlib.AbstractContextManager:
    """Runs the block with the call state that `copied_call_state` returned."""
    return replaced_attributes(copied)


class RecordingScope(StatelessScope):
    """The first run: records what it reads and assigns, for the second run and for the assignments at the end.

    Args:
        given: values to use in place of variables, by the variables' ids.

    Attributes:
        found: pairs of a variable that is not trainable and the value that was read.
        assigned: pairs of a variable and the value that was assigned.
    """

    def __init__(self, given: dict[int, tf.Tensor]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(given)
        self.found, self.assigned = [], []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is not None:
            return value
        return _value_outside(self, variable) if variable.trainable else self._read(variable)

    def add_update(self, update):
        variable, value = update
        if variable.trainable:
            raise InputError(
                f"{variable.path!r} is trainable, and its layer assigns it in `call`: a recomputed layer would lose "
                "its gradient. Set trainable=False if it is not a weight. Otherwise exclude the layer from "
                "recomputation, or use `parallel.place` in place of a pipeline."
            )
        if id(variable) not in self.state_mapping:
            self._read(variable)
        value = self.agreed(variable, value)
        self.assigned.append((variable, value))
        super().add_update((variable, value))

    def agreed(self, variable, value):
        """The value to assign, the same on all replicas."""
        return layer_state.agreed(variable, value)

    def _read(self, variable):
        value = _value_outside(self, variable)
        if value is None:  # not created yet
            return None
        # Read in the graph in which the scope began, since both branches of a condition may ask for it.
        with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
            value = tf.convert_to_tensor(value)
        self.found.append((variable, value))
        super().add_update((variable, value))
        return value


class ReplayScope(StatelessScope):
    """The second run: reads what the first one read; each assignment becomes the one that the first run made.

    Args:
        first: the scope of the first run.
        given: values to use in place of variables, by the variables' ids.
    """

    def __init__(self, first: RecordingScope, given: dict[int, tf.Tensor]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(given)
        for pair in first.found:
            super().add_update(pair)
        self._left = iter(first.assigned)

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return _value_outside(self, variable) if value is None else value

    def add_update(self, update):
        variable, value = next(self._left, (None, None))
        if variable is not update[0]:
            raise InputError(
                f"A recomputed function assigned {update[0].path!r} in its second run, but not in its first. "
                "Make it do the same in every run, or exclude it from recomputation."
            )
        super().add_update((variable, value))


def _value_outside(scope: StatelessScope, variable):
    """The variable's value around a scope."""
    outer = scope.original_scope
    value = outer.get_current_value(variable) if outer is not None else None
    return variables.held(variable) if value is None else value


class _Call:
    """One call of a function whose intermediate results are recomputed.

    TensorFlow sees one operation with a gradient of its own. It takes the differentiable arguments and the
    differentiable values of an outer stateless scope, and returns the outputs, the added losses, and the outputs'
    logits, which Keras's cross-entropies look for.
    """

    def __init__(self, function: Callable, arguments: tuple):
        self._function, self._arguments = function, arguments
        self._leaves = tree.flatten(arguments)
        self._positions = [at for at, leaf in enumerate(self._leaves) if is_differentiable(leaf)]
        self._masks = [get_mask(self._leaves[at]) for at in self._positions]
        outer = get_stateless_scope()
        mapping = outer.state_mapping if outer is not None else {}
        self._mapped = {key: value for key, value in mapping.items() if is_differentiable(value)}
        self._call_state, self._step_state = copied_call_state(), step_context.copied()

    def run(self) -> object:
        """The function's results; its losses and assignments go to the layers."""
        block = tf.custom_gradient(lambda *given: self._forward(given))
        results = list(block(*(self._leaves[at] for at in self._positions), *self._mapped.values()))
        outputs = tree.flatten(self._outputs)
        count = sum(map(is_differentiable, outputs))
        end = count + len(self._scope.losses)
        floats, found_logits = iter(results[:count]), iter(results[end:])
        outputs = [_like(first, next(floats), found_logits) if is_differentiable(first) else first for first in outputs]
        for loss in results[count:end]:
            _loss_owner(self._function).add_loss(loss)
        for variable, value in {id(pair[0]): pair for pair in self._scope.assigned}.values():
            if variables.held(variable) is None and get_stateless_scope() is None:
                raise _not_created(variable)
            layer_state.put(variable, value)
        return tree.pack_sequence_as(self._outputs, outputs)

    def _forward(self, given) -> tuple[list[tf.Tensor], Callable]:
        """The first run: what the block returns, and the function that computes its gradient."""
        with without_recording():
            self._scope = RecordingScope(self._scope_values(given))
            self._outputs = self._run_function(self._scope, given)

        def gradient(*upstream, variables=()):
            return self._gradient(given, upstream, variables)

        return _results(self._outputs, self._scope), gradient

    def _gradient(self, given, upstream, variables):
        """Runs the function again on a tape, and differentiates that."""
        arrived = tf.nest.flatten(upstream, expand_composites=True)
        with call_state(self._call_state), tf.control_dependencies(arrived), tf.GradientTape() as tape:
            copies = [_wait_for(arrived, value) for value in given]
            tape.watch(copies)
            scope = ReplayScope(self._scope, self._scope_values(copies))
            with step_context.scope(**self._step_state):  # a layer that got all rows gets them again
                outputs = self._run_function(scope, copies)
        targets = _results(outputs, scope)
        found = tape.gradient(targets, [*copies, *variables], output_gradients=upstream)
        if not variables:
            return found
        # In a loop's body, Grappler lets the update of a weight overtake the second run, which reads the weight: no
        # weight's gradient is there before all of them are.
        is_frozen = all(gradient is None for gradient in found)
        of_variables = found if is_frozen or tf.executing_eagerly() else tf.tuple(found)
        return found[: len(copies)], of_variables[len(copies) :]

    def _run_function(self, scope: StatelessScope, given) -> object:
        values = list(self._leaves)
        for at, value, mask in zip(self._positions, given, self._masks, strict=False):
            values[at] = value
            if mask is not None:
                set_mask(value, mask)
        args, kwargs = tree.pack_sequence_as(self._arguments, values)
        with scope:
            return self._function(*args, **kwargs)

    def _scope_values(self, given) -> dict[int, tf.Tensor]:
        return dict(zip(self._mapped, given[len(self._positions) :], strict=True))


def _not_created(variable: keras.Variable) -> InputError:
    return InputError(
        f"A recomputed function created {variable.path!r}, which must exist before. If it draws random numbers without "
        "a seed of its own, give it a `keras.random.SeedGenerator`, or draw once before the training "
        "(`keras.random.uniform((1,))`), which creates Keras's global generator. Otherwise build the layer first."
    )


def _results(outputs: object, scope: StatelessScope) -> list[tf.Tensor]:
    """What the block returns: differentiable outputs, losses, and the outputs' logits; at least one tensor."""
    floats = list(filter(is_differentiable, tree.flatten(outputs)))
    found_logits = [found.tensor for found in map(logits.find, floats) if found is not None]
    return [*floats, *scope.losses, *found_logits] or [tf.zeros([])]


def is_differentiable(value) -> bool:
    """Whether a value is a dense tensor of floating-point or complex numbers.

    Raises:
        InputError: it is a ragged or sparse tensor of such numbers, which cannot be recomputed.
    """
    if not tf.is_tensor(value) or not (value.dtype.is_floating or value.dtype.is_complex):
        return False
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise InputError(
            f"Recomputation needs dense tensors of floats. Received: {type(value).__name__}. "
            "Make it dense first, or exclude the layer from recomputation."
        )
    return True


def _like(first: tf.Tensor, result: tf.Tensor, found_logits: Iterator) -> tf.Tensor:
    """The result with the Keras mask and the logits of `first`; its logits are the next of `found_logits`."""
    known, mask = logits.find(first), get_mask(first)
    if known is not None:
        result = known.replace(next(found_logits)).attach_to(result)
    if mask is not None:
        set_mask(result, mask)
    return result


def _loss_owner(function: Callable) -> keras.layers.Layer:
    """The layer that takes what the function adds by `add_loss`."""
    context = call_context()
    for found in (function, getattr(function, "__self__", None), context and context.entry_layer):
        if isinstance(found, keras.layers.Layer):
            return found
    raise InputError(
        "The recomputed function adds a loss but belongs to no layer. Call it in a layer, or recompute a layer."
    )


def _wait_for(arrived: list[tf.Tensor], value: tf.Tensor) -> tf.Tensor:
    """A copy of `value` that cannot be computed before the tensors in `arrived`."""
    if not arrived or not step_context.is_in_xla():
        return tf.identity(value)
    # 0 for a number and for NaN, which XLA does not find out.
    flag = tf.cast(tf.reduce_max(tf.reshape(arrived[0], [-1])[:1]), tf.bool)
    return value + tf.cast(tf.where(flag == flag, 0.0, float("nan")), value.dtype)
