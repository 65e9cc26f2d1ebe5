"""What each worker saves: shares of equal size that make the whole, and pieces where they live."""

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tfgpu
from tfgpu.checkpoint import storage, streamed
from tfgpu.checkpoint.storage import Position
from tfgpu.compat import slots
from tfgpu.core.state import parts, sharded_variable, training_state

SIZES = st.lists(st.tuples(st.integers(0, 300_000), st.sampled_from([1, 2, 4, 8])), max_size=12)


@given(sizes=SIZES, workers=st.integers(1, 5))
def test_shares_make_the_whole_and_are_equal(sizes, workers):
    found, total = parts.deal(sizes, workers), sum(size * width for size, width in sizes)
    load = [0] * workers
    for (size, width), stretches in zip(sizes, found, strict=True):
        assert [begin for _, begin, _ in stretches] == [0, *(end for *_, end in stretches[:-1])]
        assert stretches[-1][2] == size
        for worker, begin, end in stretches:
            load[worker] += (end - begin) * width
    assert max(load) - total / workers <= parts._CUT_BYTES  # half of a small array at either end


def test_arrays_are_read_in_stretches_from_several_files(tmp_path):
    array = np.arange(60, dtype="int16").reshape(3, 5, 4)
    shards = np.arange(8.0).reshape(2, 4), np.arange(4.0).reshape(2, 2)
    flat, first = array.reshape(-1), parts.as_stored("b~0", shards[0])
    cut = [parts.Stored(f"a[{b}:{e}]", (e - b,), array.dtype, (flat[b:e],)) for b, e in ((0, 17), (17, 23), (23, 60))]
    streamed.write(tmp_path / "0", [cut[2], first, parts.as_stored("whole", array), cut[0]])
    streamed.write(tmp_path / "1", [parts.as_stored("b~1", shards[1]), cut[1]])
    paths = [tmp_path / "1", tmp_path / "0"]
    found = streamed.open_arrays(paths, {"a": array.shape}, {"b": 1})
    assert sorted(found) == ["a", "b", "whole"]
    joined = np.concatenate(shards, 1)
    assert np.asarray(found["b"]).tolist() == joined.tolist() and found["b"].shape == (2, 6)
    for part in (slice(0, 4), slice(4, 6), slice(3, 5), slice(2, 2), slice(6, 6)):
        assert found["b"][:, part].tolist() == joined[:, part].tolist()
        assert found["b"].viewed(np.dtype("uint64"))[1:, part].tolist() == joined.view("uint64")[1:, part].tolist()
    for name in ("a", "whole"):
        assert found[name].shape == array.shape and found[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(found[name]), array)
        for begin, end in ((0, 60), (0, 0), (16, 24), (1, 2), (21, 60), (59, 60)):
            assert found[name].stretch(begin, end).tolist() == flat[begin:end].tolist()
        assert found[name][1:, 2:4].tolist() == array[1:, 2:4].tolist()
    with pytest.raises(ValueError, match="do not make"):
        streamed.open_arrays(paths[:1], {"a": array.shape}, {})


def build(replicas, stage=0, policy="float32"):
    tfgpu.repair_keras()
    keras.utils.set_random_seed(2)
    with tfgpu.strategy("mirrored", devices=replicas).scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(7, dtype=policy), keras.layers.Dense(3)])
        if stage:
            model = tfgpu.parallel.shard(model, stage)
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def values(model):
    found = [*sharded_variable.merged(model.weights), *sharded_variable.merged(model.optimizer.variables)]
    return [np.asarray(variable.numpy()).tobytes() for variable in found]


@pytest.mark.parametrize(
    ("replicas", "stage", "policy"),
    [
        pytest.param(3, 3, "float32", marks=pytest.mark.slow),
        pytest.param(2, 2, "bfloat16", marks=pytest.mark.slow),
        pytest.param(1, 0, "float32", marks=pytest.mark.slow),
    ],
)
def test_pieces_are_written_as_they_are_and_any_layout_reads_them(tmp_path, replicas, stage, policy):
    model = build(replicas, stage, policy)
    x = np.random.default_rng(0).normal(size=(12, 4)).astype("float32")
    model.fit(x, x[:, :3], 6, verbose=0)
    saved = parts.copy(model)
    assert not saved.cut and not saved.axes
    chunks = {each.key: len(each.chunks) for each in saved.own}
    assert chunks["weights/0000"] == (replicas if stage == 3 else 1)  # 28 numbers: each replica's piece, uncopied
    storage.write(tmp_path / "epoch-0001", Position(1), saved, None)
    assert not saved.own  # each is freed when it is written
    read = storage.read(tmp_path / "epoch-0001")
    for other in (build(2, 3, policy), build(1, 0, policy), build(3, 1, policy)):
        other.fit(x, x[:, :3], 6, verbose=0)
        training_state.restore_state(other, read.arrays, "the checkpoint")
        assert values(other) == values(model)


@pytest.mark.parametrize("rank", [0, 1])
def test_of_what_differs_by_replica_the_chief_saves_the_first(rank):
    model = build(2)
    layout = parts._Layout(model.distribute_strategy)
    layout._workers, layout._rank = 2, rank
    first, *others = model.weights
    for copy in first.value.values:
        slots.of(copy).differs_by_replica = True
    for at, variable in enumerate((*others, first)):  # the last share is the second worker's
        layout.add(f"weights/{at}", variable)
    assert (f"weights/{len(others)}" in [each.key for each in layout.copied(model).own]) == (rank == 0)
