"""The digests of variables are computed where the variables are."""

import gpu_way
import keras
import tensorflow as tf
import traced_models
import tracer

import tfgpu
from tfgpu.consistency import digests


def test_nothing_but_digests_leaves_a_gpu():
    keras.utils.clear_session()
    with gpu_way.gpu_way():
        strategy = tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"])
        with strategy.scope():
            model, compiling, _ = traced_models.cnn()
            model.compile(keras.optimizers.Adam(), jit_compile=False, **compiling)
            model.optimizer.build(model.trainable_variables)
        variables = list(digests.compared(model).values())
        with tracer.recording() as calls:
            found = digests.of_copies(model, variables)
    assert found.shape == (2, len(variables)) and (found[0] == found[1]).all()
    facts = calls.largest.facts()
    assert not facts.moved("between devices") and not facts.collectives.get("GPU:0")
    scalars = [copy for copy in facts.moved("to host") if copy.dtype == "int64" and copy.shape == ()]
    others = [copy for copy in facts.moved("to host") if copy not in scalars]
    whole = [variable for variable in variables if variable.dtype.startswith("int")]
    assert len(scalars) == 2 * len(variables)
    assert len(others) <= 2 * len(whole) and all(copy.bytes <= 16 for copy in others), [*map(str, others)]
    with tf.device("CPU:0"):
        assert tf.reduce_all(digests.odd_numbers(3) == [1, 3, 5])
