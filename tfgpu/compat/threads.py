"""What a thread has to take over from another one, to go on with what that one traces."""

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import tensorflow as tf
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.eager import context
from tensorflow.python.eager import tape as tape_module
from tensorflow.python.framework import ops

from tfgpu.compat import keras as keras_private


class ThreadState:
    """TensorFlow's and Keras's state of the thread that makes it.

    Args:
        replica: the context of the thread's replica, or None.
    """

    def __init__(self, replica: tf.distribute.ReplicaContext | None):
        self._graph, self._eager = ops.get_default_graph(), context.executing_eagerly()
        with ops.init_scope():
            self._init_graph, self._init_eager = ops.get_default_graph(), context.executing_eagerly()
        if not self._eager:
            self._graph.switch_to_thread_local()  # else threads would share one stack of devices
        self._creators = self._graph._variable_creator_stack[:]
        self._scope = self._graph.get_name_scope()
        self._replica = replica
        self._keras = keras_private.copied_thread_state()
        self._keras |= {name: keras_private.get_attribute(name) for name in ("autocast_scope", "stateless_scope")}

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Inside the block, the thread that runs it has this state."""
        own = keras_private.thread_state()
        own.update(self._keras)
        own["current_call_ctx"] = copy.copy(own.get("current_call_ctx"))
        with ExitStack() as stack:
            stack.enter_context(mirrored_run._enter_graph(self._init_graph, self._init_eager))
            stack.enter_context(mirrored_run._enter_graph(self._graph, self._eager, self._creators))
            if self._replica is not None:
                stack.enter_context(self._replica)
            if self._scope:
                stack.enter_context(tf.name_scope(f"{self._scope}/"))
            yield


@contextmanager
def recording(tape: tf.GradientTape | None) -> Iterator[None]:
    """Lets a tape of another thread, where it records, record the block as well."""
    if tape is None:
        yield
        return
    tape_module.push_tape(tape._tape)
    try:
        yield
    finally:
        tape_module.pop_tape(tape._tape)
