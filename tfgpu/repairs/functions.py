"""tf.functions and conditions in a step."""

import tensorflow as tf

from tfgpu.core import nested_graphs
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def function_cannot_communicate() -> bool:
    """Whether a tf.function that a replica calls fails where replicas communicate."""

    @tf.function
    def meet():
        tf.distribute.get_replica_context().merge_call(lambda strategy: None)

    strategy = probing.mirrored()
    try:
        tf.function(lambda: strategy.run(lambda: meet()))()
    except RuntimeError:
        return True
    return False


def condition_cannot_communicate() -> bool:
    """Whether `tf.cond` in a replica fails where replicas communicate in a branch."""

    def meet():
        tf.distribute.get_replica_context().merge_call(lambda strategy: None)
        return 1

    strategy = probing.mirrored()
    try:
        tf.function(lambda pred: strategy.run(lambda: tf.cond(pred, meet, lambda: 0)))(tf.constant(True))
    except RuntimeError:
        return True
    return False


REPAIRS = (
    Repair(
        name="functions-within",
        fault="a tf.function inside a step gets its own graph, in which replicas cannot run collectives",
        issue="",
        probe=function_cannot_communicate,
        apply=nested_graphs.inline_functions,
    ),
    Repair(
        name="conditions-within",
        fault="`optimizer.apply` inside `tf.cond` fails: each replica's branch has its own graph",
        issue="",
        probe=condition_cannot_communicate,
        apply=nested_graphs.communicate_in_conditions,
    ),
)
