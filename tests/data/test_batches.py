import logging

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.cluster import Cluster
from tfgpu.data import load, position
from tfgpu.errors import InputError

PARTS = {"validation": 0.1, "test": 0.2}

STAGES = ["flip", "crop", "noise", "cutout"]


def numbered(count, classes=2):
    """Examples that contain their own index, so that their order can be read from a batch."""
    return np.arange(count, dtype=np.float32)[:, None], np.arange(count) % classes


def numbers(dataset):
    return [x.numpy()[:, 0].astype(int).tolist() for x, _ in dataset]


def batches(dataset):
    return [(x.numpy(), y.numpy()) for x, y in dataset]


def same(one, two):
    return len(one) == len(two) and all(
        np.array_equal(a, c) and np.array_equal(b, d) for (a, b), (c, d) in zip(one, two, strict=True)
    )


def test_digits_by_hand_counted_numbers():
    data = load("digits", global_batch=100, **PARTS)
    info = data.info
    assert (info.name, info.input_shape, info.classes) == ("digits", (8, 8, 1), 10)
    assert info.class_names == tuple("0123456789")
    assert info.train_examples + info.validation_examples + info.test_examples == 1797
    assert abs(info.test_examples - 359.4) <= 1 and abs(info.validation_examples - 179.7) <= 1
    assert (info.steps_per_epoch, info.global_batch, info.skipped, info.augment) == (13, 100, 0, ())
    assert data.train.cardinality() == 13 and data.validation.cardinality() == 2
    train = batches(data.train)
    assert [len(y) for _, y in train] == [100] * 12 + [info.train_examples - 1200]
    x = np.concatenate([x for x, _ in train])
    assert x.dtype == np.float32 and x.min() == 0 and x.max() == 1
    assert np.array_equal(x * 16, np.round(x * 16))
    assert set(np.concatenate([y for _, y in train]).tolist()) == set(range(10))


@settings(max_examples=6, deadline=None)
@given(
    count=st.integers(4, 40),
    batch=st.integers(1, 12),
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 10**6),
)
def test_each_example_once_an_epoch_in_an_order_of_seed_and_epoch(count, batch, seed, epoch):
    data = load(numbered(count), global_batch=min(batch, count), seed=seed, validation=0, test=0)
    data.seek(epoch)
    one, two = numbers(data.train), numbers(data.train)
    assert sorted(sum(one, [])) == sorted(sum(two, [])) == list(range(count))
    assert [len(b) for b in one[:-1]] == [min(batch, count)] * (len(one) - 1)
    order = position.order(tf.range(count, dtype=tf.int64), seed=seed, epoch=tf.constant(epoch, tf.int64))
    assert sum(one, []) == order.numpy().tolist()


@pytest.mark.sample(1)
@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_a_resumed_run_repeats_the_straight_one(tmp_path, memory_bytes):
    source = _folder(tmp_path, 14)
    make = lambda: load(source, global_batch=6, augment=STAGES, seed=7, memory_bytes=memory_bytes, **PARTS)  # noqa: E731
    data = make()
    straight = [batches(data.train) for _ in range(3)]
    assert not same(straight[0], straight[1])
    resumed = make()
    resumed.seek(2)
    assert same(batches(resumed.train), straight[2])
    resumed.seek(1)
    assert same(batches(resumed.train), straight[1])


@pytest.mark.slow
def test_examples_in_memory_and_on_disk_are_the_same(tmp_path):
    source = _folder(tmp_path, 20)
    memory, disk = (load(source, global_batch=6, augment=STAGES, memory_bytes=m, **PARTS) for m in (1 << 30, 0))
    assert memory.info == disk.info and (memory.info.cache, disk.info.cache) == ("memory", "none")
    for part in ("train", "validation", "test"):
        assert same(batches(getattr(memory, part)), batches(getattr(disk, part)))


def test_another_seed_is_another_order_and_no_shuffle_is_the_source_s():
    order = [numbers(load(numbered(30), global_batch=10, seed=s, validation=0, test=0).train) for s in (0, 1)]
    assert order[0] != order[1]
    plain = load(numbered(30), global_batch=10, shuffle=False, validation=0, test=0)
    assert sum(numbers(plain.train), []) == list(range(30))


def test_the_seed_leaves_the_split_alone_and_the_split_seed_the_size():
    first, second, third = (
        load("digits", global_batch=64, seed=a, split_seed=b, **PARTS) for a, b in ((0, 0), (1, 0), (0, 1))
    )
    assert same(batches(first.test), batches(second.test))
    assert not same(batches(first.test), batches(third.test))
    assert first.info == third.info


def test_peek_leaves_the_epoch_where_it_is():
    data = load(numbered(30), global_batch=10, seed=3, **PARTS)
    straight = [numbers(data.train) for _ in range(2)]
    data.seek(0)
    assert data.peek()[0].numpy()[:, 0].tolist() == straight[0][0]
    assert [numbers(data.train) for _ in range(2)] == straight


