import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.data import bucket, pack, segment_mask
from tfgpu.data.text.sequences import _best_fit
from tfgpu.errors import InputError

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=30)


def made(lengths):
    """Sequences of unique tokens, so that each can be found again."""
    starts = np.cumsum([0, *lengths])
    return [np.arange(a, b) + 1 for a, b in zip(starts, starts[1:], strict=False)]


def segments(batch):
    """The (tokens, positions) of each sequence in a packed batch, and the padding's tokens."""
    x = {name: t.numpy() for name, t in batch[0].items()}
    for row in range(len(x["token_ids"])):
        for number in range(1, x["segment_ids"][row].max() + 1):
            inside = x["segment_ids"][row] == number
            yield x["token_ids"][row][inside].tolist(), x["positions"][row][inside].tolist()


@settings(max_examples=5, deadline=None)
@given(lengths=LENGTHS, batch=st.integers(1, 5), seed=st.integers(0, 2**62), epoch=st.integers(0, 99))
def test_packing_holds_each_sequence_once_an_epoch(lengths, batch, seed, epoch):
    sequences = made(lengths)
    data = pack(sequences, length=12, global_batch=batch, seed=seed)
    data.seek(epoch)
    batches = list(data.train)
    found = [pair for each in batches for pair in segments(each)]
    assert sorted(tokens for tokens, _ in found) == [s.tolist() for s in sequences]
    assert all(positions == list(range(len(tokens))) for tokens, positions in found)
    assert len(batches) == data.steps_per_epoch and data.examples == len(lengths)
    assert sum(len(y) for _, y, _ in batches) == data.rows
    assert data.filled == pytest.approx(sum(lengths) / (12 * data.rows))
    for x, y, weight in batches:
        x, y, weight = x["token_ids"].numpy(), y.numpy(), weight.numpy()
        assert np.array_equal(y[weight == 1], x[weight == 1] + 1)  # all tokens differ by one within a sequence
        assert not y[weight == 0].any() and weight.sum() <= (x > 0).sum()
    assert sum(int(weight.numpy().sum()) for _, _, weight in batches) == sum(lengths) - len(lengths)


@settings(max_examples=100, deadline=None)
@given(lengths=LENGTHS, length=st.integers(12, 40))
def test_best_fit_overlaps_nothing_and_wastes_little(lengths, length):
    lengths = np.array(lengths)
    row, offset, segment = _best_fit(lengths, length)
    taken = np.zeros([row.max() + 1, length], int)
    for r, o, n in zip(row, offset, lengths, strict=True):
        taken[r, o : o + n] += 1
    assert taken.max() == 1 and taken.sum() == lengths.sum()
    assert (row.max() + 1) <= 1 + 2 * lengths.sum() / length  # no two rows could be one
    for r in range(row.max() + 1):
        assert sorted(segment[row == r]) == list(range(1, (row == r).sum() + 1))


@settings(max_examples=5, deadline=None)
@given(lengths=LENGTHS, batch=st.integers(1, 5), seed=st.integers(0, 2**62), shuffle=st.booleans())
def test_buckets_hold_each_sequence_once_an_epoch(lengths, batch, seed, shuffle):
    sequences = made(lengths)
    data = bucket(
        sequences, np.arange(len(lengths)), global_batch=batch, boundaries=[3, 7, 12], seed=seed, shuffle=shuffle
    )
    batches = list(data.train)
    assert len(batches) == data.steps_per_epoch == data.train.cardinality()
    seen = []
    for x, y in batches:
        tokens, mask = x["token_ids"].numpy(), x["padding_mask"].numpy()
        assert len(tokens) <= batch and tokens.shape[1] in (3, 7, 12)
        for row, real, number in zip(tokens, mask, y.numpy(), strict=True):
            assert row[real].tolist() == sequences[number].tolist() and not row[~real].any()
            assert [3, 7, 12].index(tokens.shape[1]) == np.searchsorted([3, 7, 12], real.sum())
            assert (np.diff(real.astype(int)) <= 0).all()  # padding comes last
        seen += y.numpy().tolist()
    assert sorted(seen) == list(range(len(lengths)))
    places = sum(x["token_ids"].shape.num_elements() for x, _ in batches)
    assert data.filled == pytest.approx(sum(lengths) / places)


