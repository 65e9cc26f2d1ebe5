"""tf.functions and conditions in a step, and custom gradients, which TensorFlow keeps in memory forever.

`tf.custom_gradient` registers each gradient of a graph under a new name and never removes it, nor the graph and the
model. Keras calls it in every training step (`ReplicaContext.all_reduce`), so each `fit` of a new model would add to
the memory of the process.
"""

import gc
import weakref
from collections.abc import Callable

import tensorflow as tf

from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import has_own_gradient, let_graph_own_gradient
from tfgpu.core import nested_graphs
from tfgpu.repairs import Repair, probes, probing


def _meet() -> int:
    tf.distribute.get_replica_context().merge_call(lambda strategy: None)
    return 1


def _fails(step: Callable[[], object]) -> bool:
    """Whether replicas that run a step in a graph fail to communicate in it."""
    strategy = probing.mirrored()
    return probing.fails(tf.function(lambda: strategy.run(step)), RuntimeError)


@probes("a tf.function inside a step gets its own graph, in which replicas cannot run collectives")
def function_cannot_communicate() -> bool:
    """Whether a tf.function that a replica calls fails where replicas communicate."""
    meet = tf.function(_meet)
    return _fails(lambda: meet())


@probes("`optimizer.apply` inside `tf.cond` fails: each replica's branch has its own graph")
def condition_cannot_communicate() -> bool:
    """Whether `tf.cond` in a replica fails where replicas communicate in a branch."""
    return _fails(lambda: tf.cond(tf.random.uniform([]) < 2.0, _meet, lambda: 0))


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


@probes("a custom gradient keeps its graph, and with it the model, in memory forever: some megabytes per `fit`")
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
    Repair("functions-within", function_cannot_communicate, nested_graphs.inline_functions),
    Repair("conditions-within", condition_cannot_communicate, nested_graphs.communicate_in_conditions),
    Repair("custom-gradients", graph_stays, free_gradients_with_graphs),
)
