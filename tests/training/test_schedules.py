"""Schedules: values by hand, in saved models and graphs, and errors."""

import math

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.errors import InputError
from tfgpu.training import schedules


def rates(schedule, steps):
    return [float(schedule.learning_rate(step)) for step in steps]


def test_constant_is_a_plain_number():
    assert schedules.build("constant", 0.1, total_steps=10) == schedules.Schedule(0.1, ())


def test_constant_with_warmup():
    schedule = schedules.build("constant", 0.5, total_steps=10, warmup_steps=4)
    np.testing.assert_allclose(rates(schedule, range(7)), [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], rtol=1e-6)


def test_cosine():
    schedule = schedules.build("cosine", 0.2, total_steps=100)
    quarter = 0.1 * (1 + math.cos(math.pi / 4))
    np.testing.assert_allclose(rates(schedule, [0, 25, 50, 100, 200]), [0.2, quarter, 0.1, 0, 0], atol=1e-7)


def test_cosine_with_warmup_and_a_floor():
    schedule = schedules.build("cosine", 0.5, total_steps=24, warmup_steps=4, options={"final": 0.1})
    # half way through the 20 updates after the warm-up: 0.5 * (0.9 * 0.5 + 0.1)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.275, 0.05, 0.05]
    np.testing.assert_allclose(rates(schedule, [0, 1, 2, 3, 4, 14, 24, 50]), expected, rtol=1e-6)
    assert isinstance(schedule.learning_rate, keras.optimizers.schedules.CosineDecay)


def test_exponential():
    schedule = schedules.build("exponential", 1.0, total_steps=100)
    np.testing.assert_allclose(rates(schedule, [0, 50, 100]), [1.0, 0.1, 0.01], rtol=1e-5)


def test_exponential_with_warmup():
    schedule = schedules.build("exponential", 1.0, total_steps=14, warmup_steps=4, options={"final": 0.25})
    np.testing.assert_allclose(rates(schedule, [0, 3, 4, 9, 14]), [0.2, 0.8, 1.0, 0.5, 0.25], rtol=1e-5)


def test_polynomial_falls_by_a_power_of_what_is_left():
    schedule = schedules.build("polynomial", 0.4, total_steps=10, options={"power": 2})
    np.testing.assert_allclose(rates(schedule, [0, 5, 9, 10, 30]), [0.4, 0.1, 0.004, 0.0, 0.0], atol=1e-7)


def test_polynomial_with_warmup_and_a_floor():
    schedule = schedules.build("polynomial", 0.4, total_steps=10, warmup_steps=2, options={"final": 0.25})
    expected = [0.4 / 3, 0.8 / 3, 0.4, 0.25, 0.1]  # a straight line over 8 updates, from 0.4 to 0.1
    np.testing.assert_allclose(rates(schedule, [0, 1, 2, 6, 10]), expected, rtol=1e-5)


def test_step_lowers_the_rate_with_the_update_that_a_milestone_names():
    schedule = schedules.build("step", 1.0, total_steps=10, options={"milestones": [3, 5], "factor": 0.5})
    np.testing.assert_allclose(rates(schedule, range(8)), [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25])


def test_milestones_count_the_warmup():
    schedule = schedules.build("step", 0.9, total_steps=10, warmup_steps=2, options={"milestones": [4]})
    np.testing.assert_allclose(rates(schedule, range(6)), [0.3, 0.6, 0.9, 0.9, 0.09, 0.09], rtol=1e-6)


CASES = [
    ("constant", 3),
    ("cosine", 0),
    ("cosine", 3),
    ("exponential", 0),
    ("exponential", 3),
    ("polynomial", 0),
    ("polynomial", 3),
    ("step", 0),
    ("step", 3),
]
GIVEN = {"step": {"milestones": [4, 8]}}


def made(name, warmup, *, total_steps=12, accumulate=1):
    options = GIVEN.get(name) if total_steps == 12 else {"milestones": [3]} if name == "step" else None
    settings = {"total_steps": total_steps, "warmup_steps": warmup, "accumulate": accumulate, "options": options}
    if name == "step" and total_steps == 4:
        settings["warmup_steps"] = min(warmup, 2)
    return schedules.build(name, 0.3, **settings)


@pytest.mark.parametrize(("name", "warmup"), CASES)
def test_every_schedule_goes_through_a_configuration_and_a_graph(name, warmup):
    schedule = made(name, warmup)
    expected = rates(schedule, range(14))
    optimizer = keras.optimizers.SGD(schedule.learning_rate)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))._learning_rate
    np.testing.assert_array_equal([float(again(step)) for step in range(14)], expected)
    for jit in (False, True):
        graph = tf.function(schedule.learning_rate.__call__, jit_compile=jit)
        found = [float(graph(tf.constant(step, tf.int64))) for step in range(14)]
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-8)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("name", "warmup"), CASES)
def test_a_compiled_model_saves_with_its_schedule(name, warmup, tmp_path):
    schedule = made(name, warmup)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(schedule.learning_rate), loss="mse")
    x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
    model.fit(x, y, batch_size=2, verbose=0)
    assert float(model.optimizer.learning_rate) == pytest.approx(rates(schedule, [4])[0])
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert float(loaded.optimizer.learning_rate) == float(model.optimizer.learning_rate)


