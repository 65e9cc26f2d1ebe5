"""Activations computed anew in the backward pass: less memory, and what a plain step would have learned.

`remat(function)` runs a function and keeps only what went into it; the backward pass runs it again. Keras's own
`remat` hands the function to `tf.recompute_grad`, which knows nothing of a layer's state: dropout draws another mask
the second time, BatchNormalization counts a batch twice, and a layer within a layer forgets that it is training. Here

- what the first run assigns is gathered, brought together over replicas as `state` says, and assigned at its end; the
  second run starts from the state that the first one found, takes over what that one assigned, and assigns nothing;
- the second run has the call's `training`, masks and compute dtype;
- what the function adds by `add_loss` comes out beside its outputs, so that it has a gradient;
- nothing of the second run can start before the gradient has arrived: otherwise its results would lie there all along.
  XLA takes no notice of control dependencies; there a number that depends on the gradient is added to the inputs, as
  TensorFlow does (without: https://github.com/tensorflow/tensorflow/issues/36981).

A gradient flows to the function's arguments, to variables, and to what an outer stateless scope puts in their place.
A tensor that the function finds elsewhere, or leaves in an attribute for the loss to find, has none. Draws that have
no Keras seed (`tf.random`, Python's `random` in AugMix) differ in the second run.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend.common import global_state
from keras.src.backend.common.stateless_scope import get_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.backend.tensorflow import core
from tensorflow.python.eager import record

from tfgpu.compat.patch import wrap
from tfgpu.core import layer_state, logits, step_context
from tfgpu.errors import InputError

CALL_STATE = ("current_call_ctx", "autocast_scope")


def repair_remat() -> None:
    """Gives `keras.remat`, and with it `keras.RematScope`, a second run that equals the first."""

    @wrap(core, "remat")
    def keras_remat(stock, f):
        return remat(f)


def remat(function: Callable) -> Callable:
    """The same function, whose inner results are not kept for the backward pass but computed anew.

    Args:
        function: of tensors, in any structure, to tensors; a layer, or something that calls layers which are built.

    Returns:
        A function with the same arguments and results. The original is its `__wrapped__`.

    Raises:
        InputError: when called, for ragged or sparse floats, or a loss that no layer in reach has added; when the
            gradient is taken, if the second run assigns other variables than the first.

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
        return _call(function, (args, kwargs))

    return functools.update_wrapper(call, function, updated=())


