"""Named arrays in `.npz` files."""

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.data import load
from tfgpu.errors import InputError

RNG = np.random.default_rng(0)
COUNT = 30
FLAT = {
    "x/picture": RNG.integers(0, 256, (COUNT, 6, 6, 3), dtype=np.uint8),
    "x/ids": RNG.integers(0, 9, (COUNT, 2)),
    "y/kind": np.array(["flat", "hut", "tower"])[np.arange(COUNT) % 3],
    "y/place": RNG.normal(size=(COUNT, 2)),
    "y/bounding_boxes/boxes": RNG.uniform(size=(COUNT, 4, 4)),
    "sample_weight": RNG.uniform(0.5, 2, COUNT),
}
NESTED = (
    {"picture": FLAT["x/picture"], "ids": FLAT["x/ids"]},
    {
        "kind": FLAT["y/kind"],
        "place": FLAT["y/place"],
        "bounding_boxes": {"boxes": FLAT["y/bounding_boxes/boxes"]},
    },
    FLAT["sample_weight"],
)
SETTINGS = {"global_batch": 8, "seed": 3, "validation": 0.2}


def batches(part) -> list[list[np.ndarray]]:
    return [[each.numpy() for each in tf.nest.flatten(batch)] for batch in part]


def same(left, right) -> bool:
    pairs = zip(batches(left), batches(right), strict=True)
    return all(a.dtype == b.dtype and np.array_equal(a, b) for one, two in pairs for a, b in zip(one, two, strict=True))


def test_named_arrays_are_those_in_memory_to_the_bit(tmp_path):
    np.savez(tmp_path / "a.npz", **FLAT)
    given = load(NESTED, **SETTINGS)
    found = load(f"{tmp_path}/a.npz", **SETTINGS)
    assert found.info.targets == given.info.targets and found.info.targets["kind"].class_names[1] == "hut"
    assert found.info.input_shape == {"picture": (6, 6, 3), "ids": (2,)} and found.info.cache == "memory"
    for part in ("train", "validation"):
        assert same(getattr(found, part), getattr(given, part)), part


@pytest.mark.slow
def test_parts_are_named_in_the_file_or_by_files(tmp_path):
    x, y = RNG.normal(size=(9, 4)), np.arange(9) % 3
    np.savez(tmp_path / "one.npz", x_train=x, y_train=y, x_test=x[:6], y_test=y[:6])
    (tmp_path / "set").mkdir()
    np.savez(tmp_path / "set" / "train-0.npz", x=x[:5], y=y[:5])
    np.savez_compressed(tmp_path / "set" / "train-1.npz", x=x[5:], y=y[5:])
    np.savez(tmp_path / "set" / "test.npz", x=x[:6], y=y[:6])
    one, several = (load(f"{tmp_path}/{name}", global_batch=3, seed=1) for name in ("one.npz", "set"))
    assert (one.info.train_examples, one.info.test_examples, one.info.labels) == (9, 6, "class")
    assert same(one.train, several.train) and same(one.test, several.test)
    one.seek(0)
    assert same(one.train, load({"train": (x, y), "test": (x[:6], y[:6])}, global_batch=3, seed=1).train)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": FLAT["x/ids"]}, "has no array 'y'"),
        ({"x": FLAT["x/ids"], "x/ids": FLAT["x/ids"], "y": np.arange(COUNT)}, "holds .*Keep one"),
        ({"x_test": FLAT["x/ids"], "y_test": np.arange(COUNT)}, "no training examples"),
        ({"x": np.full((COUNT, 2), np.inf), "y": np.arange(COUNT) % 2}, "x must be finite.*example 0"),
        ({"x": FLAT["x/ids"], "y/p": np.where(np.eye(COUNT) > 0, np.nan, 1.0)}, "y must be finite.*example 0"),
        ({"x": FLAT["x/ids"], "y": np.zeros(COUNT, int)}, "at least two classes"),
    ],
    ids=range(6),
)
def test_what_is_wrong_is_named(tmp_path, arrays, message):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(InputError, match=message):
        load(f"{tmp_path}/a.npz", global_batch=8)


def test_damaged_and_large_files_are_named(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match="Cannot read .*a.npz as npz"):
        load(f"{tmp_path}/a.npz", global_batch=8)
    np.savez_compressed(tmp_path / "b.npz", x=FLAT["x/picture"], y=np.arange(COUNT) % 2)
    with pytest.raises(InputError, match="does not fit in memory_bytes=1000"):
        load(f"{tmp_path}/b.npz", global_batch=8, memory_bytes=1000)
