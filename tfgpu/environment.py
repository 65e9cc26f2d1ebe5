"""What this process may use: devices, GPU memory, logical devices, seeds. Public `tf.config` only.

TensorFlow fixes these when it starts its devices, which the first operation, variable or strategy does.
A setter that comes later raises a `MachineError` instead of having no effect. Nothing here starts them.

Example:
    >>> set_logical_devices(4)          # at the top of a script, before any other TensorFlow call
    >>> [device.name for device in devices("CPU")]
    ['CPU:0', 'CPU:1', 'CPU:2', 'CPU:3']
"""

import numbers
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.errors import InputError, MachineError, unknown, whole_number

KINDS = ("CPU", "GPU")
OWN = 0
"""The number of the process that runs the script, where several are connected."""
_MIB = 2**20
_NAME = re.compile(r"(?:([0-9]+)/)?(?:/?device:|/)?(cpu|gpu):([0-9]+)", re.IGNORECASE)


@dataclass(frozen=True)
class Device:
    """One logical device, as TensorFlow will see it once it has started.

    Args:
        name: `"GPU:0"`; strategies and `tf.device` take it. Strategies alone take `"1/GPU:0"`, of process 1 of several.
        kind: `"CPU"` or `"GPU"`.
        physical: the physical device that it is a part of, such as `"GPU:0"`.
        description: the maker's name, such as `"NVIDIA H100"`; `""` where TensorFlow does not know it.
        compute_capability: of an NVIDIA GPU, such as `(9, 0)`; `None` otherwise.
        memory_limit_bytes: the limit that was set for it; `None` without a limit.
    """

    name: str
    kind: str
    physical: str
    description: str = ""
    compute_capability: tuple[int, int] | None = None
    memory_limit_bytes: int | None = None


def devices(kind: str | None = None) -> tuple[Device, ...]:
    """Lists the visible logical devices without starting TensorFlow's devices.

    `tf.config.list_logical_devices` gives the same names but starts them, after which no setter works.

    Args:
        kind: `"CPU"` or `"GPU"`; `None` lists both, CPUs first.

    Returns:
        The devices in TensorFlow's order.

    Example:
        print([device.name for device in tfgpu.environment.devices("GPU")])
    """
    return tuple(device for name in _kinds(kind) for device in _logical(name))


def accelerators() -> tuple[Device, ...]:
    """Lists the devices that train here: the GPUs, or the logical CPU devices without a GPU."""
    return devices("GPU") or devices("CPU")


def everywhere(connected: Sequence[str] = ()) -> tuple[Device, ...]:
    """Lists the devices that train in all connected processes; without any, `accelerators()`.

    Args:
        connected: the names of all devices of the processes that `parallel.connect` has connected.
    """
    found = _of_processes(connected)
    return tuple(device for device in found if device.kind == "GPU") or found or accelerators()


def select(chosen: int | str | Iterable[str], connected: Sequence[str] = ()) -> tuple[Device, ...]:
    """Finds the devices that someone asked for, by number or by name.

    Args:
        chosen: how many of `everywhere(connected)`, from the first; or names such as `["GPU:0", "/cpu:1", "1/GPU:0"]`.
        connected: as for `everywhere`.

    Returns:
        The devices, in the order asked for.

    Raises:
        InputError: more devices than exist, a name that does not exist or is not one, or one named twice.
    """
    if isinstance(chosen, numbers.Number):
        chosen = whole_number("devices", chosen)
        found = everywhere(connected)
        if chosen > len(found):
            raise _missing(chosen, found)
        return found[:chosen]
    by_name = {f"{OWN}/{device.name}": device for device in devices()}
    by_name |= {device.name: device for device in _of_processes(connected)}
    names = [_normal(name) for name in ([chosen] if isinstance(chosen, str) else chosen)]
    for name in names:
        if name not in by_name:
            raise _no_process(name, connected) or _missing(name.removeprefix(f"{OWN}/"), tuple(by_name.values()))
    if not names or len(set(names)) != len(names):
        raise InputError(f"`devices` must name one or more devices, each once. Received: {names}.")
    return tuple(by_name[name] for name in names)


def is_initialized() -> bool:
    """Tells whether TensorFlow has started its devices, after which the setters here come too late."""
    # TensorFlow has no public question for this. It refuses a changed thread count once they have started;
    # where it takes one, the old count is put back at once, and nothing has read it.
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return False


