"""A short training, equal under every strategy; its final weights are compared with those of one device.

It is also the script that `tfgpu launch` runs in each process of a self-test; the chief prints the answers.
"""

import os
import sys

from tfgpu.cluster import Cluster
from tfgpu.doctor import facts, selftest
from tfgpu.doctor.facts import asking
from tfgpu.errors import MachineError

_BYTES, _SUMS, _REPEATS = 16 * 2**20, 3, 3
SEED = 7
_EXAMPLES, _FEATURES, _CLASSES, _BATCH, _EPOCHS = 200, 8, 4, 32, 2


def _training(**_) -> dict:
    """Trains on one device, and on several devices of this process; without GPUs, on logical CPU devices."""
    import tensorflow as tf

    from tfgpu import environment

    if not tf.config.list_physical_devices("GPU"):
        environment.set_logical_devices(2)
    count = len(environment.accelerators())
    found = {"devices": count, "kind": environment.accelerators()[0].kind, "one_device": train("one_device")}
    for kind, options in (("mirrored", {}), ("averaging", {"every": 1})):
        if count > 1:
            found[kind] = train(kind, devices=count, **options)
    return found


def train(kind: str, **options: object) -> list[float]:
    """Trains under a strategy; returns the final weights as a flat list.

    Args:
        kind: a strategy's name, for `tfgpu.strategy`.
        options: its further arguments.

    Raises:
        MachineError: the loss is not finite.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu

    # Not deterministic=True, with which TensorFlow rejects the timed closures of a parameter server.
    tfgpu.environment.set_seed(SEED, deterministic=False)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # TF32 rounds to ten bits.
    strategy = tfgpu.strategy(kind, **options)
    random = np.random.default_rng(SEED)
    features = random.normal(size=(_EXAMPLES, _FEATURES)).astype("float32")
    labels = random.integers(0, _CLASSES, _EXAMPLES)
    with strategy.scope():
        hidden, scores = keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(_CLASSES)
        model = keras.Sequential([keras.Input((_FEATURES,)), hidden, scores])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # With plain SGD, averaging after every step also equals one device.
        model.compile(keras.optimizers.SGD(0.1), loss)
    # The last batch is smaller, to test its weight.
    history = model.fit(features, labels, batch_size=_BATCH, epochs=_EPOCHS, shuffle=False, verbose=0)
    if not np.isfinite(history.history["loss"][-1]):
        raise MachineError(f"The loss of a training with {kind} is {history.history['loss'][-1]}.")
    return [float(number) for weights in model.get_weights() for number in np.ravel(weights)]


QUESTIONS = {"training": _training}


def main(kind: str) -> None:
    """Measures all-reduces, and trains; with parameter servers it only trains.

    Args:
        kind: the strategy, or `"machine"` to measure only this machine.
    """
    if kind == "machine":
        asking.tell(kind, _machine())
        return
    cluster = Cluster.from_environment()
    found = {"workers": cluster.size}
    if kind == "multi_worker":
        found |= _sums()
    found["weights"] = train(kind)
    if cluster.is_chief:
        asking.tell(kind, found)


def _machine() -> dict:
    """The answers by part, and `facts`: this machine's devices."""
    environ = {**asking.with_tfgpu(os.environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("TF_CONFIG", None)
    return {**selftest.parts(environ), "facts": facts.hardware(environ)}


def _sums() -> dict:
    import tensorflow as tf

    import tfgpu
    from tfgpu.doctor.selftest import speed

    strategy = tfgpu.strategy("multi_worker")
    measure = speed.of_strategy(tf, strategy, _BYTES, _SUMS)
    measure()
    rates = [measure() for _ in range(_REPEATS)]
    return {"sum": {"values": rates}, "replicas": strategy.num_replicas_in_sync, "bytes": _BYTES}


if __name__ == "__main__":
    main(*sys.argv[1:])
