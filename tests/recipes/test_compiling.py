import keras
import pytest

from tfgpu.errors import InputError
from tfgpu.recipes import compiling
from tfgpu.recipes.heads import Head
from tfgpu.recipes.recipe import Recipe, make


def test_every_optimizer_of_keras_is_found_and_wrappers_are_not():
    found = compiling.optimizers()
    assert {"adam", "adamw", "sgd", "lion", "lamb", "rmsprop"} <= found.keys()
    assert found["adamw"] is keras.optimizers.AdamW
    assert not {"optimizer", "lossscaleoptimizer", "multioptimizer"} & found.keys()


@pytest.mark.parametrize("name", sorted(compiling.optimizers()))
def test_every_optimizer_can_be_made_with_its_own_settings(name):
    made = compiling.optimizer(Recipe(optimizer=name), learning_rate=0.25)
    assert float(made.learning_rate) == 0.25


def test_settings_reach_the_optimizer():
    recipe = make(
        {
            "optimizer": "AdamW",
            "optimizer_options": {"beta_1": 0.8, "use_ema": True},
            "weight_decay": 0.01,
            "clip_norm": 1.5,
            "accumulate": 4,
        }
    )
    made = compiling.optimizer(recipe, learning_rate=0.1)
    assert isinstance(made, keras.optimizers.AdamW)
    assert (made.beta_1, made.use_ema, made.weight_decay) == (0.8, True, 0.01)
    assert (made.global_clipnorm, made.gradient_accumulation_steps) == (1.5, 4)


def test_settings_that_are_not_given_are_the_optimizers_own():
    made = compiling.optimizer(Recipe(optimizer="adamw"), learning_rate=0.1)
    assert (made.weight_decay, made.global_clipnorm, made.gradient_accumulation_steps) == (0.004, None, None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"optimizer": "adm"}, "Unknown optimizer 'adm'. Did you mean 'adam'?"),
        ({"optimizer_options": {"beta1": 0.9}}, "Did you mean 'beta_1'?"),
        ({"optimizer_options": {"beta_1": "high"}}, "'beta_1' must be a number, such as 0.9. Received: 'high'"),
        ({"optimizer_options": {"epsilon": float("nan")}}, "'epsilon' must be a number"),
        ({"optimizer_options": {"amsgrad": "maybe"}}, "'amsgrad' must be true or false, such as false"),
        ({"optimizer": "lars", "optimizer_options": {"trust": True}}, "'trust' must be a number"),
        ({"optimizer_options": {"ema_momentum": 3.0, "use_ema": True}}, "Keras's Adam rejects the options"),
    ],
)
def test_wrong_optimizers_are_named(settings, expected):
    with pytest.raises(InputError, match=expected):
        compiling.optimizer(make(settings), learning_rate=0.1)


def rates(steps, **settings) -> list[float]:
    schedule = compiling.schedule(make(settings), steps_per_epoch=10)
    return [float(schedule.learning_rate(step)) for step in steps]


def test_cosine_warms_up_for_one_epoch_and_ends_at_zero():
    # 100 updates, 10 of them warm-up: half of the way down after 45 more.
    found = rates([0, 10, 55, 100], epochs=10, learning_rate=0.1)
    assert found == pytest.approx([0.1 / 11, 0.1, 0.05, 0.0], abs=1e-7)


def test_a_schedule_counts_updates_and_not_steps():
    # 4 steps an update: 25 updates, of which round(2.5) are warm-up. Keras asks with the number of steps.
    assert rates([8, 100], epochs=10, learning_rate=0.1, accumulate=4) == pytest.approx([0.1, 0.0], abs=1e-7)


def test_one_epoch_still_rises_and_falls():
    assert rates([10], epochs=1, learning_rate=0.1) == pytest.approx([0.0], abs=1e-7)


def test_plateau_is_a_callback():
    schedule = compiling.schedule(
        make({"schedule": "plateau", "schedule_options": {"patience": 2}}), steps_per_epoch=10
    )
    (callback,) = schedule.callbacks
    assert schedule.learning_rate == Recipe().learning_rate and callback.patience == 2


def test_plateau_has_no_warmup():
    with pytest.raises(InputError, match="has no warmup"):
        compiling.schedule(make({"schedule": "plateau", "warmup_epochs": 1.5}), steps_per_epoch=10)
    with pytest.raises(InputError, match="`warmup_epochs` must be below `epochs`. Received: 4 of 4"):
        make({"schedule": "plateau", "warmup_epochs": 4, "epochs": 4})


def test_options_of_a_schedule_are_checked():
    with pytest.raises(InputError, match="Did you mean 'final'?"):
        compiling.schedule(make({"schedule_options": {"finale": 0.1}}), steps_per_epoch=10)


def test_the_model_is_compiled_for_logits_and_class_numbers():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    compiling.compile_model(model, Recipe(), learning_rate=0.1)
    assert model.loss.get_config()["from_logits"] is True
    assert model.jit_compile is False


@pytest.mark.parametrize("name", ["cosine", "exponential"])
def test_accumulation_leaves_the_rates_of_the_epochs_as_they_are(name):
    plain = compiling.schedule(Recipe(schedule=name, epochs=4), steps_per_epoch=40)
    grouped = compiling.schedule(Recipe(schedule=name, epochs=4, accumulate=8), steps_per_epoch=40)
    for epoch in (2, 3):  # Keras asks with the number of batches, accumulated or not
        steps = 40 * epoch
        assert float(grouped.learning_rate(steps)) == pytest.approx(float(plain.learning_rate(steps)), rel=0.1)


@pytest.mark.parametrize(
    ("labels", "kind"),
    [("class", keras.losses.SparseCategoricalCrossentropy), ("one_hot", keras.losses.CategoricalCrossentropy)],
)
def test_the_loss_fits_the_labels(labels, kind):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    compiling.compile_model(model, Recipe(), learning_rate=0.1, heads=[Head(labels, 3)])
    assert isinstance(model.loss, kind)
