"""`fit` under parameter servers."""

import keras
import tensorflow as tf

from tfgpu.compat import training
from tfgpu.parameter_server import coordinator, embeddings, exact_counts
from tfgpu.repairs import Repair, probing


def adding_is_not_one_operation() -> bool:
    """Whether `assign_add` of a Keras variable is made of a read and an assignment."""
    variable = keras.Variable(0.0)
    return "AssignAddVariableOp" not in probing.operations(lambda: variable.assign_add(1.0))


def look_up_reads_the_table() -> bool:
    """Whether an embedding reads its whole table where `ResourceGather` would read the rows."""
    layer = keras.layers.Embedding(4, 2)
    layer.build()
    return "ResourceGather" not in probing.operations(lambda: layer(tf.constant([1])))


def no_coordinator_in_fit() -> bool:
    """Whether Keras's trainer, which a real cluster takes seconds to try, knows of no coordinator."""
    return "coordinator" not in training.trainer_source().lower()


REPAIRS = (
    Repair(
        name="exact-counts",
        fault=("adding to a variable on a parameter server reads, adds and assigns: counts of other workers are lost"),
        issue="https://github.com/tensorflow/tensorflow/issues/61129",
        probe=adding_is_not_one_operation,
        apply=exact_counts.count_exactly,
    ),
    Repair(
        name="rows-on-servers",
        fault="a look-up moves the whole embedding table from its parameter server",
        issue="",
        probe=look_up_reads_the_table,
        apply=embeddings.look_up_on_servers,
    ),
    Repair(
        name="parameter-servers",
        fault="fit raises under ParameterServerStrategy",
        issue="https://github.com/tensorflow/tensorflow/issues/61129",
        probe=no_coordinator_in_fit,
        apply=coordinator.train_by_coordinator,
    ),
)
