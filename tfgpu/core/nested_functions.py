"""Inlines tf.functions that a step calls: in a separate graph, replicas could not communicate."""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def inline_functions() -> None:
    """Traces a `@tf.function` (a layer's `call`, a `train_step`) into the step that calls it.

    TensorFlow makes a separate graph for it, in which `merge_call` fails: a BatchNormalization or an optimizer in it
    could not communicate with the other replicas. A function with `jit_compile=True` stays separate, for XLA.
    """

    @wrap("Function.__call__")
    def call(stock, self, *args, **kwargs):
        is_tried = step_context.current().is_trying and tf.executing_eagerly()  # its numbers are looked at
        in_step = step_context.step() is not None and not tf.executing_eagerly()
        if not (is_tried or in_step) or private.asks_for_xla(self):
            return stock(self, *args, **kwargs)
        return private.python_function_of(self)(*args, **kwargs)


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
