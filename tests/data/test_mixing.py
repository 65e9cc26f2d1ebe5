import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import load
from tfgpu.data.augmentation import mixing
from tfgpu.data.position import Numbers

PARTS = {"validation": 0.1, "test": 0.2}


class Fixed:
    """Hand-chosen random numbers."""

    def __init__(self, *rows):
        self._rows = np.array(rows, np.float32)

    def uniform(self, width, *, stream):
        return tf.constant(self._rows[:, :width])


IMAGES = np.stack([np.zeros([4, 4, 1]), np.ones([4, 4, 1])]).astype(np.float32)
LABELS = np.eye(3, dtype=np.float32)[[0, 2]]


def mix(name, numbers, **options):
    options = {"alpha": 1.0, "probability": 1.0, **options}
    images, labels = mixing.apply(name, tf.constant(IMAGES), tf.constant(LABELS), options, numbers, 0)
    return images.numpy(), labels.numpy()


def test_mixup_by_hand():
    # Beta(1, 1) is uniform: the kept shares are 0.75 and 0.5. The two are each other's partners.
    images, labels = mix("mixup", Fixed([0.1, 0.75, 0.0, 0, 0], [0.2, 0.5, 0.0, 0, 0]))
    np.testing.assert_allclose(images[:, 0, 0, 0], [0.25, 0.5], atol=1e-6)
    np.testing.assert_allclose(labels, [[0.75, 0, 0.25], [0.5, 0, 0.5]], atol=1e-6)


def test_cutmix_by_hand():
    # Kept 0.75: the box has half the side, 2 of 4 pixels. In the middle it lies on rows and columns 1 and 2;
    # in the corner at 0 only one of its four pixels is inside, and the label's share is what can be seen.
    images, labels = mix("cutmix", Fixed([0.1, 0.75, 0.0, 0.5, 0.5], [0.2, 0.75, 0.0, 0.0, 0.0]))
    middle = np.zeros([4, 4])
    middle[1:3, 1:3] = 1
    assert np.array_equal(images[0, ..., 0], middle)
    assert images[1, 0, 0, 0] == 0 and images[1].sum() == 15
    np.testing.assert_allclose(labels, [[0.75, 0, 0.25], [1 / 16, 0, 15 / 16]], atol=1e-6)


@pytest.mark.parametrize("name", ["mixup", "cutmix"])
def test_what_is_not_drawn_stays(name):
    images, labels = mix(name, Fixed([0.1, 0.5, 0.9, 0.5, 0.5], [0.2, 0.5, 0.1, 0.5, 0.5]), probability=0.5)
    assert np.array_equal(images[0], IMAGES[0]) and np.array_equal(labels[0], LABELS[0])
    assert labels[1, 0] > 0


@pytest.mark.parametrize("count", [1, 2, 7])
def test_partners_are_one_ring(count):
    zero = tf.constant(0, tf.int64)
    partner = mixing.partners(Numbers(seed=1, epoch=zero, start=zero, count=count).uniform(1, stream=0)[:, 0]).numpy()
    seen, at = [], 0
    for _ in range(count):
        seen.append(at)
        at = partner[at]
    assert at == 0 and sorted(seen) == list(range(count))


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_the_kept_share_follows_the_beta_distribution(alpha):
    u = tf.constant((np.arange(20000) + 0.5) / 20000, tf.float32)
    kept = mixing._beta(u, alpha).numpy().astype(np.float64)
    # Beta(a, a): the mean is 1/2, the variance 1 / (4 (2a + 1)).
    assert kept.mean() == pytest.approx(0.5, abs=1e-3) and kept.var() == pytest.approx(0.25 / (2 * alpha + 1), rel=5e-3)
    assert np.diff(kept).min() > -1e-6 and kept.min() >= 0 and kept.max() <= 1


@pytest.mark.slow
def test_mixed_batches_repeat_and_their_labels_fit_the_loss():
    data = load("digits", global_batch=256, augment=["mixup", "cutmix"], seed=3, **PARTS)
    assert data.info.labels == "one_hot"
    (x, y), (again, _) = (data.peek() for _ in range(2))
    assert np.array_equal(x, again)
    np.testing.assert_allclose(tf.reduce_sum(y, axis=1), np.ones(256), atol=1e-5)
    assert 0.2 < float(tf.reduce_mean(tf.cast(tf.reduce_max(y, axis=1) < 0.99, tf.float32))) < 1
    assert data.test.element_spec[1].shape == (None, 10)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.CategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    model.fit(data.train, epochs=1, verbose=0)
    assert 0 <= model.evaluate(data.test, verbose=0)[1] <= 1
