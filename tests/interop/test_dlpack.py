"""DLPack: shared memory, all types, and errors."""

import gc
import importlib.util
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies

from tfgpu.errors import InputError, MachineError
from tfgpu.interop import from_dlpack, to_dlpack

TYPES = ("bool", "int8", "uint8", "int16", "int32", "int64", "float16", "float32", "float64", "complex64")


def aligned(shape, kind="float32", off=0):
    """An array that begins `off` bytes after a multiple of 64."""
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
    """TensorFlow's `from_dlpack` accepts it, and some operations then abort: "Check failed: IsAligned()"."""
    array = aligned((3, 4), off=off)
    tensor = from_dlpack(array)
    array[1, 2] = 7
    assert float(tensor[1, 2]) == 0 and float(tf.reduce_sum(tf.raw_ops.DeepCopy(x=tensor) @ tf.ones((4, 2)))) == 0
    with pytest.raises(InputError, match="aligned to 64 bytes"):
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
    with pytest.raises(InputError, match="must be contiguous"):
        from_dlpack(array, copy=False)


def test_an_array_that_must_not_be_written_is_copied():
    array = aligned((3,))
    array.flags.writeable = False
    np.testing.assert_array_equal(from_dlpack(array), array)


def test_the_way_out_shares_too():
    tensor = tf.constant([[1.0, 2.0], [3.0, 4.0]])
    array = np.from_dlpack(to_dlpack(tensor))
    assert array.tolist() == [[1, 2], [3, 4]]
    assert array.ctypes.data == np.from_dlpack(to_dlpack(tensor)).ctypes.data


def test_the_way_out_is_to_the_device_of_the_tensor_and_without_a_copy():
    shared = to_dlpack(tf.constant([1.0]))
    shared.__dlpack__(stream=1, max_version=(1, 0), dl_device=shared.__dlpack_device__(), copy=False)
    for options in ({"dl_device": (2, 0)}, {"copy": True}):
        with pytest.raises(BufferError, match="copy=True"):
            shared.__dlpack__(**options)


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
    back = jax.dlpack.from_dlpack(to_dlpack(tensor))
    assert back.unsafe_buffer_pointer() == array.unsafe_buffer_pointer()


class Elsewhere:
    """An array that claims to be on another device."""

    def __init__(self, *device):
        self._device = device

    def __dlpack_device__(self):
        return self._device

    def __dlpack__(self, **options):
        raise AssertionError("must not be asked")


def test_bad_input():
    with pytest.raises(InputError, match="__dlpack__"):
        from_dlpack([1, 2])
    with pytest.raises(InputError, match="is not numeric. Convert it to another type first"):
        from_dlpack(np.array(["a"]))
    with pytest.raises(MachineError, match="TensorFlow sees 0 GPU"):
        from_dlpack(Elsewhere(2, 0))
    with pytest.raises(MachineError, match="kind 8"):
        from_dlpack(Elsewhere(8, 0))


@pytest.mark.skipif(importlib.util.find_spec("jax") is None, reason="jax is not installed")
def test_bfloat16_goes_out_and_on_the_cpu_does_not_come_in():
    import jax

    back = jax.dlpack.from_dlpack(to_dlpack(tf.cast([1.0, 2.0], tf.bfloat16)))
    assert back.dtype == "bfloat16" and back.tolist() == [1, 2]
    with pytest.raises(InputError, match="type bfloat16 cannot be converted.*another type first"):
        from_dlpack(back)


def test_the_way_out_takes_variables_and_copies_where_asked():
    variable, own = tf.Variable([1.0, 2.0]), keras.Variable([3.0])
    assert np.from_dlpack(to_dlpack(variable)).tolist() == [1, 2]
    assert np.from_dlpack(to_dlpack(own)).tolist() == [3]
    tensor = tf.constant([1.0, 2.0])
    same, copied = (np.from_dlpack(to_dlpack(tensor, copy=copy)).ctypes.data for copy in (False, True))
    assert same == np.from_dlpack(to_dlpack(tensor)).ctypes.data != copied


def test_a_variable_that_changes_leaves_what_was_handed_out():
    variable = tf.Variable([1.0, 2.0])
    before = np.from_dlpack(to_dlpack(variable))
    variable.assign_add([1.0, 1.0])
    assert before.tolist() == [1, 2] and variable.numpy().tolist() == [2, 3]


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (2, 0), (1, 1, 1)])
def test_no_and_few_numbers_pass_both_ways(shape):
    assert np.from_dlpack(to_dlpack(tf.ones(shape))).shape == from_dlpack(np.ones(shape, "float32")).shape == shape


