"""Mixtures: exact shares in each epoch, every example as often as the others of its source, resumable."""

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import load, mixture, write_shards
from tfgpu.errors import InputError


def source(first, count):
    """Examples that are numbers from `first`."""
    numbers = np.arange(first, first + count)
    return np.repeat(numbers[:, None], 3, 1).astype("float32"), numbers % 2


def numbers_of(data):
    return np.concatenate([x.numpy()[:, 0].astype(int) for x, _ in data.train])


def mixed(pairs, **settings):
    given = {"global_batch": 8, "seed": 3, "validation": 0, "test": 0, **settings}
    return load(mixture(pairs, epoch_examples=given.pop("epoch_examples", None)), **given)


def test_every_epoch_has_the_shares_and_reads_each_example_equally_often():
    """40 examples an epoch: 30 of the first source, which has 30, and 10 of the second, which has 10 of 7."""
    data = mixed([(source(0, 30), 3), (source(100, 7), 1)], epoch_examples=40)
    assert (data.info.epoch_examples, data.info.steps_per_epoch) == (40, 5)
    epochs = [numbers_of(data) for _ in range(7)]
    for numbers in epochs:
        assert sorted(n for n in numbers if n < 100) == list(range(30))
        assert sum(numbers >= 100) == 10
    seen = np.bincount(np.concatenate(epochs))[100:]
    assert seen.tolist() == [10] * 7  # 7 epochs of 10 are 10 passes over 7
    assert not np.array_equal(epochs[0], epochs[1])
    first = next(at for at, n in enumerate(epochs[0]) if n >= 100)
    assert first < 20 and not (epochs[0][:30] < 100).all()  # in random order


def test_an_epoch_follows_from_seed_and_number():
    pairs = [(source(0, 50), 1), (source(100, 20), 1)]
    data = mixed(pairs)
    epochs = [numbers_of(data) for _ in range(4)]
    data.seek(2)
    assert np.array_equal(numbers_of(data), epochs[2])
    again = mixed(pairs)
    again.seek(3)
    assert np.array_equal(numbers_of(again), epochs[3])
    assert not np.array_equal(numbers_of(mixed(pairs, seed=4)), epochs[0])
    assert len(epochs[0]) == 70


def test_without_shuffle_sources_are_spread_evenly():
    data = mixed([(source(0, 6), 3), (source(100, 2), 1)], shuffle=False)
    assert numbers_of(data).tolist() == [0, 1, 100, 2, 3, 4, 101, 5]


@pytest.mark.slow
def test_files_and_arrays_mix_and_keep_their_parts(tmp_path):
    x, y = source(0, 24)
    write_shards({"train": (x[:20], y[:20]), "test": (x[20:], y[20:])}, tmp_path / "shards", shards=2)
    pairs = [(str(tmp_path / "shards"), 1), (source(100, 20), 1)]
    data, kept = (mixed(pairs, memory_bytes=size) for size in (0, 1 << 30))
    assert data.info.cache == "none" and kept.info.cache == "memory"
    for _ in range(2):
        assert np.array_equal(numbers_of(data), numbers_of(kept))
    assert [x.numpy()[:, 0].tolist() for x, _ in data.test] == [[20, 21, 22, 23]]
    assert all(np.array_equal(x[:, 0] % 2, y) for x, y in data.train)


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([], "needs sources with weights"),
        ({"digits": 0}, "must be a number above 0"),
        ([(source(0, 4), 1), ((np.zeros((4, 5)), [0, 1, 0, 1]), 1)], "same shape"),
        ([(source(0, 4), 1), ((np.zeros((4, 3)), [0, 1, 2, 1]), 1)], "same classes"),
        ([(source(0, 4), 1), ((np.zeros((4, 3), "int32"), [0, 1, 0, 1]), 1)], "same dtype"),
    ],
)
def test_what_does_not_mix_names_the_fix(pairs, message):
    with pytest.raises(InputError, match=message):
        mixed(pairs, global_batch=2)


def test_shares_are_rounded_so_that_they_add_up():
    data = mixed([(source(0, 9), 1), (source(100, 9), 1), (source(200, 9), 1)], epoch_examples=10)
    assert sorted(np.bincount(numbers_of(data) // 100).tolist()) == [3, 3, 4]
    assert isinstance(data.train, tf.data.Dataset)
