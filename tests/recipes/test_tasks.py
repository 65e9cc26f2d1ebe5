"""Runs on numbers, named targets, several inputs and sample weights: heads, losses, metrics, report, model file."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.recipes import building, heads, runner
from tfgpu.recipes.compare import compare
from tfgpu.recipes.recipe import Recipe, make

RNG = np.random.default_rng(0)
COUNT = 80
X = RNG.normal(size=(COUNT, 3)).astype("float32")
PRICE = (X @ [1.0, -2.0, 0.5] + 1).astype("float32")
SMALL = {"model": "mlp", "model_options": {"widths": [8]}, "epochs": 2, "global_batch": 16, "strategy": "one_device"}
SMALL |= {"watch_machine": False, "validation": 0.1, "test": 0.2}


def written(folder, **arrays) -> str:
    np.savez(folder / "data.npz", **arrays)
    return str(folder / "data.npz")


def run(folder, **settings):
    return runner.run(make({**SMALL, **settings}), output=folder / "run")


def test_a_run_on_numbers_ends_with_their_errors_in_all_its_files(tmp_path):
    result = run(tmp_path, data=written(tmp_path, x=X, y=PRICE, sample_weight=np.ones(COUNT)))
    assert (result.accuracy, set(result.metrics)) == (None, {"mae", "rmse", "r2_score", "loss"})
    assert result.metrics["rmse"] == pytest.approx(result.metrics["loss"] ** 0.5, rel=1e-5)
    model = keras.models.load_model(result.run_directory / "model.keras")
    data = building.open_data(make({**SMALL, "data": f"{tmp_path}/data.npz"}), Cluster())
    x, y, _ = (np.concatenate(each) for each in zip(*data.test.as_numpy_iterator(), strict=True))
    found = model.predict(x, verbose=0)
    assert found.shape == (len(y), 1)
    assert np.abs(found[:, 0] - y).mean() == pytest.approx(result.metrics["mae"], rel=1e-4)
    rest = np.square(found[:, 0] - y).sum() / np.square(y - y.mean()).sum()
    assert result.metrics["r2_score"] == pytest.approx(1 - rest, abs=1e-3)
    page = (result.run_directory / "report.html").read_text()
    assert all(word in page for word in ("test MAE", "test RMSE", "R²", "a number")) and "accuracy" not in page
    results = compare([result.run_directory]).runs[0].results
    assert results["test_mae"] == pytest.approx(result.metrics["mae"])
    assert results["best val_r2_score"] == max(row["val_r2_score"] for row in result.history)


@pytest.mark.parametrize("shape", [(2,), (3, 2)])
def test_numbers_of_any_shape_are_the_models_outputs(tmp_path, shape):
    y = RNG.normal(size=(COUNT, *shape))
    job = building.build(make({**SMALL, "data": written(tmp_path, x=X, y=y)}), Cluster())
    assert job.model.output_shape == (None, *shape)
    names = {name for name in job.model.evaluate(job.data.test, verbose=0, return_dict=True)}
    assert names == {"loss", "mae", "rmse", *(["r2_score"] if len(shape) == 1 else [])}


def named(folder) -> str:
    kinds, ids = np.array(["flat", "hut", "tower"])[np.arange(COUNT) % 3], RNG.integers(0, 5, (COUNT, 2, 2))
    return written(folder, **{"x/left": X, "x/ids": ids, "y/kind": kinds, "y/price": PRICE, "sample_weight": PRICE**2})


STOCK = """
import json, sys
import keras, numpy as np
assert "tfgpu" not in sys.modules
model = keras.models.load_model(sys.argv[1])
x = {"left": np.ones((4, 3), "float32"), "ids": np.ones((4, 2, 2), "int64")}
y = {"kind": np.zeros(4, "int64"), "price": np.ones(4, "float32")}
model.fit(x, y, verbose=0)
print(json.dumps({name: value.tolist() for name, value in model.predict(x, verbose=0).items()}))
"""


@pytest.mark.slow
def test_several_inputs_and_targets_by_name_open_in_stock_keras_and_are_exported(tmp_path):
    import tfgpu

    what = {"data": named(tmp_path), "recompute": True, "early_stopping": 5}
    what["early_stopping_options"] = {"monitor": "val_price_r2_score"}
    result = run(tmp_path, **what)
    assert {"kind_accuracy", "price_mae", "price_rmse", "price_r2_score", "loss"} == set(result.metrics)
    assert {"val_kind_loss", "val_price_loss", "val_kind_accuracy"} <= result.history[-1].keys()
    file = result.run_directory / "model.keras"
    done = subprocess.run(
        [sys.executable, "-c", STOCK, str(file)], cwd=tmp_path, capture_output=True, text=True, timeout=550, check=True
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert np.shape(found["kind"]) == (4, 3) and np.shape(found["price"]) == (4, 1)
    made = tfgpu.serving.export(result.run_directory, tmp_path / "served")
    assert made.difference < 1e-5 and set(made.inputs) == {"left", "ids"}
    page = (result.run_directory / "report.html").read_text()
    assert "kind=3 classes, price=a number" in page and "left 3, ids 2 × 2" in page


@pytest.mark.slow
def test_two_replicas_learn_named_targets_as_one_device_does(tmp_path):
    what = {"data": named(tmp_path), "global_batch": 15}
    one = runner.run(make({**SMALL, **what}), output=tmp_path / "one")
    two = runner.run(make({**SMALL, **what, "strategy": "mirrored", "devices": "CPU:0,CPU:1"}), output=tmp_path / "two")
    for name, value in one.metrics.items():
        assert two.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_only_digits_are_held_back_by_default():
    shares = [(what.validation, what.test) for what in (make({}), make({"data": "a.npz"}), make({"test": 0}))]
    assert shares == [(0.1, 0.2), (0, 0), (0.1, 0)]


@pytest.mark.slow
def test_nothing_is_held_back_if_nothing_is_asked_for(tmp_path):
    settings = {name: value for name, value in SMALL.items() if name not in ("validation", "test")}
    what = make({**settings, "data": written(tmp_path, x=X, y=PRICE), "epochs": 1})
    result = runner.run(what, output=tmp_path / "run")
    assert (result.metrics, result.loss, result.facts["train_examples"]) == ({}, None, COUNT)
    assert "training MAE" in (result.run_directory / "report.html").read_text()


@pytest.mark.parametrize(
    ("arrays", "settings", "message"),
    [
        ({"y": PRICE}, {"validation": 0, "early_stopping": 3}, "monitors val_loss, but nothing is held back"),
        ({"y": PRICE}, {"validation": 0, "schedule": "plateau"}, "schedule plateau monitors val_loss"),
        ({"y": PRICE}, {"classes": 3}, "needs one class per example"),
        ({"y": PRICE}, {"task": "price=regression"}, "needs named targets"),
        ({"y": np.where(np.arange(COUNT) == 7, np.nan, PRICE)}, {}, "NaN or Inf in example 7"),
        ({"y": PRICE, "z": X}, {}, "an array 'z'. Expected the names x, y, x/NAME"),
        ({"y": PRICE[:-1]}, {}, "one row per example"),
        ({"y/count": np.arange(COUNT) * 999}, {}, "--task count=regression"),
        ({"y/next": -np.ones((COUNT, 4), int)}, {}, "no loss for the target 'next' of data.npz"),
        ({"y/next": np.full((COUNT, 4), 99999)}, {}, "400,000 outputs for the target 'next'"),
        ({"y/price": PRICE, "y/dense1": PRICE}, {}, "layers named dense1. Rename these targets"),
        ({"y/price": PRICE}, {"task": {"prise": "regression"}}, "Did you mean 'price'"),
        (
            {"y/price": PRICE, "y/rent": PRICE},
            {"early_stopping": 2, "early_stopping_options": {"monitor": "val_mae"}},
            "val_price_mae",
        ),
        ({"y/price": PRICE}, {"early_stopping": 2, "early_stopping_options": {"monitor": "val_price_mae"}}, "val_mae"),
        ({"y": np.array([{"a": 1}] * COUNT, object)}, {}, "Python objects, which are not unpickled"),
    ],
    ids=range(15),
)
def test_what_cannot_be_trained_on_is_named(tmp_path, arrays, settings, message):
    what = make({**SMALL, "data": written(tmp_path, x=X, **arrays), **settings})
    with pytest.raises(InputError, match=message) as caught:
        building.build(what, Cluster())
    assert "\n" not in str(caught.value)


def test_only_a_perceptron_takes_several_inputs(tmp_path):
    with pytest.raises(InputError, match="takes one input.*left, ids.*Use mlp"):
        building.build(make({**SMALL, "model_options": {}, "model": "cnn", "data": named(tmp_path)}), Cluster())


def test_a_model_of_the_users_gets_the_outputs_by_name(tmp_path, monkeypatch):
    (tmp_path / "own_named.py").write_text(
        "import keras\n"
        "def right(input_shape, classes):\n"
        "    x = keras.Input(input_shape['left'], name='left'), keras.Input(input_shape['ids'], name='ids')\n"
        "    ids = keras.ops.cast(keras.ops.reshape(x[1], (-1, 4)), 'float32')\n"
        "    all_of_x = keras.ops.concatenate([x[0], ids], -1)\n"
        "    y = {name: keras.layers.Dense(units, name=name)(all_of_x) for name, units in classes.items()}\n"
        "    return keras.Model(dict(zip(('left', 'ids'), x)), y)\n"
        "def wrong(input_shape, classes):\n"
        "    x = keras.Input(input_shape['left'], name='left')\n"
        "    return keras.Model({'left': x}, {'kind': keras.layers.Dense(2)(x)})\n"
    )
    monkeypatch.chdir(tmp_path)
    what = make({**SMALL, "model_options": {}, "model": "own_named:right", "data": named(tmp_path)})
    assert heads.output_shapes(building.build(what, Cluster()).model) == {"kind": (3,), "price": (1,)}
    with pytest.raises(InputError, match="named like the targets. Received: outputs {'kind': .2,.}; expected"):
        building.build(what.model_copy(update={"model": "own_named:wrong"}), Cluster())


def test_a_task_of_each_target_is_read_from_a_line():
    assert make({"task": "price=regression, kind=classification"}).task == {
        "price": "regression",
        "kind": "classification",
    }
    for wrong in ("regresion", "price=regresion", "price=", 3):
        with pytest.raises(InputError, match="regression"):
            make({"task": wrong})
    assert Recipe().task is None
    assert heads.metric_names([heads.Head("tokens", 4)]) == ["accuracy", "perplexity"]


OWN = """
import keras