def orders(data, epochs=2):
    return [[int(batch[0]["token_ids"][0, 0]) for batch in data.train] for _ in range(epochs)]


@pytest.mark.parametrize("make", [lambda s: bucket(made([5] * 20), [0] * 20, global_batch=2, seed=s)])
def test_the_order_is_of_seed_and_epoch(make):
    one, again, other = make(1), make(1), make(2)
    first, second = orders(one)
    assert first != second and orders(other, 1)[0] != first
    again.seek(1)
    assert orders(again, 1)[0] == second
    assert int(again.peek()[0]["token_ids"][0, 0]) == orders(again, 1)[0][0]


def test_targets_for_each_token_by_hand():
    data = bucket([[1, 2, 3], [4, 5]], [[9, 8, 7], [6, 5]], global_batch=2, boundaries=[4], shuffle=False)
    x, y, weight = next(iter(data.train))
    assert x["token_ids"].numpy().tolist() == [[1, 2, 3, 0], [4, 5, 0, 0]]
    assert y.numpy().tolist() == [[9, 8, 7, 0], [6, 5, 0, 0]]
    assert weight.numpy().tolist() == [[1, 1, 1, 0], [1, 1, 0, 0]]
    packed = pack(tf.ragged.constant([[1, 2, 3], [4, 5]]), [[9, 8, 7], [6, 5]], length=5, global_batch=2)
    _, y, weight = next(iter(packed.train))
    assert y.numpy().tolist() == [[9, 8, 7, 6, 5]] and weight.numpy().tolist() == [[1.0] * 5]


def test_buckets_of_their_own_are_powers_of_two():
    data = bucket(made([1, 16, 17, 33, 64]), [0] * 5, global_batch=9, shuffle=False)
    assert [x["token_ids"].shape[1] for x, _ in data.train] == [16, 32, 64]


def test_packed_sequences_do_not_see_one_another():
    """Each sequence in a packed row has the same outputs as alone."""
    keras.utils.set_random_seed(0)
    embed = keras.layers.Embedding(20, 8)
    attend = keras.layers.MultiHeadAttention(2, 4)

    def run(x):
        h = embed(x["token_ids"])
        return attend(h, h, attention_mask=segment_mask(x["segment_ids"], causal=True)).numpy()

    both = [[3, 1, 4, 1, 5], [9, 2, 6]]
    together = run(next(iter(pack(both, length=10, global_batch=1).train))[0])[0]
    for tokens, start in zip(both, (0, 5), strict=True):
        alone = run(next(iter(pack([tokens], length=len(tokens), global_batch=1).train))[0])[0]
        np.testing.assert_allclose(together[start : start + len(tokens)], alone, atol=1e-6)
    assert np.isfinite(together).all()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: pack([[1] * 9], length=8, global_batch=1), "sequence 0 has 9 tokens. Increase it"),
        (lambda: pack([[1]], [3], length=8, global_batch=1), "Use bucket"),
        (lambda: pack([], length=8, global_batch=1), "at least one sequence"),
        (lambda: pack([[1], []], length=8, global_batch=1), "as sequence 1"),
        (lambda: pack([[1.5]], length=8, global_batch=1), "whole numbers"),
        (lambda: pack([[1]], length=8, global_batch=0), "`global_batch`"),
        (lambda: pack([[1]], "previous", length=8, global_batch=1), "'next'"),
        (lambda: bucket([[1] * 9], [0], global_batch=1, boundaries=[4, 8]), "`boundaries`.*9 tokens"),
        (lambda: bucket([[1]], [0], global_batch=1, boundaries=[8, 4]), "increasing"),
        (lambda: bucket([[1]], [0, 1], global_batch=1), "2 for 1"),
        (lambda: bucket([[1, 2]], [[1]], global_batch=1), "as long"),
    ],
)
def test_invalid_input_names_the_fix(call, message):
    with pytest.raises(InputError, match=message):
        call()
