import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.data import balance, load
from tfgpu.errors import InputError

FEW = np.arange(10, dtype=np.float32)[:, None], np.array([0] * 7 + [1] * 2 + [2])


def made(choice, **options):
    return load(FEW, **{"global_batch": 4, "validation": 0, "test": 0, "balance": choice, **options})


def read(data):
    return [tuple(t.numpy() for t in batch) for batch in data.train]


def drawn(data):
    return np.concatenate([x[:, 0] for x, *_ in read(data)]).astype(int)


@settings(max_examples=25, deadline=None)
@given(
    labels=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    choice=st.sampled_from(["oversample", "undersample"]),
    seed=st.integers(0, 2**62),
    epoch=st.integers(0, 2**40),
)
def test_every_class_equally_often_and_every_example_about_equally_often(labels, choice, seed, epoch):
    labels, indices = np.array(labels), np.arange(len(labels)) * 3
    count, order = balance.resample(indices, labels, choice=choice, seed=seed)
    got = order(tf.constant(epoch, tf.int64)).numpy()
    sizes = np.bincount(labels)
    each = sizes.max() if choice == "oversample" else sizes[sizes > 0].min()
    assert len(got) == count == each * np.count_nonzero(sizes)
    times = np.bincount(got // 3, minlength=len(labels))
    for label in set(labels.tolist()):
        mine = times[labels == label]
        assert mine.sum() == each and mine.max() - mine.min() <= 1


def test_oversampling_by_hand_counted_numbers():
    data = made("oversample", seed=4)
    # Three classes, the largest of 7: 21 examples, 6 batches.
    assert (data.info.epoch_examples, data.info.steps_per_epoch, data.info.train_examples) == (21, 6, 10)
    assert data.train.cardinality() == 6 and data.info.balance == "oversample"
    times = np.bincount(drawn(data), minlength=10)
    assert times[:7].tolist() == [1] * 7 and sorted(times[7:9].tolist()) == [3, 4] and times[9] == 7


def test_undersampling_draws_others_each_epoch():
    data = made("undersample", seed=1, global_batch=3)
    assert (data.info.epoch_examples, data.info.steps_per_epoch) == (3, 1)
    epochs = [sorted(drawn(data).tolist()) for _ in range(8)]
    assert all(sorted(FEW[1][epoch].tolist()) == [0, 1, 2] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 2


def test_a_balanced_epoch_is_a_function_of_seed_and_epoch():
    data, again = made("oversample", seed=2), made("oversample", seed=2)
    first, second = drawn(data), drawn(data)
    again.seek(1)
    assert drawn(again).tolist() == second.tolist() != first.tolist()


def test_weights_by_hand():
    # 10 examples, 3 classes: 10 / (3 * 7), 10 / (3 * 2), 10 / (3 * 1).
    data = made("weights", shuffle=False)
    assert data.info.epoch_examples == 10
    batches = read(data)
    np.testing.assert_allclose(
        np.concatenate([w for _, _, w in batches]), [10 / 21] * 7 + [10 / 6] * 2 + [10 / 3], rtol=1e-6
    )
    assert np.concatenate([w for _, _, w in batches]).mean() == pytest.approx(1)


def test_only_training_is_balanced():
    data = load("digits", global_batch=64, balance="weights", validation=0.1)
    assert len(data.validation.element_spec) == 2 and len(data.train.element_spec) == 3


@pytest.mark.parametrize(
    "options, message",
    [
        ({"balance": "oversampel"}, "Did you mean 'oversample'"),
        ({"balance": "oversample", "shuffle": False}, "shuffle=False.*balance='weights'"),
        ({"balance": "undersample", "global_batch": 4}, "3 training examples"),
    ],
)
def test_an_impossible_choice_names_the_fix(options, message):
    with pytest.raises(InputError, match=message):
        load(FEW, **{"global_batch": 2, "validation": 0, "test": 0, **options})


def test_sequences_of_labels_have_no_class_to_balance():
    with pytest.raises(InputError, match="one class per example"):
        load((np.zeros([6, 4]), np.ones([6, 4], int)), global_batch=2, validation=0, test=0, balance="weights")