def test_the_memory_outlives_the_tensor():
    arrays = []
    for at in range(20):
        tensor = tf.fill([10_000], float(at))
        arrays.append(np.from_dlpack(to_dlpack(tensor)))
        del tensor
    gc.collect()
    assert [array[9_999] for array in arrays] == list(range(20))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (tf.constant(["a"]), "must be numeric"),
        (tf.ragged.constant([[1], [2, 3]]), "a dense tensor"),
        (tf.sparse.from_dense([1, 0]), "a dense tensor"),
        (np.ones(3), "a dense tensor"),
        (tf.cast(tf.zeros([2]), "float8_e5m2"), "does not support float8_e5m2"),
    ],
    ids=["strings", "ragged", "sparse", "array", "float8"],
)
def test_what_cannot_go_out_is_refused_and_ends_no_process(value, words):
    with pytest.raises(InputError, match=words):
        to_dlpack(value)


def test_a_tensor_of_a_function_has_no_memory():
    @tf.function
    def inside(x):
        with pytest.raises(InputError, match=r"within a `tf\.function`"):
            to_dlpack(x)
        return x

    inside(tf.zeros([2]))


TORCH = """
import gc, sys
import {first}
import {second}
import numpy as np, tensorflow as tf, torch
from tfgpu.errors import InputError
from tfgpu.interop import from_dlpack, to_dlpack

for kind in "bool int8 uint8 int16 int32 int64 float16 float32 float64 complex64".split():
    there = torch.arange(12).to(getattr(torch, kind)).reshape(3, 4)
    tensor = from_dlpack(there, copy=False)
    back = torch.from_dlpack(to_dlpack(tensor))
    assert back.dtype == there.dtype and back.data_ptr() == there.data_ptr(), kind
    assert torch.equal(back, there), kind
    turned = from_dlpack(there.T)
    assert turned.shape == (4, 3) and tf.reduce_all(turned == tf.transpose(tensor)), kind
    try:
        from_dlpack(there.T, copy=False)
        raise AssertionError(kind)
    except InputError as error:
        assert "must be contiguous" in str(error)
    part = from_dlpack(there[1:, 1:3])
    assert tf.reduce_all(part == tensor[1:, 1:3]), kind
    assert from_dlpack(torch.zeros([0, 3]).to(there.dtype)).shape == (0, 3)
    assert from_dlpack(there[2, 3]).shape == ()
assert torch.from_dlpack(to_dlpack(tf.ones(3, tf.bfloat16))).dtype == torch.bfloat16

for bad in (torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.complex64).conj(), torch.eye(3).to_sparse()):
    try:
        from_dlpack(bad)
        raise AssertionError(bad)
    except InputError as error:
        assert "cannot be converted" in str(error)

tensor = tf.constant([[1.0, 2.0], [3.0, 4.0]])
view, copied = torch.from_dlpack(to_dlpack(tensor)), torch.from_dlpack(to_dlpack(tensor, copy=True))
view[0, 0], copied[1, 1] = 9.0, 9.0
assert tensor.numpy().tolist() == [[9.0, 2.0], [3.0, 4.0]]  # PyTorch writes to a constant: hence `copy`

kept_there, kept_here = [], []
for at in range(20):
    tensor, array = tf.fill([10_000], float(at)), torch.full([10_000], float(at))
    kept_there.append(torch.from_dlpack(to_dlpack(tensor)))
    kept_here.append(from_dlpack(array, copy=False))
    del tensor, array
gc.collect()
assert [float(a[-1]) for a in kept_there] == [float(t[-1]) for t in kept_here] == list(range(20))
print("good")
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("order", [("torch", "tensorflow"), ("tensorflow", "torch")], ids=" then ".join)
def test_pytorch_there_and_back(order):
    """In a separate process, in both import orders."""
    script = TORCH.format(first=order[0], second=order[1])
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=550)
    assert done.stdout.strip() == "good", done.stderr[-3000:]


@pytest.mark.gpu
def test_a_gpu_shares_with_cupy():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    if not tf.config.list_physical_devices("GPU"):
        pytest.skip("TensorFlow sees no GPU")
    array = cupy.arange(12, dtype="float32").reshape(3, 4)
    cupy.cuda.Device().synchronize()
    tensor = from_dlpack(array)
    assert "GPU" in tensor.device and tensor.numpy().tolist() == array.get().tolist()
    back = cupy.from_dlpack(to_dlpack(tensor))
    assert back.data.ptr == array.data.ptr
