import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.errors import InputError
from tfgpu.recipes import recipe
from tfgpu.recipes.recipe import Recipe


def complaint(**settings) -> str:
    with pytest.raises(InputError) as caught:
        recipe.make(settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_setting_has_a_default_a_description_and_a_panel():
    Recipe()
    for name, field in Recipe.model_fields.items():
        assert field.description and field.description.endswith("."), name
        assert field.json_schema_extra["panel"], name


def test_a_recipe_cannot_be_changed():
    with pytest.raises(ValueError, match="frozen"):
        Recipe().epochs = 3


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"epoch": 3}, "Unknown setting 'epoch'. Did you mean 'epochs'?"),
        ({"path": "loop"}, "`path` is gone. Leave it out: every run uses Keras's `fit`"),
        ({"balance": "weights"}, "`balance` is gone. Use `data.mixture` of one source per class. Received: 'weights'."),
        (
            {"strategy": "mirored"},
            "Unknown strategy 'mirored'. Did you mean 'mirrored'? Choices: auto, one_device",
        ),
        ({"precision": "fp16"}, "Choices: auto, float32, tf32, mixed_float16, mixed_bfloat16."),
        ({"schedule": "cosin"}, "Did you mean 'cosine'?"),
        ({"epochs": 0}, "`epochs` should be greater than or equal to 1. Received: 0."),
        ({"epochs": "three"}, "`epochs` should be a whole number. Received: 'three'."),
        ({"epochs": 2.5}, "Received: 2.5."),
        ({"learning_rate": float("nan")}, "`learning_rate` should be a finite number"),
        ({"learning_rate": "-1e-3"}, "`learning_rate` should be greater than 0. Received: '-1e-3'."),
        (
            {"devices": "GPUS"},
            "`devices` should be a number of devices, at least 1, or names such as GPU:0,GPU:1.",
        ),
        ({"devices": 0}, "Received: 0."),
        ({"devices": True}, "`devices` should be"),
        ({"epochs": True}, "`epochs` should be a number. Received: True."),
        ({"learning_rate": True}, "`learning_rate` should be a number. Received: True."),
        ({"warmup_epochs": False}, "`warmup_epochs` should be a number. Received: False."),
        ({"augment": {"flip": {}}}, "such as [flip, rotate: {degrees: 5}]. Received: {'flip': {}}."),
        ({"augment": [{"flip": 3}]}, "such as [flip, rotate: {degrees: 5}]. Received: [{'flip': 3}]."),
        ({"augment": "flip: 3"}, "such as [flip, rotate: {degrees: 5}]. Received: 'flip: 3'."),
        ({"augment": None}, "`augment` should be a list of names"),
        ({"image_size": "big"}, "`image_size` should be a number of pixels, or HEIGHTxWIDTH such as 64x48."),
        ({"validation": 0.6, "test": 0.4}, "`validation` + `test` must be below 1."),
        ({"warmup_epochs": 5, "epochs": 5}, "`warmup_epochs` must be below `epochs`. Received: 5 of 5."),
        (
            {"optimizer_options": {"global_clipnorm": 1}},
            "must not contain 'global_clipnorm'. Use `clip_norm` instead.",
        ),
        ({"model_options": "deep"}, "`model_options` (--model-option) should be a valid dictionary."),
        ({"global_batch": 0}, "`global_batch` (--batch) should be greater than or equal to 1. Received: 0."),
        ({"dropout": 0.2, "model_options": {"dropout": 0.1}}, "`dropout` and 'dropout' in `model_options` are"),
        ({"dropout": 1}, "`dropout` should be less than 1. Received: 1."),
        ({"seed": 2**32}, "`seed` should be less than 4294967296."),
        ({"data": ""}, "`data` should have at least 1 character."),
        (
            {"epochs": 0, "seed": -1},
            "Received: 0. `seed` should be greater than or equal to 0. Received: -1.",
        ),
    ],
)
def test_a_wrong_setting_gets_one_line_that_names_the_right_one(settings, expected):
    assert expected in complaint(**settings)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("epochs", "7", 7),
        ("learning_rate", "1e-3", 0.001),
        ("devices", "2", 2),
        ("devices", "GPU:0, GPU:1", ("GPU:0", "GPU:1")),
        ("image_size", "32", (32, 32)),
        ("image_size", "32x48", (32, 48)),
        ("image_size", [32, 48], (32, 48)),
        ("augment", "none", ()),
        ("augment", ["flip,shift", "rotate"], ("flip", "shift", "rotate")),
        ("augment", ["rotate: {degrees: 5}"], ({"rotate": {"degrees": 5}},)),
        ("augment", [{"rotate": {"degrees": 5}}], ({"rotate": {"degrees": 5}},)),
        ("jit", "true", True),
    ],
)
def test_text_from_flags_and_files_is_read(name, text, value):
    assert getattr(recipe.make({name: text}), name) == value


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("epochs: 3\nlearning_rate: 1e-2\nmodel_options: {dropout: 1e-1}\n")
    loaded = recipe.load(path, overrides={"epochs": "4"})
    assert (loaded.epochs, loaded.learning_rate, loaded.model_options) == (4, 0.01, {"dropout": 0.1})
    assert loaded.data == "digits"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("epochs: 3\nepochs: 4\n", "line 2 is not YAML: 'epochs' is given twice"),
        ("epochs: [3\n", "is not YAML"),
        ("- epochs\n", "must contain settings. Received: \"['epochs']\"."),
        ("3: 4\n", "must contain settings"),
        ("optimiser: adam\n", "Unknown setting 'optimiser'. Did you mean 'optimizer'?"),
        ("!!python/object/apply:os.system ['true']\n", "is not YAML: could not determine a constructor"),
    ],
)
def test_a_wrong_file_is_one_line_with_its_name(tmp_path, text, expected):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        recipe.load(path)
    assert expected in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match="Cannot read the config file .*nothing.yaml.*No such file"):
        recipe.load(tmp_path / "nothing.yaml")


