"""Replay: the sample of a stream, mixing, saving and loading."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import tfgpu
from tfgpu.training.incremental import Replay
from tfgpu.training.incremental.reservoirs import NONE, Balanced, Reservoir


def kept_after(sampler, labels, cuts=()):
    """Returns the example number in each slot at the end."""
    places = {}
    begin = 0
    for end in (*cuts, len(labels)):
        for number, place in enumerate(sampler.take(labels[begin:end]), begin):
            if place != NONE:
                places[int(place)] = number
        begin = max(begin, end)
    return places


def test_every_example_is_kept_with_the_same_probability():
    counts = np.zeros(20)
    for seed in range(3000):
        for number in kept_after(Reservoir(5, seed), [0] * 20).values():
            counts[number] += 1
    expected = 3000 * 5 / 20
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert (
        chi_square < 43.8
    )  # of 19 degrees of freedom: one in a thousand; inclusion varies less than independent draws
    assert counts.sum() == 3000 * 5


@given(
    labels=st.lists(st.integers(0, 4), max_size=60),
    capacity=st.integers(1, 12),
    seed=st.integers(0, 99),
    cuts=st.lists(st.integers(0, 60), max_size=4),
    kind=st.sampled_from([Reservoir, Balanced]),
)
@settings(max_examples=60)
def test_it_does_not_matter_how_a_stream_comes_in_batches(labels, capacity, seed, cuts, kind):
    cuts = sorted(min(cut, len(labels)) for cut in cuts)
    whole, cut = kept_after(kind(capacity, seed), labels), kept_after(kind(capacity, seed), labels, cuts)
    assert whole == cut
    assert sorted(whole) == list(range(min(capacity, len(labels))))
    assert len(set(whole.values())) == len(whole)
    sampler = kind(capacity, seed)
    kept_after(sampler, labels[: len(labels) // 2])
    again = kind(capacity, seed + 1)
    again.put(sampler.state())
    rest = labels[len(labels) // 2 :]
    assert again.take(rest).tolist() == sampler.take(rest).tolist() and again.kept == sampler.kept


@given(counts=st.lists(st.integers(1, 80), min_size=1, max_size=5), capacity=st.integers(1, 30), seed=st.integers(0, 9))
@settings(max_examples=60)
def test_a_balanced_memory_is_as_even_as_the_stream_allows(counts, capacity, seed):
    """In any order, no class has two more slots than another that has given one up."""
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    kept = kept_after(Balanced(capacity, seed), labels)
    found = np.bincount(labels[list(kept.values())], minlength=len(counts))
    assert found.sum() == min(capacity, len(labels))
    for label, count in enumerate(counts):
        if found[label] < count:
            assert found[label] >= found.max() - 1


def test_a_balanced_memory_is_a_reservoir_of_each_class():
    counts = np.zeros(30)
    for seed in range(2000):
        kept = kept_after(Balanced(4, seed), [0] * 15 + [1] * 15)
        assert sorted(int(number >= 15) for number in kept.values()) == [0, 0, 1, 1]
        for number in kept.values():
            counts[number] += 1
    expected = 2000 * 2 / 15
    for of_class in (counts[:15], counts[15:]):
        assert ((of_class - expected) ** 2 / expected).sum() < 36.1  # one in a thousand, of 14 degrees of freedom


def batches(rows, size=4, weights=False):
    x = np.arange(100, 100 + rows, dtype="float32")[:, None]
    parts = (x, np.zeros(rows, "int64")) + ((np.ones(rows, "float32"),) if weights else ())
    return tf.data.Dataset.from_tensor_slices(parts).batch(size)


def old_ones(n=50):
    return np.arange(n, dtype="float32")[:, None], np.arange(n) % 5


def test_mixes_the_stated_share_into_each_batch():
    replay = Replay(10, seed=3).add(*old_ones())
    for share, sizes in ((0.5, [8, 8, 4]), (0.2, [5, 5, 2]), (0.75, [16, 16, 8]), (0.0, [4, 4, 2])):
        mixed = list(replay.mix(batches(10), share))
        assert [len(x) for x, y in mixed] == sizes
        new = np.concatenate([x[:n] for (x, _), n in zip(mixed, (4, 4, 2), strict=True)])
        assert new[:, 0].tolist() == list(range(100, 110))
    kept = set(replay.arrays[0][:, 0].tolist())
    data = replay.mix(batches(1000), 0.5)
    first, second = (np.concatenate([x[len(x) // 2 :, 0] for x, _ in data]) for _ in range(2))
    assert set(first.tolist()) == kept and not np.array_equal(first, second)
    x, y = next(iter(data))
    assert np.array_equal(x[4:, 0] % 5, y[4:])
    _, counts = np.unique(np.concatenate([first, second]), return_counts=True)
    assert ((counts - 200) ** 2 / 200).sum() < 27.9  # one in a thousand, of 9 degrees of freedom
    assert data.cardinality() == 250
    assert replay.mix(batches(10).repeat(), 0.5).cardinality() == tf.data.INFINITE_CARDINALITY


def test_an_empty_memory_leaves_the_data_as_it_is():
    data = batches(10)
    assert Replay(5).mix(data, 0.5) is data


def test_the_same_seed_draws_the_same():
    def drawn(seed):
        mixed = Replay(10, seed=seed).add(*old_ones()).mix(batches(20), 0.5)
        return [x.numpy().tolist() for _ in range(2) for x, _ in mixed]

    assert drawn(1) == drawn(1) != drawn(2)


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("spilled", [False, True])
def test_continues_from_a_file(tmp_path, balance, spilled):
    def folder(name):
        return tmp_path / name if spilled else None

    x, y = old_ones(80)
    one = Replay(12, balance=balance, seed=5, folder=folder("a")).add(x[:40], y[:40])
    one.mix(batches(4))
    one.save(tmp_path / "memory.safetensors")
    two = Replay(12, balance=balance, seed=5, folder=folder("b"))
    two.load(tmp_path / "memory.safetensors", like=(x[:1], y[:1]))
    for memory in (one, two):
        memory.add(x[40:], y[40:])
    assert np.array_equal(one.arrays[0], two.arrays[0]) and one.seen == two.seen == 80
    pairs = zip(one.mix(batches(12)), two.mix(batches(12)), strict=True)
    assert all(np.array_equal(a[0], b[0]) for a, b in pairs)
    in_memory = Replay(12, balance=balance, seed=5).add(x, y)
    assert np.array_equal(in_memory.arrays[0], one.arrays[0])
    with pytest.raises(tfgpu.InputError, match="other arguments"):
        Replay(12, balance=balance, seed=6).load(tmp_path / "memory.safetensors", like=(x, y))


def test_bytes_and_structures():
    x = {"a": np.zeros((6, 10), "float32"), "b": np.zeros((6, 2), "uint8")}
    replay = Replay(bytes=200).add(x, np.zeros(6, "int64"))  # 40 + 2 + 8 bytes each
    assert len(replay) == 4 and set(replay.arrays[0]) == {"a", "b"}
    data = tf.data.Dataset.from_tensor_slices((x, np.zeros(6, "int64"))).batch(3)
    inputs, _ = next(iter(replay.mix(data)))
    assert inputs["b"].shape == (6, 2)
    one_hot = Replay(4, balance=True).add(np.arange(20.0), np.eye(2)[[0] * 18 + [1] * 2])
    assert one_hot.arrays[1].sum(0).tolist() == [2, 2]


def test_accepts_a_dataset_of_batches():
    replay = Replay(5).add(batches(20, weights=True))
    assert replay.seen == 20 and len(replay.arrays) == 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Replay(), "either"),
        (lambda: Replay(0), "`examples` must be"),
        (lambda: Replay(3).add(np.zeros((2, 1)), np.zeros(3)), "same length"),
        (lambda: Replay(3).add(np.zeros((2, 1))), "Add the labels"),
        (lambda: Replay(3).add(*old_ones()).mix(batches(4), 1.0), "at least 0 and below 1"),
        (lambda: Replay(3).add(*old_ones()).mix(batches(4, weights=True)), "structure"),
        (lambda: Replay(3).add(np.zeros((2, 2)), np.zeros(2)).mix(batches(4)), "must have"),
        (lambda: Replay(3, balance=True).add(np.zeros((2, 2)), np.array([0.5, 1])), "class indices"),
        (lambda: Replay(bytes=3).add(*old_ones()), "One example needs"),
        (lambda: Replay(3).add(np.array([["a"]]), np.array([1])), "must be numeric"),
    ],
)
def test_invalid_input_is_named(wrong, message):
    with pytest.raises(tfgpu.InputError, match=message):
        wrong()
