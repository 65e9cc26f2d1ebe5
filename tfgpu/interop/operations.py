"""Custom operations in C++ or CUDA: their libraries are built for the installed TensorFlow, and fall back to it."""

import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import tensorflow as tf

from tfgpu import atomic
from tfgpu.compat import tensorflow as private_tensorflow
from tfgpu.core import step_context
from tfgpu.errors import InputError, MachineError, unknown

MARK = "tfgpu-kernel-for-tensorflow:"
"""A marker in each library built here, followed by the version of TensorFlow it was built for."""
_CUDA = ".cu"
_CPP = (".cc", ".cpp", ".cxx")
_LINES = 15

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
        # In a graph, the device is that of the innermost `tf.device`.
        device = tf.identity(tensors[0]).device
        kind = tf.DeviceSpec.from_string(device).device_type if device else None
        kind = kind or ("GPU" if tf.config.list_logical_devices("GPU") else "CPU")
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
    wanted, version = built_for(path), tf.version.VERSION
    if wanted not in (None, version):  # loading it may crash the process
        raise MachineError(
            f"{path} was built for TensorFlow {wanted}, but {version} is installed, and the C++ ABI differs between "
            "versions. Rebuild it: tfgpu build-kernel."
        )
    try:
        module = tf.load_op_library(str(path.resolve()))
    except (tf.errors.OpError, RuntimeError) as error:
        said = str(error).strip().splitlines()[0]
        raise MachineError(
            f"{path} cannot be loaded: {said} Rebuild it for TensorFlow {version} on this machine: tfgpu build-kernel."
        ) from error
    if _python_name(module, name) is None:
        raise unknown(f"operation of {path}", name, _names(module))
    return CustomOp(path, name, module, gradient, fallback)


def _names(module: Any) -> list[str]:
    functions = {name for name in dir(module) if name[:1].islower() and callable(getattr(module, name))}
    return sorted(name for name in functions if f"{name}_eager_fallback" in functions)


def _python_name(module: object, name: str) -> str | None:
    """TensorFlow's name of the Python function of an operation: `example_bias_gelu` for `ExampleBiasGelu`."""
    return next((each for each in _names(module) if each.replace("_", "") == name.lower().replace("_", "")), None)


def build_kernel(
    sources: Sequence[str | Path],
    *,
    output: str | Path | None = None,
    cuda: bool | None = None,
    architectures: str = "all-major",
    timeout_s: float = 600.0,
) -> Path:
    """Compiles sources into a library for `custom_op`, with the flags of the installed TensorFlow.

    C++ is compiled with g++ (or `CXX`), CUDA with nvcc from `CUDA_HOME` or `PATH`. If CUDA sources are compiled,
    `WITH_CUDA` is defined in the C++ sources. The library is replaced atomically.

    Args:
        sources: C++ files (.cc, .cpp, .cxx), at least one, and CUDA files (.cu).
        output: the library. Default: `lib` and the first source's name, beside that source.
        cuda: True requires the CUDA files, False skips them, None builds them if nvcc is installed.
        architectures: nvcc's `-arch`: `"all-major"`, `"native"`, `"sm_90"`.
        timeout_s: limit in seconds for each compiler call.

    Returns:
        The library's path.

    Raises:
        InputError: a source is missing, has another suffix, or does not compile.
        MachineError: a compiler is missing, or takes too long.

    Example:
        build_kernel(["bias_gelu.cc", "bias_gelu.cu"])  # libbias_gelu.so

    Source: https://www.tensorflow.org/guide/create_op
    """
    cpp, cu = _sorted(sources)
    home = os.environ.get("CUDA_HOME")
    nvcc = None if cuda is False or not cu else shutil.which("nvcc", path=f"{home}/bin" if home else None)
    if cuda and not cu:
        raise InputError(f"`cuda` needs a source that ends in {_CUDA}. Received: {', '.join(map(str, cpp))}.")
    if cuda and nvcc is None:
        raise MachineError("nvcc was not found. Set CUDA_HOME to the CUDA toolkit's folder, or omit `cuda`.")
    library = Path(output) if output is not None else cpp[0].with_name(f"lib{cpp[0].stem}.so")
    compiler = os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise MachineError(f"The C++ compiler {compiler!r} was not found. Install g++, or set CXX.")
    if not library.parent.is_dir():
        raise InputError(f"There is no folder {library.parent} for the library. Create it, or give another `output`.")
    flags = [*tf.sysconfig.get_compile_flags(), "-O3", "-fPIC", "-w"]  # TensorFlow's headers cause many warnings
    with tempfile.TemporaryDirectory(prefix="tfgpu-kernel-") as folder:
        mark, objects = Path(folder, "mark.cc"), []
        mark.write_text(f'extern "C" __attribute__((used)) const char tfgpu_mark[] = "{MARK}{tf.version.VERSION};";\n')
        if nvcc is not None:
            flags.append("-DWITH_CUDA")
            for source in cu:
                objects.append(f"{folder}/{source.stem}.o")
                command = [nvcc, "-c", "-O3", "--std=c++17", "-Xcompiler", "-fPIC", f"-arch={architectures}"]
                _call([*command, str(source), "-o", objects[-1]], source, timeout_s)
        with atomic.replacing(library) as aside:
            command = [compiler, *flags, "-shared", *map(str, cpp), str(mark), *objects, "-o", str(aside)]
            _call([*command, *_link(nvcc)], cpp[0], timeout_s)
    return library


def built_for(library: str | Path) -> str | None:
    """Returns the TensorFlow version a library was built for, without loading it; None if another tool built it."""
    found = re.search(re.escape(MARK).encode() + rb"([0-9A-Za-z.+-]+);", Path(library).read_bytes())
    return found.group(1).decode() if found else None


def _sorted(sources: Sequence[str | Path]) -> tuple[list[Path], list[Path]]:
    paths = [Path(source) for source in ([sources] if isinstance(sources, (str, Path)) else sources)]
    for path in paths:
        if path.suffix not in (*_CPP, _CUDA):
            raise InputError(f"A source must end in {', '.join(_CPP)} or {_CUDA}. Received: {path}.")
        if not path.is_file():
            raise InputError(f"The source {path} does not exist.")
    cpp, cu = [p for p in paths if p.suffix != _CUDA], [p for p in paths if p.suffix == _CUDA]
    if not cpp:
        raise InputError("`sources` must include a C++ file, which registers the operations. Received: none.")
    return cpp, cu


def _link(nvcc: str | None) -> list[str]:
    """The linker's flags; CUDA's runtime is linked statically, so that the library does not depend on its version."""
    flags = list(tf.sysconfig.get_link_flags())
    if nvcc is None:
        return flags
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", "-"], input="", capture_output=True, text=True, timeout=60)
    folders = re.findall(r'"?-L([^"\s]+)"?', said.stderr)
    flags += [f"-L{folder}" for folder in dict.fromkeys(folders)]
    return [*flags, "-lcudart_static", "-ldl", "-lrt", "-pthread"]


def _call(command: list[str], of: Path, timeout_s: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise MachineError(f"{command[0]} took longer than {timeout_s:g} s for {of}. Raise `timeout_s`.") from error
    if done.returncode:
        said = done.stderr.splitlines()
        first = next((at for at, line in enumerate(said) if re.search(r"\berror\b|undefined", line)), 0)
        raise InputError(f"{of} does not compile ({command[0]}):\n" + "\n".join(said[first : first + _LINES]))