def test_an_empty_file_is_the_default_recipe(tmp_path):
    (tmp_path / "run.yaml").write_text("# nothing yet\n")
    assert recipe.load(tmp_path / "run.yaml") == Recipe()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"data": "digts"}, "Did you mean 'digits'?"),
        ({"augment": "flp"}, "Did you mean 'flip'?"),
        ({"augment": ["rotate: {degree: 3}"]}, "degrees"),
    ],
)
def test_check_finds_wrong_names_without_tensorflow(settings, expected):
    with pytest.raises(InputError, match=expected):
        recipe.check(recipe.make(settings))


def test_settings_of_an_older_run_that_changed_nothing_are_read():
    assert recipe.make({"balance": "none", "epochs": 2}) == recipe.make({"epochs": 2})


words = st.text(string.ascii_lowercase, min_size=1, max_size=8)
values = st.one_of(st.integers(-5, 5), st.floats(0.1, 5), st.booleans(), words)


@given(
    epochs=st.integers(1, 1000),
    learning_rate=st.floats(1e-9, 1e3),
    devices=st.one_of(st.none(), st.integers(1, 64), st.lists(st.just("GPU:1"), min_size=1, max_size=3)),
    options=st.dictionaries(words, values, max_size=3),
    augment=st.lists(st.sampled_from(["flip", "rotate", {"crop": {"padding": 2}}]), max_size=3),
)
def test_every_recipe_survives_its_yaml(epochs, learning_rate, devices, options, augment):
    settings = {"epochs": epochs, "learning_rate": learning_rate, "devices": devices, "augment": augment}
    made = recipe.make(settings | {"model_options": options})
    text = yaml.safe_dump(made.model_dump(mode="json"))
    assert recipe.make(yaml.safe_load(text)) == made


@given(st.text(max_size=30))
def test_a_value_from_the_command_line_never_breaks_the_reader(text):
    recipe.parse_value(text)