@pytest.mark.slow
def test_only_training_is_augmented():
    plain, changed = (load("digits", global_batch=64, augment=a, **PARTS) for a in ((), "auto"))
    assert [name for name, _ in changed.info.augment] == ["shift", "rotate", "zoom"]
    assert same(batches(plain.validation), batches(changed.validation))
    assert same(batches(plain.test), batches(changed.test))
    (x, y), (u, v) = batches(plain.train)[0], batches(changed.train)[0]
    assert np.array_equal(y, v) and not np.array_equal(x, u)


@pytest.mark.slow
def test_augmentation_does_not_depend_on_the_batch():
    one, two = (load("digits", global_batch=b, augment="auto", seed=5, **PARTS) for b in (64, 100))
    x, u = (np.concatenate([x for x, _ in batches(d.train)]) for d in (one, two))
    np.testing.assert_allclose(x, u, atol=1e-6)  # the same numbers; vector instructions round the last bit


def test_the_source_s_own_parts_are_used(caplog):
    x, y = numbered(40)
    parts = {"train": (x[:30], y[:30]), "test": (x[25:], y[25:])}
    with caplog.at_level(logging.INFO):
        data = load(parts, global_batch=5, validation=0.2, test=0.2)
    assert sum(numbers(data.test), []) == list(range(25, 40))
    assert sorted(sum(numbers(data.train) + numbers(data.validation), [])) == list(range(30))
    assert data.info.validation_examples == 6
    assert "has its own test split" in caplog.text
    left = 5 - sum(n >= 25 for n in sum(numbers(data.validation), []))
    assert f"{left} examples of its own test split" in caplog.text


def test_empty_parts_are_none():
    data = load(numbered(10), global_batch=5, validation=0, test=0)
    assert data.validation is None and data.test is None
    assert data.info.train_examples == 10


@pytest.mark.parametrize(
    "options, message",
    [
        ({"global_batch": 0}, "whole number of at least 1"),
        ({"global_batch": 2.5}, "whole number of at least 1"),
        ({"global_batch": 21}, "larger than the training split.*20 training"),
        ({"global_batch": 2, "validation": 1.5}, "at least 0 and below 1"),
        ({"global_batch": 2, "validation": 0.5, "test": 0.5}, "no training examples"),
        ({"global_batch": 2, "seed": -1}, "`seed`"),
        ({"global_batch": 2, "augment": ["flop"]}, "Did you mean 'flip'"),
        ({"global_batch": 2, "augment": ["flip"]}, "needs images"),
        ({"global_batch": 2, "image_size": "big"}, "image_size"),
        ({"global_batch": 2, "image_size": 8}, "image files"),
        ({"global_batch": 1, "cluster": Cluster(("a:1", "b:1"), 0, "worker", 0)}, "number of workers"),
    ],
)
def test_an_invalid_setting_names_the_fix(options, message):
    with pytest.raises(InputError, match=message) as caught:
        load(numbered(20), **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("epoch", [-1, 1.5, True, "one"])
def test_a_wrong_epoch_is_refused(epoch):
    with pytest.raises(InputError, match="whole number of at least 0"):
        load(numbered(20), global_batch=2, **PARTS).seek(epoch)


@pytest.mark.sample(1)
@pytest.mark.parametrize("count, memory_bytes", [(13, 1 << 30), (10, 0)])
def test_four_replicas_get_the_one_device_batch_in_order(tmp_path, count, memory_bytes):
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(4)])
    source = _folder(tmp_path, count)
    with strategy.scope():
        data = load(source, global_batch=4, augment=STAGES, validation=0, test=0, seed=2, memory_bytes=memory_bytes)
    expected = batches(data.train)
    data.seek(0)
    distributed = strategy.experimental_distribute_dataset(data.train)
    got = [
        tuple(np.concatenate([part.numpy() for part in strategy.experimental_local_results(t)]) for t in batch)
        for batch in distributed
    ]
    assert same(got, expected)


def test_keras_fits_on_it_and_counts_its_steps():
    data = load("digits", global_batch=256, **PARTS)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(10)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    history = model.fit(data.train, validation_data=data.validation, epochs=2, verbose=0)
    assert len(history.history["val_loss"]) == 2
    assert model.optimizer.iterations.numpy() == 2 * data.info.steps_per_epoch


def _folder(tmp_path, count):
    random = np.random.default_rng(0)
    for i in range(count):
        folder = tmp_path / "photos" / "ab"[i % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image = random.integers(0, 256, [6, 7, 3], dtype=np.uint8)
        (folder / f"{i:03}.png").write_bytes(tf.io.encode_png(image).numpy())
    return str(tmp_path / "photos")
