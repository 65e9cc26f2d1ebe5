"""The range test: its rules, equal curves under every strategy, and the restored model."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu import tune
from tfgpu.errors import InputError
from tfgpu.tune.range_test import judged

RNG = np.random.default_rng(0)
X = RNG.normal(size=(100, 6)).astype("float32")
Y = (X.sum(1) > 0).astype("int32")
RATES = [10 ** (k / 20 - 6) for k in range(121)]


def data(batch=16):
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(batch)


def build(strategy=None, optimizer=lambda: keras.optimizers.SGD(0.1, momentum=0.9), policy=None, **options):
    keras.utils.set_random_seed(1)
    with (strategy or tfgpu.strategy("one_device", devices=["CPU:0"])).scope():
        layers = keras.layers
        parts = [layers.Dense(8, dtype=policy), layers.BatchNormalization(dtype=policy), layers.Activation("tanh")]
        parts += [layers.Dropout(0.2, dtype=policy), layers.Dense(2, dtype="float32")]
        model = keras.Sequential([keras.Input((6,)), *parts])
        made = optimizer()
        if policy == "mixed_float16":
            made = keras.optimizers.LossScaleOptimizer(made)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(made, loss, metrics=["accuracy"], **options)
    return model


def test_a_valley_by_hand():
    losses = [1.0 if rate < 1e-4 else max(0.2, 1 - 0.4 * math.log10(rate / 1e-4)) for rate in RATES]
    losses = [loss if rate <= 0.1 else loss + 10 * (rate - 0.1) for rate, loss in zip(RATES, losses, strict=True)]
    found = judged(RATES, losses, complete=True)
    assert 1e-2 <= found.lowest <= 0.12  # the loss is 0.2 from 1e-2 on, and rises after 0.1
    begin = 10 ** (-4 + 0.1 * 0.8 / 0.4)  # where a tenth of the fall is done
    assert found.suggestion == pytest.approx(math.sqrt(begin * found.lowest), rel=0.15)


@pytest.mark.parametrize(
    ("losses", "words"),
    [
        ([1.0] * 121, "did not fall"),
        ([0.0] * 121, "did not fall"),  # all weights are 0
        ([1.0, 2.0, 9.0, math.inf], "after 3 steps. Lower `lowest`"),
        ([1.0 + 0.001 * k for k in range(121)], "did not fall"),
    ],
)
def test_no_suggestion_is_invented(losses, words):
    found = judged(RATES[: len(losses)], losses, complete=True)
    assert found.suggestion is None and words in found.reason


def test_a_sweep_that_ends_too_early_says_so():
    found = judged(RATES, [2.0 - 0.01 * k for k in range(121)], complete=True)
    assert "still falling" in found.reason and found.suggestion is not None


def test_noise_does_not_move_it_much():
    clean = [1.0 if rate < 1e-4 else max(0.2, 1 - 0.4 * math.log10(rate / 1e-4)) for rate in RATES]
    clean = [loss if rate <= 0.1 else loss + 10 * (rate - 0.1) for rate, loss in zip(RATES, clean, strict=True)]
    wanted = judged(RATES, clean, complete=True).suggestion
    for seed in range(20):
        noisy = np.array(clean) + np.random.default_rng(seed).normal(0, 0.05, 121)
        assert 0.2 < judged(RATES, noisy.tolist(), complete=True).suggestion / wanted < 5


def state(model):
    found = [np.array(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]
    return found + [keras.random.uniform((3,)).numpy(), np.random.random(3)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"optimizer": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.1, 50), use_ema=True)},
        {"policy": "mixed_float16"},
        {"optimizer": lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=3)},
    ],
    ids=["momentum", "schedule", "float16", "accumulation"],
)
def test_the_model_is_as_it_was_and_learns_what_it_would_have(how):
    runs = []
    for tested in (False, True):
        model = build(**how)
        model.fit(data(), epochs=1, shuffle=False, verbose=0)
        if tested:
            tune.learning_rate(model, data(), steps=30)
        before = state(model)
        history = model.fit(data(), epochs=2, shuffle=False, verbose=0).history
        runs.append((before, history))
    for one, two in zip(runs[0][0], runs[1][0], strict=True):
        np.testing.assert_array_equal(one, two)
    assert runs[0][1] == runs[1][1]


def test_it_is_put_back_where_it_is_interrupted():
    def kept(model):
        return [np.array(v.numpy()) for v in (*model.variables, *model.optimizer.variables)]

    model = build()
    model.fit(data(), epochs=1, shuffle=False, verbose=0)
    before = kept(model)

    def broken():
        for _ in range(6):
            yield X[:8], Y[:8]
        raise ValueError("the disk is gone")

    spec = tf.TensorSpec([8, 6], tf.float32), tf.TensorSpec([8], tf.int32)
    with pytest.raises((tf.errors.OpError, ValueError)):
        tune.learning_rate(model, tf.data.Dataset.from_generator(broken, output_signature=spec), steps=20)
    for one, two in zip(before, kept(model), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.slow
def test_the_curve_is_one_devices():
    one = tune.learning_rate(build(), data(), steps=40, highest=10)
    for replicas in (2, 4):
        many = tune.learning_rate(build(tfgpu.strategy("mirrored", devices=replicas)), data(), steps=40, highest=10)
        np.testing.assert_allclose(many.losses[:30], one.losses[:30], rtol=1e-4)
        assert many.suggestion == pytest.approx(one.suggestion, rel=0.01)


@pytest.mark.slow
def test_the_first_losses_are_those_of_steps_at_those_rates():
    found = tune.learning_rate(build(), data(), steps=20, lowest=0.01, highest=0.1)
    model = build()
    batches = iter(data().repeat())
    for rate, loss, (x, y) in zip(found.rates, found.losses, batches, strict=False):
        model.optimizer.learning_rate = rate
        assert model.train_on_batch(x, y, return_dict=True)["loss"] == pytest.approx(loss, abs=1e-5)
        model.reset_metrics()
    assert found.rates[0] == pytest.approx(0.01) and found.rates[-1] == pytest.approx(0.1)


def test_the_place_in_the_data_stays():
    digits = tfgpu.data.load("digits", global_batch=64, validation=0.1, test=0.2)
    digits.seek(3)
    with tfgpu.strategy("one_device", devices=["CPU:0"]).scope():
        model = tfgpu.models.mlp(digits.info.input_shape, digits.info.classes)
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    tune.learning_rate(model, digits, steps=30)
    peeked = digits.peek()[1].numpy()
    digits.seek(3)
    np.testing.assert_array_equal(peeked, digits.peek()[1].numpy())


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"steps": 5}, "`steps` must be"),
        ({"steps": True}, "`steps` must be"),
        ({"lowest": 0.0}, "`lowest` must be above 0"),
        ({"lowest": 1.0, "highest": 0.1}, "below `highest`"),
    ],
)
def test_wrong_arguments(how, words):
    with pytest.raises(InputError, match=words):
        tune.learning_rate(build(), data(), **how)


def test_wrong_models_and_data():
    with pytest.raises(InputError, match="Compile it first"):
        tune.learning_rate(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), data())
    with pytest.raises(InputError, match="not built"):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        tune.learning_rate(model, data())
    with pytest.raises(InputError, match="Received: ndarray"):
        tune.learning_rate(build(), X)
    with pytest.raises(InputError, match="steps_per_execution=4"):
        tune.learning_rate(build(steps_per_execution=4), data())
    with pytest.raises(InputError, match="averaging"):
        tune.learning_rate(build(tfgpu.strategy("averaging", 2, every=2)), data())


def test_the_drawing_is_written(tmp_path):
    tune.learning_rate(build(), data(), steps=40, highest=10).plot(tmp_path / "rate.png")
    assert (tmp_path / "rate.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(("lowest", "highest"), [("1e-6", 1.0), (1e-6, None), (True, 2.0), (float("nan"), 1.0)])
def test_rates_that_are_no_numbers(lowest, highest):
    with pytest.raises(InputError, match="`lowest` must be above 0"):
        tune.learning_rate(build(), data(), lowest=lowest, highest=highest)


def test_a_frozen_model_has_no_rate():
    model = build()
    for layer in model.layers:
        layer.trainable = False
    model.compile("sgd", model.loss)
    with pytest.raises(InputError, match="are frozen"):
        tune.learning_rate(model, data(), steps=20)


def test_a_first_batch_that_is_no_number_is_no_question_of_the_rate():
    found = tune.learning_rate(build(), data().map(lambda x, y: (x * math.nan, y)), steps=20)
    assert found.suggestion is None and "is not finite" in found.reason and "Lower" not in found.reason


def test_a_step_of_ones_own_without_a_loss_is_refused_and_nothing_has_moved():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return {"own": super().train_step(data)["loss"]}

    model = Own()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model(X[:1])
    before = model.get_weights()
    with pytest.raises(InputError, match="Received: own"):
        tune.learning_rate(model, data(), steps=20)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.filterwarnings("ignore:Your input ran out of data")
def test_data_that_can_be_read_once_alone_is_no_whole_sweep():
    once = iter([(X[:16], Y[:16])] * 30)
    signature = (tf.TensorSpec((None, 6)), tf.TensorSpec((None,), "int32"))
    model = build()
    before = model.get_weights()
    with pytest.raises(InputError, match="ended after 30 of 200 steps, .*or steps=30"):
        tune.learning_rate(model, tf.data.Dataset.from_generator(lambda: once, output_signature=signature))
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
