"""`Trainer` compared with `model.fit`: same weights and history, and the requested number of steps per call."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu

RNG = np.random.default_rng(0)
X = RNG.normal(size=(50, 4)).astype("float32")
Y = RNG.integers(0, 3, 50)


def strategies():
    return {
        "one device": lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        "two replicas": lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]),
    }


def build(strategy, **compiled):
    tfgpu.repair_keras()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(3)]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"], **compiled)
    return model


def difference(a, b):
    return max(float(np.abs(x - y).max()) for x, y in zip(a.get_weights(), b.get_weights(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "steps_per_call"), [("one device", None), ("two replicas", 3)])
def test_learns_and_logs_what_fit_does(kind, steps_per_call):
    make = strategies()[kind]
    arguments = dict(batch_size=8, epochs=3, validation_split=0.2, class_weight={0: 1.0, 1: 2.0, 2: 0.5}, verbose=0)
    by_fit, by_loop = build(make()), build(make())
    keras.utils.set_random_seed(4)
    expected = by_fit.fit(X, Y, **arguments)
    keras.utils.set_random_seed(4)
    history = tfgpu.Trainer(by_loop, steps_per_call=steps_per_call).fit(X, Y, **arguments)
    assert difference(by_fit, by_loop) <= 1e-6
    assert history.epoch == expected.epoch and history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        assert history.history[name] == pytest.approx(values, abs=1e-5), name


class Recorder(keras.callbacks.Callback):
    every_batch = False

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_batch_begin(self, batch, logs=None):
        self.seen.append(("begin", batch))

    def on_train_batch_end(self, batch, logs=None):
        self.seen.append(("end", batch))

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append(("epoch", epoch))


def test_callbacks_run_between_blocks_with_the_numbers_of_their_steps():
    recorder = Recorder()
    model = build(tf.distribute.get_strategy())
    tfgpu.Trainer(model, steps_per_call=3).fit(X, Y, batch_size=10, callbacks=[recorder], verbose=0)
    assert recorder.seen == [("begin", 0), ("end", 2), ("begin", 3), ("end", 4), ("epoch", 0)]


@pytest.mark.sample("4")
@pytest.mark.parametrize("steps_per_call", [1, 4])
def test_a_pass_of_unknown_length_and_steps_per_epoch(steps_per_call):
    def rows():
        yield from zip(X, Y, strict=True)

    signature = (tf.TensorSpec((4,), tf.float32), tf.TensorSpec((), tf.int64))
    endless = tf.data.Dataset.from_generator(rows, output_signature=signature).batch(8)
    trainer = tfgpu.Trainer(build(tf.distribute.get_strategy()), steps_per_call=steps_per_call)
    trainer.fit(endless, epochs=2, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 14  # 50 rows are 7 batches
    trainer.fit(endless.repeat(), epochs=3, steps_per_epoch=5, verbose=0)
    assert int(trainer.model.optimizer.iterations) == 14 + 15


@pytest.mark.slow
def test_evaluate_and_predict_are_kerass():
    model = build(tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]))
    trainer = tfgpu.Trainer(model)
    expected = model.evaluate(X, Y, batch_size=16, return_dict=True, verbose=0)
    found = trainer.evaluate(X, Y, batch_size=16, return_dict=True, verbose=0)
    assert found == pytest.approx(expected, abs=1e-6)
    listed = model.evaluate(X, Y, batch_size=16, verbose=0)
    assert trainer.evaluate(X, Y, batch_size=16, verbose=0) == pytest.approx(listed, abs=1e-6)
    alone = build(tf.distribute.get_strategy())
    assert np.abs(trainer.predict(X, verbose=0) - alone.predict(X, verbose=0)).max() <= 1e-6


def test_compiling_again_takes_the_new_optimizer():
    model = build(tf.distribute.get_strategy())
    trainer = tfgpu.Trainer(model)
    trainer.fit(X, Y, verbose=0)
    before = model.get_weights()
    model.compile(keras.optimizers.SGD(0.0), model.loss)
    trainer.fit(X, Y, verbose=0)
    assert all((a == b).all() for a, b in zip(before, model.get_weights(), strict=True))


def test_wrong_input_is_one_clear_error():
    model = build(tf.distribute.get_strategy())
    for wrong in (0, True, 1.5):
        with pytest.raises(tfgpu.InputError, match=f"whole number of at least 1. Received: {wrong}"):
            tfgpu.Trainer(model, steps_per_call=wrong)
    with pytest.raises(tfgpu.InputError, match="Received: str"):
        tfgpu.Trainer("model")
    uncompiled = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(tfgpu.InputError, match="compiled before `fit`"):
        tfgpu.Trainer(uncompiled).fit(X, Y)

    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    with pytest.raises(tfgpu.InputError, match="Own overrides `make_train_function`. Use model.fit"):
        tfgpu.Trainer(Own([keras.Input((4,)), keras.layers.Dense(1)]))


@pytest.mark.slow
def test_a_custom_loop_learns_the_same():
    """The documented hand-written loop: strategy.run inside a tf.function, the loss divided by the global batch."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    model, alone = build(strategy), build(tf.distribute.get_strategy())
    for layer in (*model.layers, *alone.layers):
        if isinstance(layer, keras.layers.Dropout):
            layer.rate = 0.0
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(16)

    def step(x, y, size):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / tf.cast(size, tf.float32)
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))

    @tf.function
    def train(iterator, sizes):
        for size in sizes:
            strategy.run(step, args=(*next(iterator), size))

    train(iter(strategy.experimental_distribute_dataset(data)), tf.constant([16, 16, 16, 2]))
    alone.fit(data, epochs=1, verbose=0)
    assert difference(model, alone) <= 1e-6
