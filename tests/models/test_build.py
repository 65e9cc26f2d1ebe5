"""`models.build`: tfgpu's builders, Keras's applications and the user's functions, by name."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import models
from tfgpu.errors import InputError

SMALL = {
    "cnn": ((8, 8, 1), {"filters": [4, 8], "units": 8}),
    "mlp": ((8, 8, 1), {"widths": [8]}),
    "resnet": ((8, 8, 1), {"depth": 8}),
    "transformer": ((6,), {"width": 8, "depth": 1, "heads": 2}),
    "vit": ((8, 8, 1), {"width": 8, "depth": 1, "heads": 2, "patch": 2}),
}


def example(shape, classes=10):
    """A batch of three: images, or token ids if the shape is a length."""
    random = np.random.default_rng(0)
    if len(shape) == 1:
        return random.integers(0, classes, (3, *shape)).astype("int32")
    return random.normal(size=(3, *shape)).astype("float32")


@pytest.fixture(params=["float32", "mixed_float16"])
def policy(request):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_dtype_policy(before)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", models.BUILDERS)
def test_every_builder_makes_float32_logits_that_survive_saving_and_export(name, policy, tmp_path):
    shape, options = SMALL[name]
    keras.utils.set_random_seed(1)
    model = models.build(name, input_shape=shape, classes=10, options=options)
    x = example(shape)
    expected = model(x)
    assert expected.dtype == "float32" and model.output.dtype == "float32"
    assert expected.shape == ((3, 6, 10) if name == "transformer" else (3, 10))
    assert not np.allclose(np.sum(expected, axis=-1), 1.0), "these are logits, not probabilities"
    half = [layer for layer in model.layers if layer.compute_dtype == "float16"]
    assert bool(half) == (policy == "mixed_float16")

    model.save(tmp_path / "model.keras")
    keras.config.set_dtype_policy("float32")  # the file says what each layer computes in
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(x), expected)
    assert [w.path for w in loaded.weights] == [w.path for w in model.weights]

    model.export(tmp_path / "exported", verbose=False)
    # The exported graph may fuse operations, which float16 rounds otherwise.
    tolerance = 1e-6 if policy == "float32" else 2e-3
    exported = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(exported.serve(x), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("name", models.BUILDERS)
def test_every_weight_of_every_builder_gets_a_gradient(name):
    shape, options = SMALL[name]
    keras.utils.set_random_seed(1)
    model = models.build(name, input_shape=shape, classes=10, options=options)
    x = example(shape)
    y = x if name == "transformer" else np.array([0, 1, 2])
    with tf.GradientTape() as tape:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, model(x, training=True))
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    missing = [v.path for v, g in zip(model.trainable_variables, gradients, strict=True) if g is None]
    assert not missing and np.isfinite(loss)


def test_names_ignore_capitals():
    assert models.build("MLP", input_shape=(4,), classes=2).name == "mlp"


@pytest.mark.parametrize(("wrong", "right"), [("resnt", "resnet"), ("MobilNetV2", "mobilenetv2"), ("cn", "cnn")])
def test_an_unknown_model_names_the_closest(wrong, right):
    with pytest.raises(InputError, match=f"Unknown model '{wrong}'. Did you mean '{right}'"):
        models.build(wrong, input_shape=(8, 8, 1), classes=10)


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_name_that_is_not_a_string(name):
    with pytest.raises(InputError, match="must be a string"):
        models.build(name, input_shape=(8, 8, 1), classes=10)


def test_an_unknown_option_names_the_closest_and_the_allowed():
    with pytest.raises(InputError, match="Unknown option of model cnn 'filter'. Did you mean 'filters'.*kernel"):
        models.build("cnn", input_shape=(8, 8, 1), classes=10, options={"filter": [4]})


def test_options_cannot_set_the_shape_twice():
    with pytest.raises(InputError, match="Unknown option of model cnn 'classes'"):
        models.build("cnn", input_shape=(8, 8, 1), classes=10, options={"classes": 4})


# keras.applications


def test_an_application_has_logits_for_our_classes(policy):
    with keras.StatelessScope(initialize_variables=False):
        model = models.build("mobilenetv2", input_shape=(32, 32, 3), classes=7, options={"alpha": 0.35})
    assert model.output_shape == (None, 7)
    assert model.output.dtype == "float32"
    heads = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
    assert heads[-1].activation is keras.activations.linear


def test_an_application_does_not_rescale_what_the_pipeline_has_scaled():
    with keras.StatelessScope(initialize_variables=False):
        model = models.build("MobileNetV3Small", input_shape=(32, 32, 3), classes=2)
    assert not [layer for layer in model.layers if isinstance(layer, keras.layers.Rescaling)]


def test_an_application_refuses_small_images_in_one_line():
    with pytest.raises(InputError, match="'MobileNetV2' cannot be built for input_shape=.8, 8, 1.*at least 32x32") as e:
        models.build("MobileNetV2", input_shape=(8, 8, 1), classes=10)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize("option", ["weights", "classifier_activation", "include_top", "pooling"])
def test_an_application_keeps_its_top_layers(option):
    with pytest.raises(InputError, match=f"Unknown option of model MobileNetV2 '{option}'"):
        models.build("MobileNetV2", input_shape=(32, 32, 3), classes=10, options={option: None})


# module:function

SOURCE = """
import keras