class RecordingScope(keras.StatelessScope):
    """Gathers what the first run assigns, and what it finds: for the second run, and to be assigned at its end."""

    def __init__(self, given: dict[int, tf.Tensor]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(given)
        self.found, self.assigned = [], []
        self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is not None:
            return value
        return _outside(self, variable) if variable.trainable else self._note(variable)

    def add_update(self, update):
        variable, value = update
        if variable.trainable:
            raise InputError(
                f"{variable.path!r} learns, and its layer assigns it in its `call`: a second run would lose its "
                "gradient. Make it with trainable=False if it is no weight; else leave the layer out of the "
                "recomputation, or take `parallel.place` instead of stages."
            )
        if id(variable) not in self.state_mapping:
            self._note(variable)
        value = self.agreed(variable, value)
        self.assigned.append((variable, value))
        super().add_update((variable, value))

    def agreed(self, variable, value):
        """What is to be assigned where a value comes up."""
        return layer_state.agreed(variable, value)

    def _note(self, variable):
        value = _outside(self, variable)
        if value is None:  # not made yet
            return None
        # Read where the scope began, since both branches of a condition may ask for it.
        with contextlib.nullcontext() if self._graph is None else self._graph.as_default():
            value = tf.convert_to_tensor(value)
        self.found.append((variable, value))
        super().add_update((variable, value))
        return value


class ReplayScope(keras.StatelessScope):
    """Lets the second run find what the first one found; what it assigns becomes what the first one assigned."""

    def __init__(self, first: RecordingScope, given: dict[int, tf.Tensor]):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.state_mapping.update(given)
        for pair in first.found:
            super().add_update(pair)
        self._left = iter(first.assigned)

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        return _outside(self, variable) if value is None else value

    def add_update(self, update):
        variable, value = next(self._left, (None, None))
        if variable is not update[0]:
            raise InputError(
                f"A recomputed function assigned {update[0].path!r} in its second run, but not in its first. "
                "Let it do the same each time, or leave it out of the recomputation."
            )
        super().add_update((variable, value))


def _outside(scope, variable):
    """The variable's value around a scope."""
    outer = scope.original_scope
    value = outer.get_current_value(variable) if outer is not None else None
    return variable._value if value is None else value


def _call(function: Callable, arguments: tuple):
    leaves, outer = tree.flatten(arguments), get_stateless_scope()
    places = [at for at, leaf in enumerate(leaves) if is_differentiable(leaf)]
    masks = [backend.get_keras_mask(leaves[at]) for at in places]
    mapped = {key: v for key, v in outer.state_mapping.items() if is_differentiable(v)} if outer is not None else {}
    around = {name: copy.copy(global_state.get_global_attribute(name)) for name in CALL_STATE}
    made = {}

    def run(make_scope: Callable, given) -> tuple:
        """One run: what the function returns, the losses that it adds, and the scope."""
        values = list(leaves)
        for at, value, mask in zip(places, given, masks, strict=False):
            values[at] = value
            if mask is not None:
                backend.set_keras_mask(value, mask)
        args, kwargs = tree.pack_sequence_as(arguments, values)
        with make_scope(dict(zip(mapped, given[len(places) :], strict=True))) as scope:
            return function(*args, **kwargs), scope.losses, scope

    def results_of(outputs, losses) -> list[tf.Tensor]:
        floats = list(filter(is_differentiable, tree.flatten(outputs)))
        found = [one.logits for one in map(logits.behind, floats) if one is not None]
        return [*floats, *losses, *found] or [tf.zeros([])]  # never none

    @tf.custom_gradient
    def block(*given):
        with record.stop_recording():
            made["outputs"], losses, first = run(RecordingScope, given)
        made["first"] = first

        def gradient(*upstream, variables=()):
            arrived = tf.nest.flatten(upstream, expand_composites=True)
            with call_state_restored(around), tf.control_dependencies(arrived), tf.GradientTape() as tape:
                copies = [_after(arrived, value) for value in given]
                tape.watch(copies)
                outputs, losses, _ = run(functools.partial(ReplayScope, first), copies)
            again = results_of(outputs, losses)
            found = tape.gradient(again, [*copies, *variables], output_gradients=upstream)
            return (found[: len(copies)], found[len(copies) :]) if variables else found

        return results_of(made["outputs"], losses), gradient

    results = list(block(*(leaves[at] for at in places), *mapped.values()))
    firsts = tree.flatten(made["outputs"])
    count, losses = sum(map(is_differentiable, firsts)), len(made["first"].losses)
    floats, found = iter(results[:count]), iter(results[count + losses :])
    outputs = [_like(leaf, next(floats), found) if is_differentiable(leaf) else leaf for leaf in firsts]
    for loss in results[count : count + losses]:
        _owner(function).add_loss(loss)
    for variable, value in {id(pair[0]): pair for pair in made["first"].assigned}.values():
        layer_state.put(variable, value)
    return tree.pack_sequence_as(made["outputs"], outputs)


def is_differentiable(value) -> bool:
    if not tf.is_tensor(value) or not (value.dtype.is_floating or value.dtype.is_complex):
        return False
    if isinstance(value, (tf.RaggedTensor, tf.SparseTensor)):
        raise InputError(
            f"Recomputation takes dense tensors of floats. Received: {type(value).__name__}. "
            "Make it dense first, or leave the layer out of the recomputation."
        )
    return True


def _like(first: tf.Tensor, result: tf.Tensor, found: Iterator) -> tf.Tensor:
    """The result with what Keras finds at the first one: its mask and its logits, of which `found` has the next."""
    behind, mask = logits.behind(first), backend.get_keras_mask(first)
    if behind is not None:
        result = behind.of(next(found)).put(result)
    if mask is not None:
        backend.set_keras_mask(result, mask)
    return result


def _owner(function: Callable) -> keras.layers.Layer:
    """The layer that shall hold what the function adds by `add_loss`."""
    context = global_state.get_global_attribute("current_call_ctx")
    for found in (function, getattr(function, "__self__", None), context and context.entry_layer):
        if isinstance(found, keras.layers.Layer):
            return found
    raise InputError(
        "The recomputed function adds a loss, but belongs to no layer. Call it within one, or recompute one."
    )


@contextlib.contextmanager
def call_state_restored(around: dict):
    before = {name: global_state.get_global_attribute(name) for name in around}
    for name, value in around.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def _after(arrived: list[tf.Tensor], value: tf.Tensor) -> tf.Tensor:
    """A copy of `value` that cannot be had before what has arrived."""
    if not arrived or not step_context.is_in_xla():
        return tf.identity(value)
    # Of a number or NaN: 0 in both cases, which XLA does not find out.
    flag = tf.cast(tf.reduce_max(tf.reshape(arrived[0], [-1])[:1]), tf.bool)
    return value + tf.cast(tf.where(flag == flag, 0.0, float("nan")), value.dtype)
