"""Custom operations in C++ or CUDA, with a gradient and a fallback to TensorFlow operations."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import tensorflow as tf

from tfgpu.compat import tensorflow as private_tensorflow
from tfgpu.core import step_context
from tfgpu.errors import InputError, MachineError, unknown
from tfgpu.interop.building import built_for

_log = logging.getLogger(__name__)

Gradient = Callable[[Sequence[tf.Tensor], tf.Tensor, tf.Tensor, "Operations | None"], Sequence[tf.Tensor | None]]
Fallback = Callable[..., tf.Tensor]


class Operations:
    """The operations of a library, by their names in Python; see `CustomOp`."""

    def __init__(self, module: object):
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., tf.Tensor]:
        found = getattr(self._module, name, None)
        if found is None or name.startswith("_"):
            raise unknown("operation of the library", name, _names(self._module))
        return cast(Callable[..., tf.Tensor], found)


class CustomOp:
    """A function of tensors that runs a library's kernel if available, and `fallback` otherwise.

    Each call (in a `tf.function`, each trace) chooses one, and each reason for the fallback is logged once:

    | | runs |
    |---|---|
    | the library exists and has a kernel for the device | the kernel |
    | no library, or no kernel for this device | `fallback` |
    | XLA compiles (`jit_compile=True`), which cannot use custom kernels | `fallback` |

    Attributes:
        name: the operation's name.
        library: its file.
        devices: kinds of device with a kernel; empty without a library.
    """

    def __init__(self, library: Path, name: str, module: object | None, gradient: Gradient | None, fallback: Fallback):
        self.library: Path = library
        self.name: str = name
        self.devices: frozenset[str] = private_tensorflow.devices_of(name) if module is not None else frozenset()
        self._module, self._operations = module, None if module is None else Operations(module)
        self._fallback, self._gradient = fallback, gradient
        self._said: set[str] = set()

    def __call__(self, *inputs: object) -> tf.Tensor:
        """Runs on tensors, or values for `tf.convert_to_tensor`; returns one tensor."""
        if not inputs:
            raise InputError("A custom operation needs at least one tensor. Received: none.")
        tensors = [tf.convert_to_tensor(value) for value in inputs]
        reason = self._why_not(tensors)
        if reason:
            if reason not in self._said:
                self._said.add(reason)
                _log.warning("%s uses its fallback: %s.", self.name, reason)
            return self._fallback(*tensors)
        operations, gradient = self._operations, self._gradient
        operation = getattr(operations, _python_name(self._module, self.name))
        if gradient is None:
            return operation(*tensors)

        @tf.custom_gradient
        def run(*values: tf.Tensor) -> tuple[tf.Tensor, Callable[[tf.Tensor], Sequence[tf.Tensor | None]]]:
            result = operation(*values)
            return result, lambda upstream: gradient(values, result, upstream, operations)

        return run(*tensors)

    def _why_not(self, tensors: Sequence[tf.Tensor]) -> str:
        if self._operations is None:
            return f"there is no library {self.library}"
        if step_context.is_in_xla():
            return "XLA compiles this function and cannot use custom kernels"
        kind = _kind(tensors[0])
        return "" if kind in self.devices else f"the library has no kernel for a {kind}"


def custom_op(
    library: str | Path, name: str, *, fallback: Fallback, gradient: Gradient | None = None, required: bool = False
) -> CustomOp:
    """Loads an operation from a library built by `tfgpu build-kernel`.

    Args:
        library: the file. If it is missing, `fallback` runs.
        name: the operation's name, as in `REGISTER_OP`.
        fallback: computes the same from the same inputs with TensorFlow operations; TensorFlow differentiates it.
        gradient: `(inputs, output, upstream, operations) -> a gradient for each input`; `operations` has the library's
            other operations, such as one for the backward pass. By default, the operation's registered gradient
            (`tf.RegisterGradient`) is used.
        required: True makes a missing library an error.

    Returns:
        A function of tensors.

    Raises:
        InputError: the library has no such operation, or is missing and `required`.
        MachineError: the library was built for another TensorFlow or another machine, or cannot be loaded.

    Example:
        >>> double = custom_op("libdouble.so", "Double", fallback=lambda x: 2 * x)
        >>> double([1.0, 2.0]).numpy().tolist()
        [2.0, 4.0]

    Source: https://www.tensorflow.org/guide/create_op
    """
    path = Path(library)
    if not callable(fallback):
        raise InputError(f"`fallback` must be a function of the same inputs. Received: {fallback!r}.")
    if not path.is_file():
        if required:
            raise InputError(f"There is no library {path}. Build it: tfgpu build-kernel SOURCES --output {path}.")
        return CustomOp(path, name, None, gradient, fallback)
    module = _loaded(path)
    if _python_name(module, name) is None:
        raise unknown(f"operation of {path}", name, _names(module))
    return CustomOp(path, name, module, gradient, fallback)


def _loaded(path: Path) -> object:
    """Loads a library after checking its TensorFlow version: loading a wrong one may crash the process."""
    wanted, version = built_for(path), tf.version.VERSION
    if wanted not in (None, version):
        raise MachineError(
            f"{path} was built for TensorFlow {wanted}, but {version} is installed, and the C++ ABI differs between "
            "versions. Rebuild it: tfgpu build-kernel."
        )
    try:
        return tf.load_op_library(str(path.resolve()))
    except (tf.errors.OpError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0]
        raise MachineError(
            f"{path} cannot be loaded: {said} Rebuild it for TensorFlow {version} on this machine: tfgpu build-kernel."
        ) from error


def _kind(tensor: tf.Tensor) -> str:
    """The kind of device that operations on a tensor run on; in a graph, that of the innermost `tf.device`."""
    device = tf.identity(tensor).device
    kind = tf.DeviceSpec.from_string(device).device_type if device else None
    return kind or ("GPU" if tf.config.list_logical_devices("GPU") else "CPU")


def _names(module: Any) -> list[str]:
    functions = {name for name in dir(module) if name[:1].islower() and callable(getattr(module, name))}
    return sorted(name for name in functions if f"{name}_eager_fallback" in functions)


def _python_name(module: object, name: str) -> str | None:
    """TensorFlow's name of the Python function of an operation: `example_bias_gelu` for `ExampleBiasGelu`."""
    return next((each for each in _names(module) if each.replace("_", "") == name.lower().replace("_", "")), None)
