import math
import string

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.errors import InputError
from tfgpu.recipes.recipe import Recipe
from tfgpu.tune import space
from tfgpu.tune.space import Choice, Range, as_plain, parse_search


def test_the_words_of_the_command_line():
    found = parse_search(
        [
            "learning_rate=1e-5..1e-1:log",
            "global_batch=16..512:powers",
            "optimizer=adam,sgd",
            "dropout=0..0.5",
            "epochs=2..8",
            "model_options.widths=[64],[256, 128]",
            "model_options.depth=1..4:whole",
        ]
    )
    assert found == {
        "learning_rate": Range(1e-5, 1e-1, "log"),
        "global_batch": Range(16, 512, "powers", whole=True),
        "optimizer": Choice(("adam", "sgd")),
        "dropout": Range(0, 0.5),
        "epochs": Range(2, 8, whole=True),
        "model_options.widths": Choice(([64], [256, 128])),
        "model_options.depth": Range(1, 4, whole=True),
    }


NUMBERS = st.floats(1e-12, 1e12)


@given(st.tuples(NUMBERS, NUMBERS).filter(lambda ends: ends[0] < ends[1]), st.sampled_from(["", ":linear", ":log"]))
def test_a_range_is_read_as_it_is_written(ends, scale):
    found = parse_search([f"learning_rate={ends[0]!r}..{ends[1]!r}{scale}"])["learning_rate"]
    assert (found.low, found.high, found.scale) == (*ends, scale[1:] or "linear")
    assert ends[0] in found and ends[1] in found and math.nextafter(ends[1], math.inf) not in found


@given(st.integers(0, 20), st.integers(1, 10))
def test_powers_hold_the_powers_of_two_alone(low, more):
    found = parse_search([f"global_batch={2**low}..{2 ** (low + more)}:powers"])["global_batch"]
    assert found.exponents == (low, low + more)
    inside = [n for n in range(2**low, min(2 ** (low + more), 5000) + 1) if n in found]
    assert inside == [2**k for k in range(low, low + more + 1) if 2**k <= 5000]


@given(st.lists(st.one_of(st.integers(1, 9999), st.text(string.ascii_lowercase, min_size=4)), min_size=1, unique=True))
def test_a_space_survives_its_yaml_file(values):
    names = [value for value in values if value not in ("true", "false", "null")]
    space_ = {"optimizer": Choice(tuple(names or ["adam"])), "learning_rate": Range(1e-5, 0.1, "log")}
    written = yaml.safe_dump({name: as_plain(domain) for name, domain in space_.items()})
    assert parse_search(yaml.safe_load(written)) == space_


@given(st.text())
def test_any_text_is_read_or_refused_in_one_line(text):
    try:
        parse_search([text])
        parse_search([f"learning_rate={text}"])
    except InputError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("learning_rate", "--search must be NAME=VALUES. Received: 'learning_rate'."),
        ("learning_rte=1..2", "Did you mean 'learning_rate'?"),
        ("learning_rate=1..2:lgo", "Did you mean 'log'?"),
        ("learning_rate=2..1", "must end at a larger number than it starts. Received: 2.0..1.0."),
        ("learning_rate=0..1:log", "must start above 0"),
        ("learning_rate=a..b", "must be two numbers. Received: 'a..b'."),
        ("learning_rate=nan..1", "must end at a larger number"),
        ("global_batch=16..100:powers", "must start and end at powers of two"),
        ("global_batch=1.5..4", "takes whole numbers"),
        ("optimizer=adam,,sgd", "cannot parse the list"),
        ("optimizer=adam,adam", "must not have duplicates"),
        ("seed=0..9", "A study cannot search 'seed'"),
        ("split_seed=0,1", "A study cannot search 'split_seed'"),
        ("prefetch=1,2", "A study cannot search 'prefetch'"),
        ("precision=float32", "A study cannot search 'precision'"),
        ("model_options=1,2", "Name one of them"),
        ("epochs.x=1,2", "is not an option"),
    ],
)
def test_what_cannot_be_searched_is_refused(word, expected):
    with pytest.raises(InputError) as caught:
        parse_search([word])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_twice_is_refused():
    with pytest.raises(InputError, match="gives 'epochs' twice"):
        parse_search(["epochs=1..2", "epochs=2..3"])


