"""Layers that mix a batch's images, or choose while being traced, compute on replicas what one device does.

The matrix trains with them (`tests/matrix/cases.py`); here `strategy.run` calls them by hand.
"""

import functools
import itertools
import random

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import tfgpu
from tfgpu import repairs
from tfgpu.compat import slots
from tfgpu.compat.tensorflow import runtime
from tfgpu.core.randomness import data_order

PICTURES = np.random.default_rng(1).uniform(0, 255, (5, 6, 6, 3)).astype("float32")
LABELS = np.eye(5, dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def installed():
    repairs.repair_keras()


@functools.cache
def mirrored():
    return tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])


def spread(layer, values, split):
    """What `layer` makes of each replica's rows, joined."""
    ends = np.cumsum((0, *split))
    parts = [keras.tree.map_structure(lambda v: tf.constant(v[a:b]), values) for a, b in itertools.pairwise(ends)]  # noqa: B023
    given = mirrored().experimental_distribute_values_from_function(lambda ctx: parts[ctx.replica_id_in_sync_group])

    def step(x):
        return layer(x, training=True)

    made = tf.function(lambda x: mirrored().run(step, args=(x,)))(given)
    made = keras.tree.map_structure(mirrored().experimental_local_results, made)
    return keras.tree.map_structure_up_to(values, lambda rows: np.concatenate([r.numpy() for r in rows]), made)


def alone(layer, values):
    return tf.function(lambda x: layer(x, training=True))(keras.tree.map_structure(tf.constant, values))


@pytest.mark.sample("CutMix-split0")
@pytest.mark.parametrize("split", [(2, 1, 1, 1), (2, 2, 1, 0), (0, 5, 0, 0)])
@pytest.mark.parametrize("layer", [L.MixUp, L.CutMix])
def test_images_and_labels_are_paired_over_the_whole_batch(layer, split):
    values = {"images": PICTURES, "labels": LABELS}
    expected, found = alone(layer(seed=3), values), spread(layer(seed=3), values, split)
    for name in values:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-6, atol=1e-4)
    partners = found["labels"].argsort(axis=1)[:, -2:]  # each row's own picture and the one that it was mixed with
    assert {abs(int(a) - int(b)) for a, b in partners} - {0, 1}, "no picture met one of another replica"


@pytest.mark.slow
def test_images_are_deformed_as_on_one_device():
    values = PICTURES[:4, :, :, :1]
    make = functools.partial(L.RandomElasticTransform, seed=3)
    np.testing.assert_allclose(spread(make(), values, (1, 1, 1, 1)), alone(make(), values), rtol=1e-5, atol=1e-3)


@pytest.mark.slow
def test_images_whose_number_the_data_does_not_tell_are_deformed_as_on_one_device():
    """The trace for full batches knows their number; one device's does not, and deforms all images like the first."""

    def trained(strategy):
        with strategy.scope():
            keras.utils.set_random_seed(1)
            model = keras.Sequential([L.RandomElasticTransform(seed=3), L.Flatten(), L.Dense(1)])
            model.compile(keras.optimizers.SGD(1e-6), "mse")
        data = tf.data.Dataset.from_tensor_slices((np.repeat(PICTURES[:4], 4, 0), np.ones((16, 1)))).batch(4)
        model.fit(data, epochs=2, verbose=0)
        return model.get_weights()

    expected = trained(tfgpu.strategy("one_device", "CPU:0"))
    with gpu_way.gpu_way():
        found = trained(tfgpu.strategy("mirrored", ["CPU:1", "CPU:2"]))
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)


def test_brightness_is_counted_over_the_whole_batch():
    dark = np.stack([np.full((2, 2, 1), n * 10, "float32") for n in range(5)])  # each picture has one brightness
    found = spread(L.Equalization(), dark, (2, 2, 1, 0))
    np.testing.assert_array_equal(found[:, 0, 0, 0], [0, 64, 128, 191, 255])  # 255 / 4, 255 / 2 ... rounded


@pytest.mark.slow
def test_operations_are_picked_once():
    random.seed(5)
    expected = alone(L.AugMix(seed=3), PICTURES)
    after = random.random()
    with mirrored().scope():  # elsewhere its seeds are mirrored in a first trace, and the second picks again
        layer = L.AugMix(seed=3)
    random.seed(5)
    np.testing.assert_allclose(spread(layer, PICTURES, (2, 2, 1, 0)), expected, rtol=1e-5, atol=1e-2)
    assert random.random() == after


def test_workers_without_a_seed_pick_by_the_number_that_they_agreed_on(monkeypatch):
    agreed = data_order.AgreedSeed(11, random.Random(11))
    monkeypatch.setattr(slots.of(runtime()), "agreed_seed", agreed, raising=False)
    tf.random.set_seed(11)
    assert data_order.agreed_random().random() == random.Random(11).random()
    tf.random.set_seed(12)
    assert data_order.agreed_random() is None
