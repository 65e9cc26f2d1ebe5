"""Values and arrays in one file: reading returns what was written, and damage to any byte is detected."""

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import tfgpu
from tfgpu import packing
from tfgpu.training.incremental import ElasticWeights, Replay

ARRAYS = hnp.arrays(
    st.sampled_from(["float32", "int64", "bool", "uint8", ml_dtypes.bfloat16]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3),
    elements=st.integers(0, 1),
)
PLAIN = st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=4)
KEYS = st.text(max_size=3) | st.integers(0, 5)
VALUES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


def equal(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@settings(deadline=None)
@given(VALUES)
def test_what_comes_out_is_what_went_in(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("files") / "value"
    packing.write(path, "value", value)
    assert equal(packing.read(path, "value"), value)
    assert [one.name for one in path.parent.iterdir()] == ["value"]


@pytest.fixture(scope="module")
def memory():
    return Replay(4, seed=1, balance=True).add({"a": np.eye(6, dtype="float32")}, np.arange(6))


@settings(deadline=None)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7), cut=st.booleans())
def test_damage_of_any_byte_is_one_error(tmp_path_factory, memory, at, bit, cut):
    path = tmp_path_factory.mktemp("files") / "memory"
    memory.save(path)
    content = bytearray(path.read_bytes())
    if cut:
        content = content[: at % len(content)]
    else:
        content[at % len(content)] ^= 1 << bit
    path.write_bytes(content)
    try:
        found = Replay.from_file(path)
    except tfgpu.InputError as error:
        assert str(path) in str(error)
    else:  # a bit of the header that says nothing, such as a space
        assert np.array_equal(found.arrays[0]["a"], memory.arrays[0]["a"])


def test_another_file_is_named(tmp_path, memory):
    other = tmp_path / "other"
    ElasticWeights(1.0).save(other)
    with pytest.raises(tfgpu.InputError, match="must be a file of a replay memory.* is another file"):
        Replay.from_file(other)
    memory.save(other)
    with pytest.raises(tfgpu.InputError, match="penalty on elastic weights.* is another file"):
        ElasticWeights.from_file(other)
    safetensors.numpy.save_file({"a": np.ones(2)}, other)
    with pytest.raises(tfgpu.InputError, match="another file"):
        Replay(4).load(other)
    with pytest.raises(tfgpu.InputError, match="not there"):
        Replay.from_file(tmp_path / "none")
    other.write_bytes(b"\x80\x04\x95 no pickle is read")
    with pytest.raises(tfgpu.InputError, match="damaged, or another file"):
        Replay.from_file(other)


def test_a_memory_continues_from_its_file_alone(tmp_path, memory):
    x, y = {"a": np.eye(6, dtype="float32")}, np.arange(6)
    memory.save(tmp_path / "memory")
    whole = Replay(4, seed=1, balance=True).add(x, y).add(x, y)
    again = Replay.from_file(tmp_path / "memory").add(x, y)
    assert np.array_equal(again.arrays[0]["a"], whole.arrays[0]["a"]) and again.seen == 12
    by_bytes = Replay(bytes=100).add(x, y)
    by_bytes.save(tmp_path / "memory")
    assert len(Replay.from_file(tmp_path / "memory")) == len(by_bytes) == 3
    Replay(bytes=100).save(tmp_path / "memory")
    assert len(Replay.from_file(tmp_path / "memory").add(x, y)) == 3
