"""Arrays of other libraries as tensors, and back, without a copy: DLPack, the protocol that all of them speak.

The way out needs nothing: a TensorFlow tensor has `__dlpack__`, so `torch.from_dlpack(tensor)`,
`jax.dlpack.from_dlpack(tensor)`, `cupy.from_dlpack(tensor)` and `numpy.from_dlpack(tensor)` take it as it is. The way
in is `from_dlpack`.
"""

import contextlib

import numpy as np
import tensorflow as tf

from tfgpu.errors import InputError, MachineError

ALIGNMENT = 64
"""Bytes: where the memory of a tensor on the CPU must begin."""
_CPU, _PINNED, _CUDA, _MANAGED = 1, 3, 2, 13  # DLDeviceType
_WHERE = {_CPU: "CPU", _PINNED: "CPU", _CUDA: "GPU", _MANAGED: "GPU"}


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
        InputError: no `__dlpack__`, a type that is no number (on the CPU: nor bfloat16), or a copy would be needed and
            `copy` is `False`.
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
        array = value if isinstance(value, np.ndarray) else np.from_dlpack(value)
        if array.dtype.kind not in "biufc":
            raise TypeError("it is no number.")
    except (BufferError, RuntimeError, TypeError, ValueError, tf.errors.InvalidArgumentError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        kind = getattr(value, "dtype", "?")
        raise InputError(f"An array of the type {kind} cannot be taken: {reason} Convert its type first.") from error
    is_fit = array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
    if is_fit and not copy:
        with contextlib.suppress(BufferError):  # NumPy does not hand out what must not be written
            return tf.experimental.dlpack.from_dlpack(value.__dlpack__())
    if copy is False:
        raise InputError(
            "TensorFlow cannot share this array: its rows must lie one behind the other, begin at a multiple of "
            f"{ALIGNMENT} bytes, and not be marked as read-only. Leave `copy` out."
        )
    return tf.constant(array)


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