def set_visible_devices(chosen: int | Iterable[int], *, kind: str = "GPU") -> None:
    """Hides all physical devices of a kind except the chosen ones; the memory of hidden devices stays free.

    Args:
        chosen: how many, from the first; or the indices of the physical devices, such as `[0, 2]`.
            0 or `[]` hides them all.
        kind: `"GPU"` or `"CPU"`.

    Raises:
        InputError: an index that does not exist, or is listed twice.
        MachineError: TensorFlow has started its devices.

    Example:
        >>> set_visible_devices(0)      # train on the CPU although there is a GPU
    """
    (kind,) = _kinds(kind)
    found = tf.config.list_physical_devices(kind)
    if isinstance(chosen, numbers.Number):
        chosen = range(whole_number("chosen", chosen, minimum=0))
    indices = list(chosen)
    if not set(indices) <= set(range(len(found))) or len(set(indices)) != len(indices):
        raise InputError(
            f"`chosen` must name existing {kind}s, each once. Received: {indices}; "
            f"this machine has {len(found)} {kind}(s), counted from 0."
        )
    with _in_time("set_visible_devices"):
        tf.config.set_visible_devices([found[index] for index in indices], kind)


def set_memory_growth(enabled: bool = True) -> None:
    """Lets every visible GPU take memory as it is needed, instead of nearly all of it at the start.

    Args:
        enabled: False goes back to TensorFlow's default, all of it at once.

    Raises:
        InputError: a GPU has a memory limit or logical devices, which exclude growth.
        MachineError: no GPU is visible, or TensorFlow has started its devices.

    Example:
        tfgpu.environment.set_memory_growth()  # at the top of a script

    Source: https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth
    """
    for gpu in _visible_gpus("set_memory_growth"):
        with _in_time("set_memory_growth"):
            tf.config.experimental.set_memory_growth(gpu, enabled)


def set_memory_limit(memory_bytes: int) -> None:
    """Limits the memory that TensorFlow takes on every visible GPU.

    Args:
        memory_bytes: bytes per GPU, at least 1 MiB. TensorFlow counts in MiB, so this rounds down to one.

    Raises:
        InputError: too small a limit, or memory growth is on, which excludes a limit.
        MachineError: no GPU is visible, or TensorFlow has started its devices.

    Example:
        tfgpu.environment.set_memory_limit(4 * 2**30)  # at the top of a script

    Source: https://www.tensorflow.org/guide/gpu#limiting_gpu_memory_growth
    """
    limit = _mebibytes(memory_bytes)
    for gpu in _visible_gpus("set_memory_limit"):
        with _in_time("set_memory_limit"):
            tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(limit)])


def set_logical_devices(count: int, kind: str = "CPU", *, memory_bytes: int | None = None) -> None:
    """Splits the first visible device of a kind into several, to try a strategy without the hardware.

    Logical CPU devices share the cores: they show the result, not the speed.

    Args:
        count: how many logical devices, at least 1.
        kind: `"CPU"` or `"GPU"`.
        memory_bytes: memory of each, for GPUs only and needed there when `count` is above 1.

    Raises:
        InputError: a wrong count, or `memory_bytes` for a CPU or left out for several on a GPU.
        MachineError: no such device is visible, or TensorFlow has started its devices.

    Example:
        >>> set_logical_devices(4)
    """
    (kind,) = _kinds(kind)
    whole_number("count", count, minimum=1)
    if kind == "CPU" and memory_bytes is not None:
        raise InputError("`memory_bytes` applies to GPUs; TensorFlow cannot limit a CPU's memory. Remove it.")
    if kind == "GPU" and count > 1 and memory_bytes is None:
        raise InputError("Several logical devices on one GPU need `memory_bytes`, the memory of each. Give it.")
    limit = None if memory_bytes is None else _mebibytes(memory_bytes)
    physical = tf.config.get_visible_devices(kind)
    if not physical:
        raise MachineError(f"set_logical_devices found no visible {kind} to split. Use kind='CPU'.")
    with _in_time("set_logical_devices"):
        parts = [tf.config.LogicalDeviceConfiguration(limit) for _ in range(count)]
        tf.config.set_logical_device_configuration(physical[0], parts)


