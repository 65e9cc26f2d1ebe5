"""Custom gradients, which TensorFlow keeps in memory forever, with their graph and the model.

`tf.custom_gradient` registers each gradient of a graph under a new name and never removes it. Keras calls it in every
training step (`ReplicaContext.all_reduce`), so each `fit` of a new model would add to the memory of the process.
"""

import gc
import weakref

import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import has_own_gradient, let_graph_own_gradient
from tfgpu.repairs.repair import Repair


def free_gradients_with_graphs() -> None:
    """Makes a graph own its custom gradients, so that they are freed together."""

    @wrap("custom_gradient.graph_mode_decorator")
    def add_to_graph(stock, function, arguments, keywords):
        results = stock(function, arguments, keywords)
        for value in tf.nest.flatten(results, expand_composites=True):
            operation = getattr(value, "op", None)
            if operation is not None and has_own_gradient(operation):
                let_graph_own_gradient(operation)
                break  # one operation returns all results
        return results


def graph_stays() -> bool:
    """Whether a graph with a custom gradient stays in memory when nothing refers to its function."""
    graphs = []

    @tf.function
    def step(value):
        graphs.append(weakref.ref(tf.compat.v1.get_default_graph()))
        return tf.custom_gradient(lambda given: (given, lambda upstream: upstream * given))(value)

    step(tf.constant(1.0))
    del step
    gc.collect()
    return graphs[0]() is not None


REPAIRS = (
    Repair(
        name="custom-gradients",
        fault="a custom gradient keeps its graph, and with it the model, in memory forever: some megabytes per `fit`",
        issue="",
        probe=graph_stays,
        apply=free_gradients_with_graphs,
    ),
)
