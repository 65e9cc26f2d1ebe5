"""Arrays of other libraries as tensors, and back, without a copy: DLPack, the protocol that all of them speak."""

import contextlib
import ctypes

import keras
import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError, MachineError

ALIGNMENT = 64
"""Bytes: where the memory of a tensor on the CPU must begin."""
_CPU, _PINNED, _CUDA, _MANAGED = 1, 3, 2, 13  # DLDeviceType
_WHERE = {_CPU: "CPU", _PINNED: "CPU", _CUDA: "GPU", _MANAGED: "GPU"}
_BFLOAT = 4  # DLDataTypeCode
_BFLOAT16 = tf.bfloat16.as_numpy_dtype
_WITHOUT_MEMORY = (tf.string, tf.resource, tf.variant)


def from_dlpack(value: object, *, copy: bool | None = None) -> tf.Tensor:
    """Takes another library's array as a tensor, on the device where it lies.

    Both then share one memory. A tensor is a constant for TensorFlow, so do not write to the array while the tensor is
    in use. On a GPU the other library must have finished the array (`torch.cuda.synchronize()`): the two do not know of
    each other's streams.

    Args:
        value: whatever has `__dlpack__`: an array of NumPy, PyTorch, JAX, CuPy, cuDF, or a tensor, of any shape.
        copy: `False` never copies, `True` always does; `None` copies only what TensorFlow cannot share: an array on the
            CPU whose rows do not lie one behind the other, that is read-only, or that does not begin at a multiple of
            64 bytes. TensorFlow's own `from_dlpack` takes the last, and ends the process at a later operation ("Check
            failed: IsAligned()"). PyTorch and JAX begin there; NumPy need not.

    Returns:
        A tensor of the same shape and type.

    Raises:
        InputError: no `__dlpack__`, a type that is no number, a PyTorch tensor that wants a gradient (`detach()` it),
            or a copy would be needed and `copy` is `False`.
        MachineError: the array lies on a device that TensorFlow does not see.

    Example:
        >>> import numpy as np
        >>> from_dlpack(np.ones((2, 3), "float32")).shape
        TensorShape([2, 3])

    Source: https://dmlc.github.io/dlpack/latest/python_spec.html
    """
    if not hasattr(value, "__dlpack__") or not hasattr(value, "__dlpack_device__"):
        raise InputError(
            f"`value` must have `__dlpack__`, as arrays of NumPy, PyTorch, JAX and CuPy do. Received: {type(value)}. "
            "Convert it with numpy.asarray first."
        )
    kind, index = value.__dlpack_device__()
    where = _check_device(int(kind), index)
    try:
        if where == "GPU":
            shared = tf.experimental.dlpack.from_dlpack(value.__dlpack__())
            return tf.raw_ops.DeepCopy(x=shared) if copy else shared
        array, lend = _array(value)
        if array.dtype.kind not in "biufc" and array.dtype != _BFLOAT16:
            raise TypeError(f"{array.dtype} is no number.")
    except (BufferError, RuntimeError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"This array of the type {getattr(value, 'dtype', '?')} cannot be taken: {reason.rstrip('.')}. "
            "Convert it first."
        ) from error
    is_fit = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if is_fit and not copy:
        with contextlib.suppress(BufferError):  # NumPy does not hand out what must not be written
            return tf.experimental.dlpack.from_dlpack(lend())
    if copy is False:
        raise InputError(
            "TensorFlow cannot share this array: its rows must lie one behind the other, begin at a multiple of "
            f"{ALIGNMENT} bytes, and not be marked as read-only. Leave `copy` out."
        )
    return tf.constant(array)


