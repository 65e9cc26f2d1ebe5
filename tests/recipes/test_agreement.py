"""Recipe settings that depend on each other, and the objects made from them."""

import keras
import numpy as np
import pytest

from tfgpu.callbacks import EvaluateAverages
from tfgpu.errors import InputError
from tfgpu.recipes import compiling
from tfgpu.recipes.heads import Head
from tfgpu.recipes.recipe import make
from tfgpu.training.optimizers import LARS


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"early_stopping": 0}, "`early_stopping` should be greater than or equal to 1"),
        ({"early_stopping_options": {"min_delta": 1}}, "`early_stopping_options` need `early_stopping`"),
        ({"early_stopping": 2, "early_stopping_options": {"patience": 3}}, "option of early_stopping 'patience'"),
        ({"early_stopping": 2, "early_stopping_options": {"mode": "mx"}}, "Did you mean 'max'?"),
        ({"early_stopping": 2, "early_stopping_options": {"min_delta": -1}}, "`min_delta` must be a number of"),
        ({"early_stopping": 2, "early_stopping_options": {"start_epoch": 0}}, "`start_epoch` must be a whole number"),
        ({"early_stopping": 2, "early_stopping_options": {"restore_best": 1}}, "`restore_best` must be true or false"),
        ({"early_stopping": 2, "early_stopping_options": {"monitor": ""}}, "`monitor` must be a metric's name"),
        ({"weight_average_options": {"momentum": 0.9}}, "`weight_average_options` need `weight_average`"),
        ({"weight_average": "eam"}, "Did you mean 'ema'?"),
        ({"weight_average": "ema", "weight_average_options": {"momentum": 1}}, "`momentum` must be a number above 0"),
        ({"weight_average": "ema", "optimizer_options": {"use_ema": True}}, "Received: 'use_ema'"),
        ({"optimizer": "LARS", "decay": "all"}, "LARS never decays biases"),
        ({"label_smoothing": 1}, "`label_smoothing` should be less than 1"),
        ({"length": 1}, "`length` should be greater than or equal to 2"),
    ],
)
def test_contradicting_settings_are_one_line(settings, expected):
    with pytest.raises(InputError) as caught:
        make(settings)
    assert expected in str(caught.value) and "\n" not in str(caught.value)


def test_milestones_are_epochs():
    recipe = make({"schedule": "step", "epochs": 10, "warmup_epochs": 1, "schedule_options": {"milestones": [4, 7.5]}})
    rate = compiling.schedule(recipe, steps_per_epoch=10).learning_rate
    found = [float(rate(step)) / recipe.learning_rate for step in (10, 39, 40, 74, 75)]
    np.testing.assert_allclose(found, [1, 1, 0.1, 0.1, 0.01], rtol=1e-5)


@pytest.mark.parametrize("milestones", [None, [], [0], [20], [5, 4], "5", [True]])
def test_milestones_outside_the_run_are_refused(milestones):
    recipe = make({"schedule": "step", "schedule_options": {"milestones": milestones}})
    with pytest.raises(InputError, match="increasing epochs above 0 and below epochs=20"):
        compiling.schedule(recipe, steps_per_epoch=10)


def test_a_moving_average_keeps_its_share_by_update():
    recipe = make({"weight_average": "ema", "weight_average_options": {"momentum": 0.9}, "accumulate": 3})
    made = compiling.optimizer(recipe, learning_rate=0.1)
    assert made.use_ema and made.ema_momentum**3 == pytest.approx(0.9)


def test_lars_takes_the_recipe_s_decay():
    recipe = make({"optimizer": "lars", "weight_decay": 0.1, "optimizer_options": {"trust": 0.01}})
    made = compiling.optimizer(recipe, learning_rate=0.1)
    assert isinstance(made, LARS) and (made.weight_decay, made.trust) == (0.1, 0.01)


@pytest.mark.parametrize(("decay", "bias"), [("auto", 0.9), ("all", 0.9), ("kernels", 1.0)])
def test_decay_shrinks_what_the_recipe_says(decay, bias):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, bias_initializer="ones")])
    recipe = make({"optimizer": "sgd", "weight_decay": 1.0, "decay": decay})
    compiling.compile_model(model, recipe, learning_rate=0.1)
    before = model.layers[0].kernel.numpy()
    model.optimizer.apply([keras.ops.zeros((2, 3)), keras.ops.zeros(3)], model.trainable_variables)
    np.testing.assert_allclose(model.layers[0].kernel, before * 0.9, rtol=1e-6)
    np.testing.assert_allclose(model.layers[0].bias, [bias] * 3, rtol=1e-6)


