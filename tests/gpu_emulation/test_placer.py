"""Where the tracer places operations, beside the graphs that TensorFlow itself has placed and run on CPU devices."""

import re

import pytest
import tensorflow as tf
import tracer
from placer import HOST, parse
from tensorflow.python.eager import context


@pytest.fixture
def placed_by_tensorflow():
    """The devices of the operations of what runs, as TensorFlow placed it, by name; None where a name is ambiguous."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})  # it renames and removes
    context.enable_run_metadata()

    def read() -> dict[str, str | None]:
        found = {}
        for functions in context.export_run_metadata().function_graphs:
            for node in (node for graph in functions.partition_graphs for node in graph.node):
                name = re.sub(r"/_\d+(?=/|$)", "", node.name)
                found[name] = node.device if found.get(name, node.device) == node.device else None
        return found

    yield read
    context.disable_run_metadata()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


@tf.function
def doubled(x):
    return x * 2.0 + 1.0


@tf.function
def step(x):
    """Two devices, a nested function, a loop, and conditions with and without devices."""
    with tf.device("CPU:1"):
        first = doubled(x)
    with tf.device("CPU:2"):

        def body(count, total):
            with tf.device("CPU:1"):
                more = tf.tanh(total)
            return count + 1, tf.cond(tf.reduce_sum(more) > 0, lambda: total + more, lambda: doubled(total))

        _, second = tf.while_loop(lambda count, _: count < 2, body, (0, first))
    return tf.cond(tf.reduce_sum(second) > 0, lambda: second * 3.0, lambda: first)


def test_it_is_where_tensorflow_places_it(placed_by_tensorflow):
    with tracer.recording() as calls:
        step(tf.ones([3]))
    theirs = placed_by_tensorflow()
    nodes, ours = tracer.placed(calls.largest.function, calls.largest.devices)
    compared = {node: theirs[node.name] for node in nodes if theirs.get(node.name)}
    assert {ours[node].device for node in compared} >= {"GPU:0", "GPU:1"}
    for node, device in compared.items():
        kind, number = parse(device)
        if (kind, number) == ("CPU", 0):  # no device asked for it: the host there, the first GPU here
            assert ours[node].device in (HOST, "GPU:0"), node
        else:
            assert ours[node].device in (f"{kind}:{number}", HOST), node  # int32 may have no kernel for GPUs
