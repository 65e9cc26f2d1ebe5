"""The scripts behind the tracker's messages, one function each: `python cases.py CASE...` runs them one after another.

With TFGPU=1 in the environment Keras is repaired before them, as `tfgpu run` does it. Each prints one line of JSON,
what it returned or raised. A line on stderr stands before what TensorFlow itself writes there.
"""

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

ROWS = 9
X = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
Y = X[:, :1]


@functools.cache
def mirrored() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def build(strategy=None, optimizer: Callable | str = "sgd", loss="mse", layers=(), **settings) -> keras.Model:
    keras.utils.set_random_seed(0)
    with (strategy or mirrored()).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "relu"), *layers, keras.layers.Dense(1)])
        made = optimizer if isinstance(optimizer, str) else optimizer()
        model.compile(optimizer=made, loss=loss, **settings)
    return model


def fit(model: keras.Model, *, batch_size: int = 4) -> list[float]:
    return model.fit(X, Y, batch_size=batch_size, verbose=0).history["loss"]


def rows_without_a_length() -> tf.data.Dataset:
    kinds = (tf.TensorSpec([4]), tf.TensorSpec([1]))
    return tf.data.Dataset.from_generator(lambda: zip(X, Y, strict=True), output_signature=kinds).batch(4)


def one_device():
    """What each size of batches should come to."""
    return {size: fit(build(tf.distribute.get_strategy()), batch_size=size) for size in (3, 4, 8)}


def steps_per_execution():
    return fit(build(steps_per_execution=2))


def accumulation():
    return fit(build(optimizer=lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)))


def uneven_first_batch():
    return fit(build(), batch_size=3)


def empty_replica():
    """The last batch has one row, and the second replica a mean of nothing."""

    def loss(y, predicted):
        return keras.ops.mean(keras.ops.square(y - predicted))

    return fit(build(loss=loss), batch_size=8)


def jit():
    return fit(build(jit_compile=True))


def compiled_outside():
    model = build()
    model.compile("adam", "mse")
    return fit(model)


def two_workers():
    return fit(build(tf.distribute.MultiWorkerMirroredStrategy()))


def out_of_memory():
    huge = keras.layers.Lambda(
        lambda x: keras.ops.sum(keras.ops.tile(x, (1, 2**40)), axis=-1, keepdims=True), output_shape=(1,)
    )
    return fit(build(layers=[huge]))


def too_few_batches():
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        build(tf.distribute.get_strategy()).fit(data, steps_per_epoch=5, epochs=2, verbose=0)
    return [str(each.message) for each in seen]


def unknown_length():
    return build(tf.distribute.get_strategy()).fit(rows_without_a_length(), verbose=0).history["loss"]


def python_numbers():
    double = tf.function(lambda number: number * tf.constant(2))
    for number in range(7):
        double(number)


def not_a_layer():
    keras.Sequential([tf.Module()])


def late_devices():
    tf.constant(1)
    parts = [tf.config.LogicalDeviceConfiguration()] * 4
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)


def late_devices_by_tfgpu():
    import tfgpu

    tfgpu.environment.set_logical_devices(4)


def late_strategy():
    tf.constant(1)
    os.environ["TF_CONFIG"] = _cluster()
    try:
        tf.distribute.MultiWorkerMirroredStrategy()
    finally:
        del os.environ["TF_CONFIG"]


def late_strategy_by_tfgpu():
    import tfgpu

    os.environ["TF_CONFIG"] = _cluster()
    try:
        tfgpu.strategy()
    finally:
        del os.environ["TF_CONFIG"]


def _cluster() -> str:
    task = {"type": "worker", "index": 0}
    return json.dumps({"cluster": {"worker": ["127.0.0.1:1", "127.0.0.1:2"]}, "task": task})


def saved_model_folder():
    keras.models.load_model("folder")


def other_optimizer():
    model = build(tf.distribute.get_strategy(), optimizer="adam")
    fit(model)
    model.layers[0].trainable = False
    model.save("model.keras")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        keras.models.load_model("model.keras")
    return [str(each.message) for each in seen]


def main(names: list[str]) -> None:
    if "two_workers" not in names:
        parts = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    if os.environ.get("TFGPU"):
        import tfgpu

        tfgpu.repair_keras()
    for name in names:
        print(f"=== {name}", file=sys.stderr, flush=True)
        try:
            found = {"returned": globals()[name]()}
        except Exception as error:
            found = {"raised": type(error).__name__, "message": str(error)}
        print(json.dumps({"case": name, **found}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