def test_values_that_the_schema_refuses_are_found_before_the_first_trial():
    with pytest.raises(InputError, match="The search of dropout contains 1.5"):
        space.check(parse_search(["dropout=0..1.5"]), Recipe(model="mlp"))
    space.check(parse_search(["dropout=0..0.9", "schedule=cosine,constant"]), Recipe(model="mlp"))


def test_options_belong_to_the_name_that_they_were_written_for():
    base = Recipe(optimizer="sgd", optimizer_options={"momentum": 0.9}, learning_rate=0.1)
    assert space.with_settings(base, {"optimizer": "sgd"}).optimizer_options == {"momentum": 0.9}
    other = space.with_settings(base, {"optimizer": "adam", "learning_rate": 0.01})
    assert (other.optimizer, other.optimizer_options, other.learning_rate) == ("adam", {}, 0.01)


def test_a_setting_takes_the_place_of_the_models_option():
    base = Recipe(model="mlp", model_options={"dropout": 0.2, "widths": [8]})
    assert space.value_of(base, "dropout") == 0.2
    assert space.with_settings(base, {"dropout": 0.4}).builder_options == {"widths": [8], "dropout": 0.4}


@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet", "vit", "transformer"])
def test_each_value_of_the_default_space_builds_a_model(model):
    """With each initializer and normalization; none is silently ignored."""
    from tfgpu import models

    shapes = {"mlp": (8,), "cnn": (8, 8, 1), "resnet": (8, 8, 3), "vit": (8, 8, 3)}
    small = {
        "mlp": {"widths": [4]},
        "cnn": {"filters": [2], "units": 2},
        "resnet": {"depth": 8},
        "vit": {"width": 8, "depth": 1, "heads": 1},
        "transformer": {"width": 8, "depth": 1, "heads": 1},
    }[model]
    found = space.default_space(Recipe(model=model))
    assert list(found)[-3:] == ["initializer", "normalization", "dropout"]
    for normalization in found["normalization"].values:
        what = space.with_settings(
            Recipe(model=model, model_options=small), {"normalization": normalization, "dropout": 0.25}
        )
        made = models.build(model, input_shape=shapes.get(model, (16,)), classes=3, options=what.builder_options)
        kinds = {type(layer).__name__ for layer in made.layers}
        assert bool(kinds & {"BatchNormalization", "LayerNormalization", "GroupNormalization"}) == (
            normalization != "none"
        )
        assert any(getattr(layer, "rate", 0) == 0.25 for layer in made.layers)


def test_a_model_without_dropout_refuses_it():
    from tfgpu import models

    what = Recipe(model="ResNet50", dropout=0.2)
    assert "dropout" not in space.default_space(what)
    with pytest.raises(InputError, match="Unknown option of model ResNet50 'dropout'"):
        models.build("ResNet50", input_shape=(32, 32, 3), classes=3, options=what.builder_options)


def test_every_optimizer_of_the_default_space_is_one():
    from tfgpu.recipes import compiling

    for name in space.default_space(Recipe())["optimizer"].values:
        made = compiling.optimizer(Recipe(optimizer=name), learning_rate=0.01)
        assert float(made.learning_rate) == pytest.approx(0.01)
    assert compiling.optimizer(Recipe(optimizer="momentum"), learning_rate=0.01).momentum == 0.9
    own = Recipe(optimizer="momentum", optimizer_options={"momentum": 0.5, "nesterov": True})
    assert compiling.optimizer(own, learning_rate=0.01).momentum == 0.5
