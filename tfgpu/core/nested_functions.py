"""A tf.function that a step calls becomes part of the step: in a graph of its own the replicas could not meet."""

import functools
from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def trace_functions_within_the_step() -> None:
    """Traces a `@tf.function` (a layer's `call`, a `train_step`) into the step that calls it.

    TensorFlow makes a graph of its own for it, in which `merge_call` fails: a BatchNormalization or an optimizer in it
    could not meet the other replicas. What XLA is to compile by itself (`jit_compile=True`) stays a function.
    """

    @wrap("Function.__call__")
    def call(stock, self, *args, **kwargs):
        if step_context.step() is None or tf.executing_eagerly() or private.asks_for_xla(self):
            return stock(self, *args, **kwargs)
        return private.python_function_of(self)(*args, **kwargs)


def own(function: Callable, **how) -> private.Function:
    """A tf.function of something that autograph leaves alone, and in TensorFlow's eyes no other's.

    TensorFlow counts tracings by the code of the Python function, and all that `do_not_convert` returns shares one:
    five models that trace their steps once each would be one function that is traced again and again, and warned of.

    Args:
        function: what it runs.
        **how: further arguments of `tf.function`.
    """
    function = functools.partial(function)  # has no code of its own, so that TensorFlow counts by what wraps it
    wrapper = tf.autograph.experimental.do_not_convert(function)
    wrapper.__wrapped__ = function
    return tf.function(wrapper, **how)
