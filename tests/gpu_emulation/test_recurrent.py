"""Recurrent layers take cuDNN's kernels on replicas, as on one GPU."""

import sys
from collections import Counter

import gpu_way
import keras
import pytest
import tensorflow as tf
import traced_models
import tracer
from keras.src import backend

import tfgpu


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
def test_each_replica_runs_the_kernels_of_cudnn(monkeypatch, replicas):
    monkeypatch.setattr(sys.modules[backend.lstm.__module__], "_is_gpu_available", lambda: True)
    keras.utils.clear_session()
    with gpu_way.gpu_way(replicas), tracer.recording() as calls:
        kind = "one_device" if replicas == 1 else "mirrored"
        with tfgpu.strategy(kind, devices=[f"CPU:{at + 1}" for at in range(replicas)]).scope():
            model, compiling, data = traced_models.recurrent()
            model.compile("sgd", jit_compile=False, **compiling)
        source = tf.data.Dataset.from_tensor_slices(data(52)).batch(13 * replicas, drop_remainder=True)
        with pytest.raises(tf.errors.InvalidArgumentError, match="No OpKernel.*CudnnRNNV3"):  # here is no GPU
            model.fit(source, verbose=0)
    nodes, places = tracer.placed(calls.largest.function, calls.largest.devices)
    found = Counter((node.type, places[node].device) for node in nodes if "CudnnRNN" in node.type)
    kernels = "CudnnRNNV3", "CudnnRNNBackpropV3"
    assert found == {(kind, f"GPU:{at}"): 2 for kind in kernels for at in range(replicas)}
    assert not [node for node in nodes if "TensorList" in node.type]  # of a loop over time
    assert not calls.step(rows=13).moved("to host", has_rows=True)
