"""Runs a function on replicas as GPUs would, and says which collectives it has."""

import gpu_way
import numpy as np
import tensorflow as tf
import tracer

import tfgpu

NCCL_TAKES = {"float16", "float32", "float64", "int32", "int64"}


def run_on_replicas(step, replicas=2, **options):
    """What a function returns on each replica, and the collectives of the first device.

    Args:
        step: of no arguments; it returns a list of tensors.
        replicas: up to three.
        options: of the strategy.
    """
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", [f"CPU:{at + 1}" for at in range(replicas)], **options)
        run = tf.function(lambda: strategy.run(step)).get_concrete_function()
        found = [[np.asarray(part) for part in strategy.experimental_local_results(each)] for each in run()]
    facts = tracer.facts_of(run)
    assert facts.has_one_order
    return found, facts.collectives.get("GPU:0", [])