def to_dlpack(tensor: object, *, copy: bool = False) -> tf.Tensor:
    """Gives a tensor as what other libraries take: `torch.from_dlpack(to_dlpack(tensor))`.

    A tensor can be handed over as it is; this refuses what would end the process (TensorFlow's DLPack of a tensor of
    strings: "Check failed: DataTypeCanUseMemcpy") or be an error without a reason (a ragged tensor, a tensor within a
    `tf.function`), takes variables, and waits for the GPU, as no stream is handed over.

    The memory is one, and lives until the last of both lets go. PyTorch lets you write to it, and so change what is a
    constant for TensorFlow, or a variable behind its back: take a copy where you mean to write.

    Args:
        tensor: a tensor, `tf.Variable` or Keras variable of numbers, of any shape.
        copy: True gives memory of its own.

    Returns:
        A tensor, for `from_dlpack` of `torch`, `jax.dlpack`, `cupy` or `numpy` (which has no bfloat16: use
        `tensor.numpy()`). JAX makes int64 and float64 narrower, unless `jax_enable_x64` is set.

    Raises:
        InputError: no tensor of numbers that is there, in one piece.

    Example:
        >>> import numpy as np
        >>> np.from_dlpack(to_dlpack(tf.constant([1, 2]))).tolist()
        [1, 2]

    Source: https://dmlc.github.io/dlpack/latest/python_spec.html
    """
    if isinstance(tensor, keras.Variable):
        tensor = tensor.value
    if isinstance(tensor, tf.Variable):
        tensor = tensor.read_value()
    if not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "numpy"):
        where = " within a `tf.function`, where it has no memory yet" if isinstance(tensor, tf.Tensor) else ""
        raise InputError(
            f"`tensor` must be a tensor or a variable with its numbers in one piece. Received: {type(tensor)}{where}. "
            "Hand over the result of the function, or each component of a ragged or sparse tensor."
        )
    if tensor.dtype in _WITHOUT_MEMORY:
        raise InputError(f"`tensor` must hold numbers. Received: {tensor.dtype.name}. Use tensor.numpy().")
    if copy:
        tensor = tf.raw_ops.DeepCopy(x=tensor)
    if tf.DeviceSpec.from_string(tensor.device).device_type == "GPU":
        tf.test.experimental.sync_devices()
    try:
        tensor.__dlpack__()
    except tf.errors.InvalidArgumentError as error:
        raise InputError(
            f"DLPack has no word for {tensor.dtype.name} in this TensorFlow. Cast it, or use tensor.numpy()."
        ) from error
    return tensor


def _check_device(kind: int, index: int) -> str:
    where = _WHERE.get(kind)
    if where is None:
        raise MachineError(
            f"TensorFlow has no device of DLPack's kind {kind}, where the array lies. Move it to the CPU."
        )
    count = len(tf.config.list_logical_devices(where))
    if where == "GPU" and index >= count:
        raise MachineError(
            f"The array lies on GPU {index}, and TensorFlow sees {count} GPU(s). Move it to the CPU first."
        )
    return where


def _array(value: object):
    """A NumPy array over the memory, and what hands the memory to TensorFlow."""
    if isinstance(value, np.ndarray):
        return value, value.__dlpack__
    try:
        return np.from_dlpack(value), value.__dlpack__
    except RuntimeError:  # NumPy knows no bfloat16
        capsule = value.__dlpack__()
        held = _Tensor.of(capsule)
        if (held.code, held.bits) != (_BFLOAT, 16):
            raise
        return held.words().view(_BFLOAT16), lambda: capsule


class _Tensor(ctypes.Structure):
    """`DLTensor` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )

    @classmethod
    def of(cls, capsule: object) -> "_Tensor":
        pointer = ctypes.pythonapi.PyCapsule_GetPointer
        pointer.restype, pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        return cls.from_address(pointer(capsule, b"dltensor"))

    def words(self) -> np.ndarray:
        """The memory as numbers of 16 bits, which lives no longer than the capsule."""
        shape = tuple(self.shape[: self.ndim])
        if 0 in shape:
            return np.zeros(shape, np.uint16)
        strides = tuple(self.strides[: self.ndim]) if self.strides else _packed(shape)
        span = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_uint16 * span).from_address(self.data + self.byte_offset)
        within = [2 * stride for stride in strides]
        return np.lib.stride_tricks.as_strided(np.frombuffer(memory, np.uint16), shape, within)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[at + 1 :])) for at in range(len(shape)))
