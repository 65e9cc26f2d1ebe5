"""What people train on: numbers, several inputs and outputs, sample weights, boxes and masks."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.core import worker_rows
from tfgpu.data import load, mixture, write_shards
from tfgpu.data.augmentation import targets
from tfgpu.errors import InputError

RNG = np.random.default_rng(0)
X, W = RNG.normal(size=(30, 4)).astype("float32"), RNG.uniform(0.5, 2, 30).astype("float32")
NUMBERS = (2 * X[:, 0] + 0.1).astype("float64")


def made(source, **settings):
    return load(source, **{"global_batch": 8, "seed": 3, **settings})


def rows_of(part):
    """All batches of one iteration, as one structure."""
    return tf.nest.map_structure(lambda *each: np.concatenate(each), *part.as_numpy_iterator())


@pytest.mark.parametrize("shape", [(30,), (30, 1), (30, 2), (30, 3, 2)])
def test_numbers_are_targets_of_any_shape(shape):
    y = RNG.normal(size=shape)
    data = made((X, y), validation=0.2, test=0.2)
    assert (data.info.labels, data.info.classes, data.info.class_names) == ("numbers", 0, ())
    assert data.train.element_spec[1] == tf.TensorSpec([None, *shape[1:]], tf.float32)
    seen = [rows_of(part) for part in (data.train, data.validation, data.test)]
    x, found = (np.concatenate(each) for each in zip(*seen, strict=True))
    at = np.array([int(np.flatnonzero((X == row).all(1))[0]) for row in x])
    assert sorted(at) == list(range(30))
    np.testing.assert_array_equal(found, y[at].astype("float32"))


def test_the_task_is_said_or_found():
    whole = np.arange(30.0)
    assert made((X, whole % 3)).info.labels == "class"
    prices = made((X, whole % 3), task="regression")
    assert prices.info.labels == "numbers" and prices.train.element_spec[1].dtype == tf.float32
    assert made((X, np.eye(3)[np.arange(30) % 3]), task="regression").info.labels == "numbers"
    for y, task, message in (
        (NUMBERS, "classification", "whole numbers"),
        (np.eye(3)[np.arange(30) % 3], None, "argmax"),
        (["a"] * 30, "regression", "needs numbers"),
        (NUMBERS, "regresion", "Did you mean 'regression'"),
        (np.where(np.arange(30) == 4, np.nan, NUMBERS), None, "NaN or Inf in example 4"),
    ):
        with pytest.raises(InputError, match=message):
            made((X, y), task=task)


def test_streams_and_tables_of_numbers(tmp_path):
    def stream():
        yield from zip(X, NUMBERS, strict=True)

    expected = [x.numpy() for batch in made((X, NUMBERS)).train for x in batch]
    for memory_bytes in (1 << 30, 10):
        found = [x.numpy() for batch in made(stream, memory_bytes=memory_bytes).train for x in batch]
        assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))
    pytest.importorskip("pyarrow")
    lines = [f"{a},{b},{y}" for (a, b, *_), y in zip(X, NUMBERS, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["a,b,price", *lines]))
    x, y = rows_of(made(f"{tmp_path}/a.csv#price", shuffle=False).train)
    np.testing.assert_array_equal(y, NUMBERS.astype("float32"))


NAMED = {"left": X, "ids": np.arange(60).reshape(30, 2)}
TARGETS = {"kind": np.arange(30) % 3, "price": NUMBERS, "next": np.arange(60).reshape(30, 2)}


@pytest.mark.slow
def test_named_inputs_and_outputs_with_sample_weights_stay_together():
    data = made((NAMED, TARGETS, W), validation=0.2)
    assert data.info.labels == "named" and data.info.input_shape == {"left": (4,), "ids": (2,)}
    for x, y, w in (rows_of(data.train), rows_of(data.validation)):
        at = x["ids"][:, 0] // 2
        np.testing.assert_array_equal(x["left"], X[at])
        np.testing.assert_array_equal(y["kind"], at % 3)
        np.testing.assert_array_equal(y["price"], NUMBERS[at].astype("float32"))
        np.testing.assert_array_equal(y["next"], NAMED["ids"][at])
        np.testing.assert_array_equal(w, W[at])
    assert len(rows_of(data.train)[2]) == 24

    def stream():
        for row in range(30):
            yield tf.nest.map_structure(lambda each, row=row: each[row], (NAMED, TARGETS, W))

    again = rows_of(made(stream, validation=0.2).train)
    data.seek(0)
    tf.nest.map_structure(np.testing.assert_array_equal, again, rows_of(data.train))
    dataset = tf.data.Dataset.from_tensor_slices((NAMED, TARGETS, W))
    tf.nest.map_structure(np.testing.assert_array_equal, rows_of(made(dataset, validation=0.2).train), again)


def test_each_worker_makes_its_rows():
    data = made((NAMED, TARGETS, W))
    whole = [*data.train.as_numpy_iterator()]
    for shard in range(2):
        data.seek(0)
        own = worker_rows.of(data.train).make(worker_rows.Ranges((shard,), 2))
        for (rows, total), batch in zip(own.as_numpy_iterator(), whole, strict=True):
            half = -(-total // 2)
            part = slice(0, half) if shard == 0 else slice(half, None)
            tf.nest.map_structure(lambda a, b, part=part: np.testing.assert_array_equal(a, b[part]), rows, batch)


@pytest.mark.slow
def test_keras_fits_a_model_of_two_inputs_and_outputs():
    data = made((NAMED, {name: TARGETS[name] for name in ("kind", "price")}, W), validation=0.2)
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        inputs = {"left": keras.Input((4,), name="left"), "ids": keras.Input((2,), name="ids")}
        x = keras.layers.Concatenate()([inputs["left"], inputs["ids"] / 60])
        outputs = {"kind": keras.layers.Dense(3, name="kind")(x), "price": keras.layers.Dense(1, name="price")(x)}
        model = keras.Model(inputs, outputs)
        losses = {"kind": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "price": "mse"}
        model.compile(keras.optimizers.Adam(0.05), losses)
    history = model.fit(data.train, validation_data=data.validation, epochs=3, verbose=0).history
    assert history["loss"][-1] < history["loss"][0] and len(history["val_price_loss"]) == 3


def pictures(count=6, side=12):
    """A bright square on black in each picture, its box, its mask, and a second box that does not exist."""
    images, masks = np.zeros((count, side, side, 1), np.float32), np.zeros((count, side, side), np.int64)
    boxes, labels = np.zeros((count, 2, 4), np.float32), np.full((count, 2), -1)
    for at in range(count):
        left, top = RNG.integers(2, 6, 2)
        images[at, top : top + 4, left : left + 3] = 1
        masks[at, top : top + 4, left : left + 3] = 1 + at % 2
        boxes[at, 0], labels[at, 0] = (left, top, left + 3, top + 4), at % 2
    y = {"bounding_boxes": {"boxes": boxes, "labels": labels}, "segmentation_masks": masks, "kind": np.arange(count)}
    return images, y


@pytest.mark.sample("stages1")
@pytest.mark.parametrize(
    "stages", [["flip"], [("shift", {"fraction": 0.2, "fill": "constant"})], ["flip", "brightness"]]
)
def test_boxes_and_masks_move_with_the_picture(stages):
    source = pictures()
    data = made(source, augment=stages, global_batch=6, shuffle=False)
    x, y = rows_of(data.train)
    boxes = y["bounding_boxes"]
    assert y["kind"].tolist() == list(range(6))
    for image, mask, box, label in zip(
        x[..., 0], y["segmentation_masks"], boxes["boxes"], boxes["labels"], strict=True
    ):
        assert label[1] == -1 and not box[1].any()
        rows, columns = np.nonzero(mask)
        near = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        np.testing.assert_allclose(box[0], near, atol=1)  # the mask has whole pixels
        assert (image > 0.5).sum() <= (mask > 0).sum() + 8 and image[mask > 0].mean() > 0.5
    assert not np.array_equal(boxes["boxes"], source[1]["bounding_boxes"]["boxes"])


def test_a_flip_by_hand():
    """A picture 10 wide: columns 1 to 3 become 7 to 9 counted as edges; a box that leaves loses its label."""
    flip = tf.constant([[[-1.0, 0, 9], [0, 1, 0], [0, 0, 1]]])
    away = tf.constant([[[1.0, 0, 20], [0, 1, 0], [0, 0, 1]]])
    given = {
        "bounding_boxes": {"boxes": tf.constant([[[1.0, 2, 3, 5]]]), "labels": tf.constant([[4]])},
        "segmentation_masks": tf.constant(np.arange(10)[None, None].repeat(6, 1)),
        "other": tf.constant([7]),
    }
    shape = tf.constant([1, 6, 10, 3])
    found = targets.follow(given, flip, "constant", shape)
    assert found["bounding_boxes"]["boxes"].numpy().tolist() == [[[7, 2, 9, 5]]]
    assert found["segmentation_masks"].numpy()[0, 0].tolist() == list(range(9, -1, -1))
    assert found["other"] is given["other"]
    gone = targets.follow(given, away, "constant", shape)["bounding_boxes"]
    assert (gone["boxes"].numpy().any(), gone["labels"].numpy().tolist()) == (False, [[-1]])


def test_numbers_and_names_mix_and_are_not_written_as_shards(tmp_path):
    data = made(mixture([((X, NUMBERS), 1), ((X, NUMBERS), 1)]))
    x, y = rows_of(data.train)
    np.testing.assert_allclose(y, 2 * x[:, 0] + 0.1, rtol=1e-5)
    with pytest.raises(InputError, match="the same"):
        made(mixture([((X, NUMBERS), 1), ((X, np.arange(30) % 2), 1)]))
    with pytest.raises(InputError, match="Shards hold"):
        write_shards((X, NUMBERS), tmp_path / "out", shards=2)


@pytest.mark.parametrize(
    ("source", "settings", "message"),
    [
        ((NAMED, TARGETS, W[:7]), {}, "one row per example"),
        ((NAMED, TARGETS, -W), {}, "at least 0 and finite"),
        ((NAMED, {"day": np.zeros(30, "datetime64[D]")}), {}, "must be numbers"),
        ((NAMED, TARGETS), {"task": {"prise": "regression"}}, "Did you mean 'price'"),
        ((X, NUMBERS), {"task": {"price": "regression"}}, "needs named targets"),
        ((NAMED, {"price": [*"12345" * 6]}), {"task": {"price": "regression"}}, "needs numbers as labels"),
        ((X, [*map(str, NUMBERS[:29]), "cheap"]), {}, "'cheap' in example 29, of 1 text"),
        ((X, [*"ab" * 15]), {"task": "regression"}, "needs numbers as labels. Received: 'a' in example 0"),
        ({"train": (NAMED, TARGETS), "test": (X, NUMBERS)}, {}, "same structure"),
        ({"train": (NAMED, TARGETS), "test": ({"left": X}, TARGETS)}, {}, "same structure"),
        ((NAMED, TARGETS), {"augment": ["flip"]}, "named inputs"),
        ((X, NUMBERS), {"label_smoothing": 0.1}, "one class"),
        (pictures(), {"augment": ["mixup"], "global_batch": 2}, "one class per example"),
        ((pictures()[0], {"bounding_boxes": X[:6]}), {"augment": ["flip"], "global_batch": 2}, "must be a dict of"),
        ((pictures()[0], {"segmentation_masks": X[:6, :, None]}), {"augment": ["flip"], "global_batch": 2}, "size"),
    ],
)
def test_what_does_not_fit_names_the_fix(source, settings, message):
    with pytest.raises(InputError, match=message):
        made(source, **settings)
