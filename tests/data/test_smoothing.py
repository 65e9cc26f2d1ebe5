"""Label smoothing: values by hand, with mixing and class weights, and only in training."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.data import load
from tfgpu.errors import InputError

PARTS = {"validation": 0.1, "test": 0.2}
X, Y = np.arange(80, dtype="float32").reshape(40, 2), np.arange(40) % 4


def test_training_labels_are_smoothed_and_the_others_are_not():
    data = load((X, Y), global_batch=8, label_smoothing=0.2, **PARTS)
    labels = data.peek()[1].numpy()
    np.testing.assert_allclose(np.sort(labels, axis=1), [[0.05, 0.05, 0.05, 0.85]] * 8, rtol=1e-6)
    assert data.info.labels == "one_hot" and data.info.label_smoothing == 0.2
    for part in (data.validation, data.test):
        assert set(np.unique(next(iter(part))[1])) == {0.0, 1.0}


def test_without_smoothing_nothing_changes():
    data = load((X, Y), global_batch=8)
    assert data.info.labels == "class" and data.peek()[1].shape == (8,)


def test_mixed_labels_are_smoothed_after_the_mixing():
    images = X.reshape(40, 2, 1, 1)
    mixed, smoothed = (
        load((images, Y), global_batch=8, augment="mixup", label_smoothing=share).peek() for share in (0.0, 0.4)
    )
    np.testing.assert_array_equal(mixed[0], smoothed[0])
    np.testing.assert_allclose(smoothed[1], 0.6 * mixed[1].numpy() + 0.1, rtol=1e-6)


@pytest.mark.parametrize("share", [-0.1, 1.0, True, "much"])
def test_shares_out_of_range_are_refused(share):
    with pytest.raises(InputError, match="`label_smoothing` must be at least 0 and below 1"):
        load((X, Y), global_batch=8, label_smoothing=share)


def test_sequences_are_refused():
    with pytest.raises(InputError, match="`label_smoothing` needs one class per example"):
        load((np.arange(120).reshape(40, 3), np.zeros((40, 3), int)), global_batch=8, label_smoothing=0.1)


@pytest.mark.slow
def test_two_replicas_learn_from_mixed_and_smoothed_labels_what_one_device_learns():
    found = []
    for devices in (["CPU:0"], ["CPU:0", "CPU:1"]):
        given = {"augment": "mixup", "label_smoothing": 0.1, **PARTS}
        data = load((X.reshape(40, 2, 1, 1) / 80, Y), global_batch=8, **given)
        keras.utils.set_random_seed(1)
        with tfgpu.strategy("mirrored" if len(devices) > 1 else "one_device", devices=devices).scope():
            model = tfgpu.models.mlp((2, 1, 1), 4, widths=[8])
            loss = keras.losses.CategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(0.05), loss, metrics=["accuracy"])
        history = model.fit(data.train, validation_data=data.validation, epochs=5, verbose=0).history  # 20 steps
        found.append((model.get_weights(), history))
    (one, first), (two, second) = found
    assert max(np.abs(a - b).max() for a, b in zip(one, two, strict=True)) <= 1e-6
    for name, values in first.items():
        np.testing.assert_allclose(values, second[name], rtol=1e-5)
