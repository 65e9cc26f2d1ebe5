"""The state of Keras's seed generators: one for all replicas, in step, wherever the generator was made."""

import threading

import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import core
from keras.src.random import seed_generator
from tensorflow.python.distribute import mirrored_run
from tensorflow.python.distribute.values import DistributedVariable

from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def share_seed_state() -> None:
    """All replicas read and advance one seed generator's state in step, wherever the generator was made.

    A generator made outside the strategy's scope has one plain variable, which every replica would advance in
    turn; it becomes a mirrored one. The global generator (`seed=None`) is kept by Keras for each thread, and
    each replica is a thread, so every replica would make its own with another seed; they use the one of the
    thread that runs the step.
    """

    @wrap(seed_generator.SeedGenerator, "next")
    def next_seed(stock, self, ordered=True):
        ctx = step_context.context()
        if ctx is not None and not _is_of(ctx.strategy, self.state._value):
            step_context.run_outside(ctx.strategy, lambda: _mirror(self.state))
        return stock(self, ordered)

    @wrap(mirrored_run._MirroredReplicaThread, "__init__")
    def start(stock, self, *args, **kwargs):
        stock(self, *args, **kwargs)
        self.keras_state_of_caller = vars(global_state.GLOBAL_STATE_TRACKER)

    @wrap(seed_generator, "global_seed_generator")
    def global_seed_generator(stock):
        theirs = getattr(threading.current_thread(), "keras_state_of_caller", None)
        if theirs is None:
            return stock()
        name = seed_generator.GLOBAL_SEED_GENERATOR
        global_state.set_global_attribute(name, theirs.get(name))
        theirs[name] = stock()
        return theirs[name]


def _is_of(strategy: tf.distribute.Strategy, value) -> bool:
    return isinstance(value, DistributedVariable) and value.distribute_strategy is strategy


def _mirror(variable: core.Variable) -> None:
    value = variable._value
    variable._value = tf.Variable(
        value.read_value(), trainable=False, name=variable.name, aggregation=value.aggregation
    )
