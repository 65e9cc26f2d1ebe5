"""tf.functions that a step calls."""

import tensorflow as tf

from tfgpu.core import nested_functions
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


REPAIRS = (
    Repair(
        name="functions-within",
        fault="a tf.function inside a step gets its own graph, in which replicas cannot run collectives",
        issue="",
        probe=function_cannot_communicate,
        apply=nested_functions.inline_functions,
    ),
)