def pixels(input_shape, classes):
    x = given = keras.Input(input_shape)
    for _ in range(2):
        x = keras.layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    heads = {name: keras.layers.Conv2D(count, 1, name=name)(x) for name, count in classes.items()}
    return keras.Model(given, heads)


class Detector(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        found, boxes = y_pred["bounding_boxes"], y["bounding_boxes"]
        there = keras.ops.cast(boxes["labels"] >= 0, "float32")
        errors = keras.ops.mean(keras.ops.square(found - boxes["boxes"] / 8.0), -1)
        return keras.ops.mean(errors * there)


def detector(input_shape, classes):
    given = keras.Input(input_shape)
    x = keras.layers.Dense(8, "relu")(keras.layers.Flatten()(given))
    boxes = keras.layers.Reshape((2, 4), name="bounding_boxes")(keras.layers.Dense(8)(x))
    return Detector(given, {"bounding_boxes": boxes})
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Models of a user's own, in the current folder."""
    name = f"own_models_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return name


def tagged(folder, **arrays) -> str:
    tags = (X > 0).astype("int64")
    return written(folder, **{"x": X, "y/tags": tags, "y/price": PRICE, **arrays})


@pytest.mark.slow
def test_a_class_at_each_place_of_a_sequence(tmp_path):
    result = run(tmp_path, data=tagged(tmp_path), epochs=30, learning_rate=0.02, test=0)
    last = result.history[-1]
    assert last["tags_accuracy"] > 0.9 and last["tags_loss"] < 0.5 * result.history[0]["tags_loss"]
    model = keras.models.load_model(result.run_directory / "model.keras")
    assert heads.output_shapes(model)["tags"] == (3, 2)
    page = (result.run_directory / "report.html").read_text()
    assert "tags=2 classes at 3 places" in page.replace("×", "x")


def masks(folder) -> str:
    import tensorflow as tf

    for name in ("images", "masks"):
        (folder / "leaves" / name).mkdir(parents=True)
    for at in range(24):
        mask = (RNG.normal(size=(8, 8, 1)) > 0).astype("uint8") * 2
        picture = np.repeat(mask * 100 + RNG.integers(0, 20, (8, 8, 1)), 3, -1).astype("uint8")
        (folder / "leaves" / "images" / f"{at}.png").write_bytes(tf.io.encode_png(picture).numpy())
        (folder / "leaves" / "masks" / f"{at}.png").write_bytes(tf.io.encode_png(mask).numpy())
    return f"masks:{folder}/leaves"


@pytest.mark.slow
def test_masks_in_files(tmp_path, own):
    what = {"data": masks(tmp_path), "augment": ["flip"], "model": f"{own}:pixels", "model_options": {}}
    with pytest.raises(InputError, match="Use --classes, one more than the largest number"):
        building.build(make({**SMALL, **what}), Cluster())
    result = run(tmp_path, **what, classes=3, epochs=15, learning_rate=0.05)
    assert result.metrics["accuracy"] > 0.9, result.history
    mlp = building.build(make({**SMALL, "data": what["data"], "classes": 3}), Cluster()).model
    assert heads.output_shapes(mlp) == {"segmentation_masks": (8, 8, 3)}


def boxes(folder) -> str:
    pictures = [{"id": at, "file_name": f"{at}.png", "width": 8, "height": 8} for at in range(24)]
    found = [
        {"id": at, "image_id": at, "category_id": 7, "bbox": [at % 4, 1, 3, 2 + at % 3], "area": 6, "iscrowd": 0}
        for at in range(24)
    ]
    text = {"images": pictures, "annotations": found, "categories": [{"id": 7, "name": "leaf"}]}
    (folder / "boxes.json").write_text(json.dumps(text))
    masks(folder)
    return f"coco:{folder}/boxes.json#{folder}/leaves/images"


@pytest.mark.slow
def test_boxes_need_a_model_with_a_loss_of_its_own(tmp_path, own):
    what = {"data": boxes(tmp_path), "augment": ["flip"], "model_options": {}}
    with pytest.raises(InputError, match="no loss for the target 'bounding_boxes' .* whose `compute_loss` takes it"):
        building.build(make({**SMALL, **what}), Cluster())
    with pytest.raises(InputError, match="must have a loss of its own for the targets bounding_boxes"):
        building.build(make({**SMALL, **what, "model": f"{own}:pixels"}), Cluster())
    result = run(tmp_path, **what, model=f"{own}:detector", epochs=4)
    assert result.history[-1]["loss"] < result.history[0]["loss"] and result.metrics.keys() == {"loss"}


def test_masks_take_no_weight_per_example(tmp_path):
    what = {"x": RNG.normal(size=(COUNT, 4, 4, 1)), "y/masks": RNG.integers(0, 2, (COUNT, 4, 4)).astype("uint8")}
    with pytest.raises(InputError, match="cannot weight the target 'masks'"):
        building.build(make({**SMALL, "data": written(tmp_path, **what, sample_weight=PRICE**2)}), Cluster())
