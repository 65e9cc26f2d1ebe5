"""Other libraries' arrays as tensors: one memory, every type, and one error where that cannot be."""

import importlib.util

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies

from tfgpu.errors import InputError, MachineError
from tfgpu.interop import from_dlpack

TYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")


def aligned(shape, kind="float32", off=0):
    """An array that begins `off` bytes behind a multiple of 64."""
    count = int(np.prod(shape)) * np.dtype(kind).itemsize
    memory = np.zeros(count + 192, "uint8")
    begin = -memory.ctypes.data % 64 + 64 + off
    return memory[begin : begin + count].view(kind).reshape(shape)


@given(strategies.sampled_from(TYPES), strategies.lists(strategies.integers(0, 4), max_size=4))
def test_values_shape_and_type_are_the_arrays(kind, shape):
    array = np.asarray(np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(kind))
    tensor = from_dlpack(array)
    assert tensor.dtype.as_numpy_dtype == array.dtype
    np.testing.assert_array_equal(tensor.numpy(), array)


def test_both_have_one_memory_unless_a_copy_is_asked_for():
    array = aligned((3, 4))
    shared, copied = from_dlpack(array, copy=False), from_dlpack(array, copy=True)
    array[1, 2] = 7
    assert float(shared[1, 2]) == 7 and float(copied[1, 2]) == 0


@pytest.mark.parametrize("off", [4, 16, 32])
def test_memory_that_would_end_the_process_is_copied(off):
    """TensorFlow's `from_dlpack` takes it, and some operations then abort: "Check failed: IsAligned()"."""
    array = aligned((3, 4), off=off)
    tensor = from_dlpack(array)
    array[1, 2] = 7
    assert float(tensor[1, 2]) == 0 and float(tf.reduce_sum(tf.raw_ops.DeepCopy(x=tensor) @ tf.ones((4, 2)))) == 0
    with pytest.raises(InputError, match="multiple of 64 bytes"):
        from_dlpack(array, copy=False)


def test_the_memory_lives_as_long_as_the_tensor():
    tensors = []
    for at in range(50):
        array = aligned(10_000)
        array[:] = at
        tensors.append(from_dlpack(array, copy=False))
        del array
    assert [float(tensor[9_999]) for tensor in tensors] == list(range(50))


def test_rows_that_do_not_lie_one_behind_the_other_are_copied():
    array = np.arange(6.0).reshape(2, 3).T
    np.testing.assert_array_equal(from_dlpack(array), array)
    with pytest.raises(InputError, match="one behind the other"):
        from_dlpack(array, copy=False)


def test_an_array_that_must_not_be_written_is_copied():
    array = aligned((3,))
    array.flags.writeable = False
    np.testing.assert_array_equal(from_dlpack(array), array)


def test_the_way_out_shares_too():
    tensor = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    array = np.from_dlpack(tensor)
    assert array.tolist() == [[1, 2], [3, 4]]
    assert array.ctypes.data == np.from_dlpack(tensor).ctypes.data


def test_a_gradient_passes_through_what_follows():
    tensor = from_dlpack(np.array([2.0, 3.0], "float32"))
    with tf.GradientTape() as tape:
        tape.watch(tensor)
        loss = tf.reduce_sum(tensor**2)
    assert tape.gradient(loss, tensor).numpy().tolist() == [4, 6]


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_jax_there_and_back():
    import jax

    array = jax.numpy.arange(12, dtype="float32").reshape(3, 4)
    tensor = from_dlpack(array, copy=False)
    np.testing.assert_array_equal(tensor, np.asarray(array))
    back = jax.dlpack.from_dlpack(tensor)
    assert back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


class Elsewhere:
    """An array of another device, by the protocol's word."""

    def __init__(self, *device):
        self._device = device

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **options):
        raise AssertionError("must not be asked")


def test_bad_input():
    with pytest.raises(InputError, match="__dlpack__"):
        from_dlpack([1, 2])
    with pytest.raises(InputError, match="Convert its type"):
        from_dlpack(np.array(["a"]))
    with pytest.raises(MachineError, match="TensorFlow sees 0 GPU"):
        from_dlpack(Elsewhere(2, 0))
    with pytest.raises(MachineError, match="kind 8"):
        from_dlpack(Elsewhere(8, 0))
