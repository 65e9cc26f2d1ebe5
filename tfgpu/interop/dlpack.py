"""Shares arrays with other libraries without a copy, by the DLPack protocol."""

import contextlib

import keras
import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError, MachineError

ALIGNMENT = 64
"""The alignment in bytes of a tensor's memory on the CPU."""
_CPU, _PINNED, _CUDA, _MANAGED = 1, 3, 2, 13  # DLDeviceType
_WHERE = {_CPU: "CPU", _PINNED: "CPU", _CUDA: "GPU", _MANAGED: "GPU"}
_WITHOUT_MEMORY = (tf.string, tf.resource, tf.variant)


def from_dlpack(value: object, *, copy: bool | None = None) -> tf.Tensor:
    """Returns another library's array as a tensor on the same device.

    Both share their memory. TensorFlow assumes that tensors are constant, so do not write to the array while the tensor
    is in use. On a GPU, synchronize first (`torch.cuda.synchronize()`): the libraries do not synchronize their streams.

    Args:
        value: an object with `__dlpack__`: an array of NumPy, PyTorch, JAX, CuPy, cuDF, or a tensor, of any shape.
        copy: `False` never copies, `True` always does; `None` copies only what TensorFlow cannot share: an array on the
            CPU that is not contiguous, is read-only, or is not aligned to 64 bytes. TensorFlow's own `from_dlpack`
            accepts unaligned arrays, and aborts the process in a later operation ("Check failed: IsAligned()"). PyTorch
            and JAX align their arrays; NumPy may not.

    Returns:
        A tensor of the same shape and type.

    Raises:
        InputError: `value` has no `__dlpack__`, its type is not numeric (on the CPU bfloat16 neither), it is a PyTorch
            tensor that requires a gradient (`detach()` it), or it needs a copy and `copy` is `False`.
        MachineError: the array is on a device that TensorFlow does not see.

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
    where = _WHERE.get(int(kind))
    if where is None:
        raise MachineError(
            f"The array is on a device of DLPack's kind {int(kind)}, which TensorFlow does not support. Move it to the "
            "CPU."
        )
    count = len(tf.config.list_logical_devices(where))
    if where == "GPU" and index >= count:
        raise MachineError(
            f"The array is on GPU {index}, but TensorFlow sees {count} GPU(s). Move it to the CPU first."
        )
    try:
        if where == "GPU":
            shared = tf.experimental.dlpack.from_dlpack(value.__dlpack__())
            return tf.raw_ops.DeepCopy(x=shared) if copy else shared
        array = value if isinstance(value, np.ndarray) else np.from_dlpack(value)
        if array.dtype.kind not in "biufc":
            raise TypeError(f"{array.dtype} is not numeric.")
    except (BufferError, RuntimeError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(
            f"The array of type {getattr(value, 'dtype', '?')} cannot be converted: {reason.rstrip('.')}. Convert it "
            "to another type first."
        ) from error
    is_fit = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if is_fit and not copy:
        with contextlib.suppress(BufferError):  # NumPy does not export read-only arrays
            return tf.experimental.dlpack.from_dlpack(value.__dlpack__())
    if copy is False:
        raise InputError(
            f"TensorFlow cannot share this array: it must be contiguous, aligned to {ALIGNMENT} bytes and writable. "
            "Omit `copy`."
        )
    return tf.constant(array)


class Shared:
    """A tensor whose memory other libraries may use, on any stream.

    Attributes:
        tensor: the tensor.
    """

    def __init__(self, tensor: tf.Tensor):
        self.tensor = tensor

    def __dlpack__(
        self, *, stream: object = None, max_version: object = None, dl_device: object = None, copy: bool | None = None
    ) -> object:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("TensorFlow shares a tensor where it is. Use `to_dlpack(tensor, copy=True)` for a copy.")
        return tf.experimental.dlpack.to_dlpack(self.tensor)

    def __dlpack_device__(self) -> tuple[int, int]:
        device = tf.DeviceSpec.from_string(self.tensor.backing_device)
        return (_CUDA if device.device_type == "GPU" else _CPU), device.device_index


def to_dlpack(tensor: object, *, copy: bool = False) -> Shared:
    """Prepares a tensor for other libraries: `torch.from_dlpack(to_dlpack(tensor))`.

    Since TensorFlow 2.20 a tensor itself has `__dlpack__`, which refuses PyTorch and CuPy on a GPU, because they name
    their stream. This function waits for the GPU instead. It also accepts variables, and rejects tensors that would
    abort the process (strings: "Check failed: DataTypeCanUseMemcpy") or raise an unclear error (ragged tensors, tensors
    within a `tf.function`).

    Both libraries share the memory, which is freed after its last use. PyTorch allows writes to it, which would change
    a constant or a variable of TensorFlow: make a copy if you write to it.

    Args:
        tensor: a numeric tensor, `tf.Variable` or Keras variable, of any shape.
        copy: True copies the memory.

    Returns:
        An object for `from_dlpack` of `torch`, `jax.dlpack`, `cupy` or `numpy` (which has no bfloat16: use
        `tensor.numpy()`). JAX converts int64 and float64 to 32 bits, unless `jax_enable_x64` is set.

    Raises:
        InputError: `tensor` is not a dense, eager, numeric tensor.

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
            f"`tensor` must be a dense tensor or a variable. Received: {type(tensor)}{where}. "
            "Pass the result of the function, or each component of a ragged or sparse tensor."
        )
    if tensor.dtype in _WITHOUT_MEMORY:
        raise InputError(f"`tensor` must be numeric. Received: {tensor.dtype.name}. Use tensor.numpy().")
    if copy:
        tensor = tf.raw_ops.DeepCopy(x=tensor)
    if tf.DeviceSpec.from_string(tensor.device).device_type == "GPU":
        tf.test.experimental.sync_devices()
    shared = Shared(tensor)
    try:
        shared.__dlpack__()
    except tf.errors.InvalidArgumentError as error:
        raise InputError(
            f"This TensorFlow does not support {tensor.dtype.name} in DLPack. Cast it, or use tensor.numpy()."
        ) from error
    return shared
