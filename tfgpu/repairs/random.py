"""Random draws of `keras.random` and of layers, and the state of seed generators: one for all replicas, in step."""

import threading

import keras
import tensorflow as tf

from tfgpu.compat import distribute, slots, variables
from tfgpu.compat import keras as private_keras
from tfgpu.compat.patch import wrap
from tfgpu.core import replication
from tfgpu.core.randomness import alike_draws, rng
from tfgpu.repairs import Repair, probes, probing


@probes("every replica draws the same dropout masks and noise")
def dropout_masks_repeat() -> bool:
    """Whether two replicas drop the same positions of different rows."""
    masks = probing.mirrored().run(lambda: keras.random.dropout(tf.ones([8, 16]), 0.5, seed=1))
    first, second = masks.values
    return bool(tf.reduce_all(first == second))


@probes("an optimizer that draws by tf.random makes the replicas' weights differ")
def draws_by_tensorflow_differ() -> bool:
    """Whether replicas that compute the same draw different numbers by `tf.random`."""
    strategy = probing.mirrored()
    first, second = tf.function(lambda: strategy.run(lambda: tf.random.normal([4])))().values
    return bool(tf.reduce_any(first != second))


def share_seed_state() -> None:
    """Makes all replicas read and advance one seed generator's state in step, wherever it was created.

    A generator created outside the strategy's scope has one plain variable, which every replica would advance in turn;
    it is replaced by a mirrored one. Keras keeps the global generator (`seed=None`) per thread, and each replica is a
    thread, so every replica would create its own with another seed; they use that of the thread that runs the step.
    """

    @wrap("SeedGenerator.next")
    def next_seed(stock, self, ordered=True):
        ctx = replication.replica_context()
        if ctx is not None and not _is_of(ctx.strategy, variables.held(self.state)):
            replication.run_cross_replica(ctx.strategy, lambda: _mirror(self.state))
        return stock(self, ordered)

    @wrap("MirroredReplicaThread.__init__")
    def start(stock, self, *args, **kwargs):
        stock(self, *args, **kwargs)
        slots.of(self).keras_state = private_keras.thread_state()

    @wrap("seed_generator.global_seed_generator")
    def global_seed_generator(stock):
        theirs = slots.get(threading.current_thread(), "keras_state")
        if theirs is None:
            return stock()
        name = private_keras.GLOBAL_SEED_GENERATOR
        private_keras.set_attribute(name, theirs.get(name))
        theirs[name] = stock()
        return theirs[name]


def _is_of(strategy: tf.distribute.Strategy, value) -> bool:
    return isinstance(value, distribute.DistributedVariable) and value.distribute_strategy is strategy


def _mirror(variable: keras.Variable) -> None:
    value = variables.held(variable)
    copies = tf.Variable(value.read_value(), trainable=False, name=variable.name, aggregation=value.aggregation)
    variables.set_held(variable, copies)


@probes("every replica creates its own global seed generator")
def global_seeds_differ() -> bool:
    """Whether each replica creates its own global seed generator, with another seed."""
    keras.utils.set_random_seed(0)
    strategy = probing.mirrored()
    try:
        first, second = tf.function(lambda: strategy.run(lambda: keras.random.uniform([4])))().values
    except ValueError:  # the second replica creates its generator inside the first one's graph
        return True
    return not bool(tf.reduce_all(first == second))


REPAIRS = (
    Repair("draws-by-example", dropout_masks_repeat, rng.wrap_random_functions),
    Repair("draws-alike", draws_by_tensorflow_differ, alike_draws.draw_alike),
    Repair("shared-seeds", global_seeds_differ, share_seed_state),
)