def good(input_shape, classes, width=4):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(width),
                             keras.layers.Dense(classes)])

def fixed():
    return good((8, 8, 1), 3)

def anything(**settings):
    return good(settings["input_shape"], settings["classes"], settings["units"])

def needy(input_shape, classes, width):
    return good(input_shape, classes, width)

def nothing(input_shape, classes):
    return "a model"

def soft(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(),
                             keras.layers.Dense(classes, activation="softmax")])

number = 3
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_models_for_test.py").write_text(SOURCE)
    (tmp_path / "needs_more_for_test.py").write_text("import no_such_library_anywhere\n")
    return "own_models_for_test"


def own(function, **options):
    return models.build(function, input_shape=(8, 8, 1), classes=10, options=options)


def test_a_function_of_the_users_own(here):
    import sys

    before = list(sys.path)
    assert own(f"{here}:good", width=2).count_params() == 64 * 2 + 2 + 2 * 10 + 10
    assert own(f"{here}:fixed").output_shape == (None, 3)
    assert own(f"{here}:anything", units=5).layers[1].units == 5
    assert sys.path == before


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module_here:f", {}, "no module 'no_such_module_here'"),
        ("no_such_package.part:f", {}, "no module 'no_such_package.part'"),
        ("needs_more_for_test:f", {}, "needs 'no_such_library_anywhere', which is not installed"),
        (
            "own_models_for_test:god",
            {},
            "Unknown function of module own_models_for_test 'god'. Did you mean 'good'",
        ),
        ("own_models_for_test:number", {}, "must name a function. Received: a int"),
        ("own_models_for_test:nothing", {}, "must return a keras.Model. Received: str"),
        ("own_models_for_test:soft", {}, "must return logits"),
        ("own_models_for_test:needy", {}, "needs the option 'width'"),
        ("own_models_for_test:good", {"wide": 3}, "Unknown option .* 'wide'. Did you mean 'width'"),
        ("own_models_for_test:", {}, "named module:function"),
        (":good", {}, "named module:function"),
        (".relative:good", {}, "is not a module name"),
    ],
)
def test_what_is_wrong_with_a_function_is_said_in_one_line(here, name, options, message):
    with pytest.raises(InputError, match=message) as e:
        own(name, **options)
    assert "\n" not in str(e.value)


def test_a_function_that_ends_the_program_is_named(tmp_path, monkeypatch):
    (tmp_path / "leaving.py").write_text("import sys\ndef build(**_): sys.exit(0)\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="leaving:build called sys.exit.0.. Return a Keras model"):
        models.build("leaving:build", input_shape=(8,), classes=2)


@pytest.mark.parametrize("name", [*models.BUILDERS, "MobileNetV2"])
def test_a_size_that_is_not_known_is_an_error(name):
    """`data.info.input_shape` has None for examples of several sizes, which the type allows."""
    shape = (None,) if name == "transformer" else (None, 32, 3)
    with pytest.raises(InputError, match="input_shape.*Received:.*None"):
        models.build(name, input_shape=shape, classes=5)
