"""Models that are trained in every layout, and on one device to compare with."""

import keras
import numpy as np

import tfgpu

RNG = np.random.default_rng(0)
ROWS, BATCH = 50, 16  # the last batch has 2 rows: fewer than micro-batches
WEIGHTS = RNG.uniform(0.5, 2.0, ROWS).astype("float32")


def mlp(policy="float32"):
    """Connections across cuts, dropout, noise without a seed of its own, a loss that a layer adds."""
    inputs = keras.Input((8,))
    first = keras.layers.Dense(16, "relu", name="first", dtype=policy)(inputs)
    x = keras.layers.Dropout(0.3, name="drop", dtype=policy)(first)
    added = "l2" if policy == "float32" else None  # in float16 Keras fails with it, on one device too
    x = keras.layers.Dense(16, "relu", name="second", activity_regularizer=added, dtype=policy)(x)
    x = keras.layers.GaussianNoise(0.1, name="noise", dtype=policy)(x) + first
    x = keras.layers.Dense(16, "relu", name="third", dtype=policy)(x)
    x = keras.layers.Dropout(0.3, name="drop_again", dtype=policy)(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="last", dtype="float32")(x))


def cnn(policy="float32"):
    return tfgpu.models.cnn((8, 8, 1), 4, filters=(4, 8), convolutions=1, units=8, dropout=0.2)


def convolved(policy="float32"):
    """Convolutions with biases: a causal one, one with strides, and one of sizes that take it whole."""
    inputs = keras.Input((12, 4))
    x = keras.layers.Conv1D(8, 3, padding="causal", dilation_rate=2, activation="relu", dtype=policy)(inputs)
    x = keras.layers.Conv1D(6, 3, padding="causal", activation="tanh", name="causal", dtype=policy)(x)
    x = keras.layers.Conv1D(8, 2, strides=2, name="strided", dtype=policy)(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="last", dtype="float32")(x))


def transformer(policy="float32"):
    return tfgpu.models.transformer((6,), 4, width=8, heads=2, depth=2, dropout=0.1, attention_dropout=0.1)


def masked(policy="float32"):
    """A mask that is made in the first stage, and divides the loss after the last."""
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 8, mask_zero=True, name="ids")(inputs)
    x = keras.layers.LSTM(8, return_sequences=True, name="lstm")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="last")(x))


def tied(policy="float32"):
    """One table, looked up in the first stage and multiplied with in the last."""
    inputs = keras.Input((6,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(4, 8, name="table")
    x = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "relu", name="middle")(table(inputs)))
    return keras.Model(inputs, table(keras.layers.Dense(8, "relu", name="last")(x), reverse=True))


MODELS = {
    mlp: ((8,), "float32", ()),
    cnn: ((8, 8, 1), "float32", ()),
    convolved: ((12, 4), "float32", ()),
    transformer: ((6,), "int32", (6,)),
    masked: ((6,), "int32", (6,)),
    tied: ((6,), "int32", (6,)),
}


def data_for(make):
    shape, dtype, positions = MODELS[make]
    rng = np.random.default_rng(1)
    x = rng.normal(size=(ROWS, *shape)).astype("float32") if dtype == "float32" else rng.integers(0, 4, (ROWS, *shape))
    return x.astype(dtype), rng.integers(0, 4, (ROWS, *positions))


def made(make, policy="float32"):
    keras.utils.set_random_seed(1)
    return make(policy)


def fit(make, model, *callbacks, epochs=2, policy="float32", weights=WEIGHTS, clip=None, **options):
    with model.distribute_strategy.scope():
        clip = clip or {"global_clipnorm": 1.0}
        optimizer = keras.optimizers.AdamW(0.01, use_ema=True, **clip, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    x, y = data_for(make)
    arguments = dict(epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks), sample_weight=weights)
    return model.fit(x, y, BATCH, validation_data=(x, y), **arguments).history


def on_one_device(make, **how):
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        model = made(make, how.get("policy", "float32"))
    return model, fit(make, model, **how)


def assert_equal(make, one, history, pipe, expected, tolerance=1e-5):
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=tolerance, err_msg=name)
    for mine, other, variable in zip(pipe.get_weights(), one.get_weights(), one.weights, strict=True):
        # The gradient of a key's bias is 0 but for rounding, of which Adam makes steps: all of its value is that.
        atol = 5 * tolerance if variable.path.endswith("attention/key/bias") else tolerance
        np.testing.assert_allclose(mine, other, rtol=2e-5, atol=atol, err_msg=variable.path)
    x, _ = data_for(make)
    np.testing.assert_allclose(pipe.predict(x, verbose=0), one.predict(x, verbose=0), atol=10 * tolerance)