@pytest.mark.parametrize(
    ("settings", "labels", "message"),
    [
        ({"early_stopping": 2, "early_stopping_options": {"monitor": "val_acuracy"}}, "class", "'val_accuracy'"),
        ({"schedule": "plateau", "schedule_options": {"monitor": "valloss"}}, "class", "Did you mean 'val_loss'"),
        ({"early_stopping": 2, "early_stopping_options": {"monitor": "val_perplexity"}}, "class", "Unknown monitor"),
        ({"early_stopping": 2, "early_stopping_options": {"monitor": "val_perplexity"}}, "tokens", None),
    ],
)
def test_a_metric_that_is_never_reported_is_not_waited_for(settings, labels, message):
    if message is None:
        compiling.check_monitors(make(settings), heads=[Head(labels, 3)])
        return
    with pytest.raises(InputError, match=message):
        compiling.check_monitors(make(settings), heads=[Head(labels, 3)])


def test_the_callbacks_of_the_ending():
    assert compiling.callbacks(make({})) == ()
    recipe = make({"weight_average": "ema", "early_stopping": 3, "early_stopping_options": {"start_epoch": 4}})
    averages, stopping = compiling.callbacks(recipe)
    assert isinstance(averages, EvaluateAverages)
    assert (stopping.patience, stopping.start_from_epoch, stopping.mode) == (3, 3, "min")


AVERAGED = {"weight_average": "ema", "epochs": 2}
OWN_AVERAGE = {"epochs": 2, "optimizer_options": {"use_ema": True}}


@pytest.mark.parametrize(
    ("settings", "expected"),  # 40 steps per epoch
    [
        (AVERAGED, "45.2%"),  # 0.99 ** 79
        (AVERAGED | {"accumulate": 4}, "82.0%"),
        (AVERAGED | {"weight_average_options": {"momentum": 0.97}}, None),  # 0.97 ** 79 is 0.090
        (AVERAGED | {"weight_average_options": {"momentum": 0.98}}, "20.3%"),
        (AVERAGED | {"epochs": 6}, None),  # 0.99 ** 239 is 0.091
        (AVERAGED | {"epochs": 5}, "13.5%"),  # 0.99 ** 199
        (OWN_AVERAGE, "45.2%"),
        (OWN_AVERAGE | {"accumulate": 4}, "45.2%"),  # Keras's is of steps
        ({"epochs": 2, "optimizer_options": {"use_ema": True, "ema_overwrite_frequency": 10}}, None),
        ({"epochs": 2}, None),
    ],
)
def test_an_average_that_is_still_the_initial_value_is_reported(settings, expected):
    recipe = make(settings)
    said = compiling.about_average(recipe, compiling.optimizer(recipe, learning_rate=0.1), steps_per_epoch=40)
    assert said is None if expected is None else f"a share of {expected}." in said


def test_the_share_of_the_beginning_is_what_keras_keeps_of_it():
    """The first step sets a weight to 1 and all others leave it at 0, so its average is the first step's share."""
    recipe = make(AVERAGED | {"optimizer": "sgd"})
    optimizer, weight = compiling.optimizer(recipe, learning_rate=1.0), keras.Variable(0.0)
    for gradient in (-1.0, 1.0, *[0.0] * 8):
        optimizer.apply([keras.ops.convert_to_tensor(gradient)], [weight])
    optimizer.finalize_variable_values([weight])
    said = compiling.about_average(recipe, optimizer, steps_per_epoch=5)
    assert f"a share of {float(weight):.1%}" in said and "91.4%" in said  # 0.99 ** 9


def test_the_best_epoch_s_averages_are_kept():
    x = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
    recipe = make({"weight_average": "ema", "early_stopping": 1, "optimizer": "sgd"})
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(compiling.optimizer(recipe, learning_rate=0.3), "mse")
    averages, stopping = compiling.callbacks(recipe)
    seen = []
    keep = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(averages.averaged()))
    # The validation asks for something else than the training: it only gets worse.
    model.fit(x, x[:, :1], validation_data=(x, -x[:, :1]), epochs=6, verbose=0, callbacks=[averages, keep, stopping])
    assert len(seen) == 2 and stopping.best_epoch == 0
    for weight, best in zip(model.get_weights(), seen[0], strict=True):
        np.testing.assert_array_equal(weight, best)
    assert compiling.ends_with([averages, stopping]) == "the moving averages of the best epoch, 1"