def set_seed(seed: int, deterministic: bool = True) -> None:
    """Seeds Python, NumPy, TensorFlow and Keras, and asks for operations that repeat bit for bit.

    Works at any time, but only affects what is drawn afterward. Determinism costs speed: some GPU kernels
    are slower, and tf.data runs random functions one by one. It cannot be turned off again in a process.

    Args:
        seed: from 0 to 2**32 - 1.
        deterministic: False leaves TensorFlow's choice of kernels alone.

    Raises:
        InputError: a seed out of range.

    Example:
        tfgpu.environment.set_seed(1)

    Source: https://www.tensorflow.org/api_docs/python/tf/config/experimental/enable_op_determinism
    """
    whole_number("seed", seed, minimum=0)
    if seed >= 2**32:
        raise InputError(f"`seed` must be below 2**32. Received: seed={seed}.")
    keras.utils.set_random_seed(seed)
    if deterministic:
        tf.config.experimental.enable_op_determinism()


def _logical(kind: str) -> Iterator[Device]:
    index = 0
    for physical in tf.config.get_visible_devices(kind):
        details = tf.config.experimental.get_device_details(physical)
        for part in tf.config.get_logical_device_configuration(physical) or [None]:
            limit = part.memory_limit if part else None
            yield Device(
                name=f"{kind}:{index}",
                kind=kind,
                physical=physical.name.removeprefix("/physical_device:"),
                description=details.get("device_name", ""),
                compute_capability=details.get("compute_capability"),
                memory_limit_bytes=None if limit is None else int(limit * _MIB),
            )
            index += 1


def _of_processes(names: Sequence[str]) -> tuple[Device, ...]:
    return tuple(Device(name, name.rpartition("/")[2].partition(":")[0], name) for name in names)


def _normal(name: object) -> str:
    match = _NAME.fullmatch(name.strip()) if isinstance(name, str) else None
    if not match:
        raise InputError(f"A device's name must look like 'GPU:0' or 'CPU:1'. Received: {name!r}.")
    return f"{int(match[1] or OWN)}/{match[2].upper()}:{int(match[3])}"


def _no_process(name: str, connected: Sequence[str]) -> InputError | None:
    """The error for a name of a process that is not there."""
    number, numbers = int(name.partition("/")[0]), sorted({int(each.partition("/")[0]) for each in connected})
    if number in numbers or number == OWN:
        return None
    return InputError(
        f"There is no process {number} for the device {name!r}. Found: {f'0 to {numbers[-1]}' if numbers else 'one'}. "
        f"Start {number + 1} (`tfgpu launch -n {number + 1} script.py`), and call `tfgpu.parallel.connect()` at the "
        "top of the script."
    )


def _missing(asked: int | str, found: tuple[Device, ...]) -> InputError:
    is_name = isinstance(asked, str)
    wrong = f"There is no device {asked!r}" if is_name else f"There are fewer devices than devices={asked}"
    return InputError(
        f"{wrong}. Found: {', '.join(device.name for device in found)}. Use these, or run `tfgpu doctor` if a GPU is "
        "missing. To try several devices on CPUs, use `--virtual-devices N`, or "
        "`tfgpu.environment.set_logical_devices(N)` at the top of the script."
    )


def _kinds(kind: str | None) -> tuple[str, ...]:
    if kind is None:
        return KINDS
    if kind not in KINDS:
        raise unknown("device kind", kind, KINDS)
    return (kind,)


def _visible_gpus(setter: str) -> list[tf.config.PhysicalDevice]:
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        raise MachineError(
            f"{setter} found no GPU that TensorFlow can use. Without GPUs, remove this call; else run `tfgpu doctor`."
        )
    return gpus


def _mebibytes(memory_bytes: int) -> int:
    whole_number("memory_bytes", memory_bytes, minimum=_MIB)
    return memory_bytes // _MIB


@contextmanager
def _in_time(setter: str) -> Iterator[None]:
    """Turns TensorFlow's two refusals (too late; settings that exclude each other) into ours."""
    try:
        yield
    except RuntimeError as error:
        raise MachineError(
            f"{setter} comes too late: TensorFlow has started its devices in this process. Call it before "
            f"the first strategy, model or tensor; in a notebook, restart the kernel first. ({error})"
        ) from None
    except ValueError as error:
        raise InputError(f"{setter} conflicts with an earlier setting: {error}. Use one of them.") from None