def train(learning_rate, batch, accumulate):
    """Trains a linear model on 8 examples for an epoch; returns its weights."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(learning_rate, gradient_accumulation_steps=accumulate), loss="mse")
    x = np.random.default_rng(0).normal(size=(8, 2)).astype("float32")
    model.fit(x, x[:, :1], batch_size=batch, shuffle=False, verbose=0)
    return np.concatenate([w.ravel() for w in model.get_weights()])


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "warmup"), CASES)
def test_with_accumulation_a_schedule_moves_once_an_update(name, warmup):
    plain, accumulated = (made(name, warmup, total_steps=4, accumulate=k).learning_rate for k in (1, 2))
    by_update = [float(plain(update)) for update in range(5)]
    assert [float(accumulated(batch)) for batch in range(10)] == list(np.repeat(by_update, 2))
    np.testing.assert_allclose(train(accumulated, 1, 2), train(plain, 2, None), atol=1e-6)


def test_keras_itself_counts_batches():
    """If this fails, Keras counts updates, and `accumulate` and `PerUpdate` can be removed."""
    plain = schedules.build("exponential", 0.3, total_steps=4).learning_rate
    assert np.abs(train(plain, 1, 2) - train(plain, 2, None)).max() > 1e-3


def test_a_schedule_with_accumulation_goes_through_a_configuration():
    schedule = schedules.build("cosine", 0.3, total_steps=9, warmup_steps=3, accumulate=2).learning_rate
    optimizer = keras.optimizers.SGD(schedule, gradient_accumulation_steps=2)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(optimizer))._learning_rate
    assert [float(again(step)) for step in range(18)] == [float(schedule(step)) for step in range(18)]


def test_plateau_lowers_the_rate_of_a_real_run():
    options = {"monitor": "loss", "patience": 1, "factor": 0.1, "min_learning_rate": 1e-3}
    schedule = schedules.build("plateau", 0.1, total_steps=10, options=options)
    assert schedule.learning_rate == 0.1
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(schedule.learning_rate), loss="mse")
    x = np.zeros((4, 1), "float32")  # nothing to learn: the loss stays
    history = model.fit(x, x, epochs=5, verbose=0, callbacks=list(schedule.callbacks)).history
    np.testing.assert_allclose(history["learning_rate"], [0.1, 0.1, 0.01, 0.001, 0.001], rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("cosin", {}, "Unknown schedule 'cosin'. Did you mean 'cosine'"),
        (
            "cosine",
            {"options": {"finl": 0}},
            "Unknown option of schedule cosine 'finl'. Did you mean 'final'",
        ),
        ("constant", {"options": {"final": 0}}, "Schedule 'constant' has no options. Received: final=0"),
        (
            "cosine",
            {"options": {"final": 1.5}},
            "`final` must be a number at least 0 and at most 1. Received: final=1.5",
        ),
        ("exponential", {"options": {"final": 0}}, "`final` must be a number above 0 and at most 1"),
        ("cosine", {"warmup_steps": 10}, "warmup_steps=10, total_steps=10"),
        ("cosine", {"warmup_steps": -1}, "`warmup_steps` must be a whole number of at least 0"),
        ("cosine", {"total_steps": 0}, "`total_steps` must be a whole number of at least 1"),
        ("cosine", {"total_steps": 2.5}, "`total_steps`"),
        ("cosine", {"accumulate": 0}, "`accumulate` must be a whole number of at least 1"),
        ("constant", {"learning_rate": 0}, "`learning_rate` must be a number above 0"),
        ("constant", {"learning_rate": math.nan}, "`learning_rate`"),
        ("constant", {"learning_rate": "fast"}, "`learning_rate`"),
        ("plateau", {"warmup_steps": 10}, "warmup_steps=10, total_steps=10"),
        ("polynomial", {"options": {"power": 0}}, "`power` must be a number above 0"),
        ("step", {}, r"needs `milestones`.*Received: milestones=\(\)"),
        ("step", {"options": {"milestones": [5, 3]}}, "increasing whole numbers"),
        ("step", {"options": {"milestones": [2.5]}}, "increasing whole numbers"),
        ("step", {"options": {"milestones": [10]}}, "below total_steps=10"),
        ("step", {"options": {"milestones": [2]}, "warmup_steps": 2}, "above warmup_steps=2"),
        ("step", {"options": {"milestones": "all"}}, "Received: milestones='all'"),
        ("step", {"options": {"milestones": [2], "factor": 1}}, "`factor` must be a number above 0 and below 1"),
        ("plateau", {"warmup_steps": 1}, "has no warmup"),
        ("plateau", {"options": {"factor": 1.0}}, "`factor` must be a number above 0 and below 1"),
        ("plateau", {"options": {"patience": 0}}, "`patience`"),
        ("plateau", {"options": {"mode": "mn"}}, "Unknown mode 'mn'. Did you mean 'min'"),
        ("plateau", {"options": {"monitor": ""}}, "`monitor`"),
        (
            "plateau",
            {"options": {"min_learning_rate": 0.2}},
            "`min_learning_rate` must be a number .* below 0.1",
        ),
    ],
)
def test_invalid_input_is_reported(name, settings, message):
    with pytest.raises(InputError, match=message):
        schedules.build(name, **{"learning_rate": 0.1, "total_steps": 10, **settings})
