"""What this environment is, and whether the package comes up in it: one JSON object on the last line."""

import json
import platform
from importlib import metadata

import keras
import numpy
import tensorflow as tf

import tfgpu
from tfgpu.compat import patch

repairs = tfgpu.repair_keras()
with tfgpu.strategy().scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
ones = numpy.ones((2, 1), "float32")
print(
    json.dumps(
        {
            "versions": {
                "TensorFlow": metadata.version("tensorflow"),
                "Keras": keras.__version__,
                "NumPy": numpy.__version__,
                "Python": platform.python_version(),
            },
            "repairs": len(repairs),
            "in force": repairs,
            "changed": sorted({found.target for found in patch.installed() if found.source == "changed"}),
            "evaluate": type(model.evaluate(ones, ones, verbose=0)).__name__,
            "devices": len(tf.config.list_physical_devices("CPU")),
        }
    )
)
