"""A tf.function that a step calls becomes part of the step: in a graph of its own the replicas could not meet."""

import functools
import types
from collections.abc import Callable

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager.polymorphic_function import polymorphic_function, tf_method_target
from tensorflow.python.util import tf_decorator

from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def trace_functions_within_the_step() -> None:
    """Traces a `@tf.function` (a layer's `call`, a `train_step`) into the step that calls it.

    TensorFlow makes a graph of its own for it, in which `merge_call` fails: a BatchNormalization or an optimizer in it
    could not meet the other replicas. What XLA is to compile by itself (`jit_compile=True`) stays a function.
    """

    @wrap(polymorphic_function.Function, "__call__")
    def call(stock, self, *args, **kwargs):
        if step_context.step() is None or tf.executing_eagerly() or self._jit_compile:
            return stock(self, *args, **kwargs)
        function = _bound(self._python_function)
        if self._autograph:
            function = autograph.tf_convert(function, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED))
        return function(*args, **kwargs)


def own(function: Callable, **how) -> polymorphic_function.Function:
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


def _bound(function):
    """The function; a method of the object itself where TensorFlow has bound it to a stand-in for a weak reference."""
    _, method = tf_decorator.unwrap(function)
    owner = getattr(method, "__self__", None)
    if isinstance(owner, tf_method_target.TfMethodTarget):
        return types.MethodType(method.__func__, owner.target)
    return function
