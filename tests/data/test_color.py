import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data.augmentation import color, randaugment
from tfgpu.data.position import Numbers


def plane(*rows):
    return tf.constant(np.array(rows, np.float32)[None, ..., None])


def values(images):
    return np.asarray(images)[0, ..., 0]


def test_sharpness_by_hand():
    image = plane([0, 0, 0], [0, 13, 0], [0, 0, 0])
    # The blur of the middle is 5/13 of it; without sharpness it is 5, with twice of it 13 + 8. The border stays.
    for factor, middle in ((0.0, 5.0), (1.0, 13.0), (2.0, 21.0)):
        expected = np.zeros([3, 3])
        expected[1, 1] = middle
        np.testing.assert_allclose(values(color.sharpen(image, tf.constant([factor]))), expected, atol=1e-5)
    small = plane([1, 2], [3, 4])
    assert np.array_equal(color.sharpen(small, tf.constant([0.0])), small)


def test_solarize_posterize_and_stretch_by_hand():
    np.testing.assert_allclose(values(color.solarize(plane([0.2, 0.6, 1.0]), 0.6)), [[0.2, 0.4, 0.0]], atol=1e-6)
    # 8 - 3 bits: whole multiples of 32.
    got = values(color.posterize(plane([31 / 255, 32 / 255, 1.0]), 3)) * 255
    np.testing.assert_allclose(got, [[0, 32, 224]], atol=1e-4)
    np.testing.assert_allclose(values(color.stretch(plane([0.2, 0.3, 0.7]))), [[0, 0.2, 1]], atol=1e-6)
    assert np.array_equal(values(color.stretch(plane([0.3, 0.3]))), np.float32([[0.3, 0.3]]))


def test_equalize_by_hand():
    # 1020 pixels; 255 of the brightest value: the step is (1020 - 255) // 255 = 3. Value 10 has 255 pixels
    # before it, 20 has 510, 30 has 765: (1 + 255) // 3 = 85, 170, 255; nothing is before 0: 1 // 3 = 0.
    image = tf.constant(np.repeat([0, 10, 20, 30], 255).reshape(1, 30, 34, 1).astype(np.float32) / 255)
    got = np.round(values(color.equalize(image)) * 255).astype(int)
    assert np.unique(got).tolist() == [0, 85, 170, 255]
    flat = plane([0.5, 0.5])
    np.testing.assert_allclose(color.equalize(flat), np.round(flat * 255) / 255, atol=1e-6)


def test_equalize_knows_each_image_and_channel_apart():
    images = tf.random.stateless_uniform([3, 9, 9, 2], seed=[1, 2])
    whole = color.equalize(images).numpy()
    for i in range(3):
        for c in range(2):
            alone = color.equalize(images[i : i + 1, ..., c : c + 1]).numpy()
            assert np.array_equal(whole[i : i + 1, ..., c : c + 1], alone)


class Drawn:
    """Hand-chosen operations and signs, one row per image."""

    def __init__(self, *pairs):
        names = randaugment.CHANGES
        self._rows = np.array([[(names.index(n) + 0.5) / len(names), 0.0 if s < 0 else 0.9] for n, s in pairs])

    def uniform(self, width, *, stream):
        return tf.constant(self._rows[:, :width], tf.float32)


def change(image, *pairs, magnitude=30):
    images = tf.repeat(tf.constant(image, tf.float32), len(pairs), axis=0)
    options = {"num_ops": 1, "magnitude": magnitude, "fill": "constant"}
    return randaugment.apply(images, options, Drawn(*pairs), 0).numpy()


def test_each_image_gets_the_change_that_it_drew():
    row = np.float32([[[[0.2], [0.4], [0.6]]]])  # one row of three pixels; 30 is the greatest magnitude
    got = change(row, ("identity", 1), ("solarize", 1), ("brightness", -1), ("contrast", 1), ("autocontrast", 1))
    expected = [[0.2, 0.4, 0.6], [0.8, 0.6, 0.4], [0.02, 0.04, 0.06], [0.02, 0.4, 0.78], [0, 0.5, 1]]
    np.testing.assert_allclose(got[:, 0, :, 0], expected, atol=1e-6)


def test_moves_by_hand():
    image = np.zeros([1, 20, 20, 1], np.float32)
    image[0, 10, 12] = 1
    across, down, none = change(image, ("translate_x", 1), ("translate_y", -1), ("rotate", 1))[..., 0]
    assert across[10, 3] == pytest.approx(1) and across.sum() == pytest.approx(1)  # 45% of 20 pixels to the left
    assert down[19, 12] == pytest.approx(1)
    assert none.sum() == pytest.approx(1, abs=0.1) and none[10, 12] < 0.9
    still = change(image, ("rotate", 1), ("shear_x", 1), ("translate_y", 1), magnitude=0)
    np.testing.assert_allclose(still, np.repeat(image, 3, axis=0), atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_every_change_is_drawn_and_stays_in_range(channels):
    images = tf.random.stateless_uniform([140, 12, 10, channels], seed=[1, 2])
    zero = tf.constant(0, tf.int64)
    options = {"num_ops": 3, "magnitude": 20, "fill": "reflect"}
    run = tf.function(lambda n: randaugment.apply(images, options, n, 4))
    got = run(Numbers(seed=2, epoch=zero, start=zero, count=140)).numpy()
    assert got.shape == images.shape and got.min() >= 0 and got.max() <= 1 and np.isfinite(got).all()
    changed = np.abs(got - images).reshape(140, -1).max(1) > 1e-3
    assert 0.9 < changed.mean()
