"""A short training, the same under every strategy: its last weights are compared with one device's."""

from tfgpu.errors import MachineError

SEED = 7
_EXAMPLES, _FEATURES, _CLASSES, _BATCH, _EPOCHS = 200, 8, 4, 32, 2


def _training(**_) -> dict:
    """Trains on one device, and on several of this process; on logical CPU devices where there is no second GPU."""
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
    """Trains under a strategy; returns the last weights, flat.

    Args:
        kind: a name that `tfgpu.strategy` knows.
        options: what it gets besides.

    Raises:
        MachineError: the loss is no number.
    """
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu

    # Not deterministic=True: a parameter server's closures are timed, which TensorFlow then refuses.
    tfgpu.environment.set_seed(SEED, deterministic=False)
    tf.config.experimental.enable_tensor_float_32_execution(False)  # Else a GPU rounds to ten bits.
    strategy = tfgpu.strategy(kind, **options)
    random = np.random.default_rng(SEED)
    features = random.normal(size=(_EXAMPLES, _FEATURES)).astype("float32")
    labels = random.integers(0, _CLASSES, _EXAMPLES)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((_FEATURES,)), keras.layers.Dense(16, activation="tanh"), keras.layers.Dense(_CLASSES)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        # Plain SGD: with it, averaging after every step is one device's training too.
        model.compile(keras.optimizers.SGD(0.1), loss)
    # The last batch is smaller, which a strategy must weigh right.
    history = model.fit(features, labels, batch_size=_BATCH, epochs=_EPOCHS, shuffle=False, verbose=0)
    if not np.isfinite(history.history["loss"][-1]):
        raise MachineError(f"The loss of a training with {kind} is {history.history['loss'][-1]}.")
    return [float(number) for weights in model.get_weights() for number in np.ravel(weights)]


QUESTIONS = {"training": _training}
