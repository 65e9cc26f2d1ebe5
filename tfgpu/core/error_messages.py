"""Replaces TensorFlow's errors where tfgpu knows the cause: memory, labels, tokens, and data that tfgpu reads."""

import contextlib
import logging
import math
import re
from pathlib import Path

import tensorflow as tf

from tfgpu import errors
from tfgpu.compat import slots
from tfgpu.core import extensions
from tfgpu.errors import InputError, MachineError, OutOfMemory

_log = logging.getLogger(__name__)
_TENSOR = re.compile(r"allocating tensor with shape\s*\[([\d,]*)\] and type (\w+)(?: on \S*device:(\w+:\d+))?")
_BYTES = re.compile(r"allocate (\d+) bytes")
_FIX = (
    "To use less memory: a smaller batch (with the optimizer's `gradient_accumulation_steps` the update stays the "
    'same); 16-bit activations (`keras.mixed_precision.set_global_policy("mixed_bfloat16")` before the model is '
    "built); recomputed activations (`recompute=True` of tfgpu's builders, `tfgpu.models.Recompute` for your own "
    "blocks)."
)
_NAMES = {"float": "float32", "double": "float64"}
_OURS = re.compile(r"(InputError|MachineError): ([^\n]+)\nTraceback")  # tf.data passes on what its Python code raises
_SECOND = re.compile(r"^ *\(1\) [A-Z_]+: ", re.MULTILINE)  # where several replicas fail, each has its own trace
_FILE = re.compile(r'^ *File "([^"]+)", line', re.MULTILINE)
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
_INDEX = re.compile(r"indices\[[\d,]*\] = (-?\d+) is not in \[0, (\d+)\)")
_KINDS = {"InputError": InputError, "MachineError": MachineError}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@contextlib.contextmanager
def explained(model):
    """Raises tfgpu's errors in place of TensorFlow's inside `fit`, `evaluate` or `predict`."""
    try:
        yield
    except tf.errors.OpError as error:
        for explain in extensions.error_explanations:
            if (explained_error := explain(error, model)) is not None:
                _log.debug("TensorFlow's own error.", exc_info=True)
                raise explained_error from None
        found = _explanation(error, model)
        if found is None:
            raise
        raise found from error


def _explanation(error: tf.errors.OpError, model) -> Exception | None:
    if isinstance(error, tf.errors.UnknownError | tf.errors.InvalidArgumentError):
        found = _OURS.search(error.message)
        if found is not None:
            return _KINDS[found[1]](found[2]) if _is_ours(error.message) else None
        return _out_of_range(error.message)
    # A disk may be full, too.
    if isinstance(error, tf.errors.ResourceExhaustedError) and re.search(r"OOM|memory|allocat", error.message):
        return OutOfMemory(f"Out of memory{_asked(error.message)}. {_sizes(model)}", _FIX)
    return None


def _out_of_range(message: str) -> InputError | None:
    """What to do about a label or a token that is larger than the model has outputs or embeddings."""
    if found := _LABEL.search(message):
        return InputError(
            f"A label is {found[1]}, but the loss takes 0 to {int(found[2]) - 1}: the model's last layer has "
            f"{found[2]} outputs. Give it one output per class, or number the classes from 0."
        )
    if found := _INDEX.search(message):
        return InputError(
            f"An index is {found[1]}, but the table in which it is looked up has {found[2]} rows, numbered from 0. The "
            "`input_dim` of an `Embedding` must be larger than every token; other indices must be within their table."
        )
    return None


def _is_ours(message: str) -> bool:
    """Whether tfgpu raised the error, not a class of the same name elsewhere."""
    files = _FILE.findall(_SECOND.split(message)[0])
    return bool(files) and Path(files[-1]).is_relative_to(Path(errors.__file__).parent)


def _asked(message: str) -> str:
    found = _TENSOR.search(message)
    if found is not None:
        numbers, name, device = found.groups()
        shape = [int(number) for number in numbers.split(",") if number]
        told = f" ({in_units(math.prod(shape) * tf.as_dtype(_NAMES.get(name, name)).size)})"
        return f" for a tensor of shape {shape}, {name}{told}" + (f", on {device}" if device else "")
    found = _BYTES.search(message)
    return f" for {in_units(int(found[1]))}" if found else ""


def _sizes(model) -> str:
    parts = [f"The model's variables take {in_units(_size(model.variables))}"]
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        parts.append(f"the optimizer's {in_units(_size(optimizer.variables))}")
    told = " and ".join(parts) + " on each replica"
    data = slots.get(model, "training_data")
    rows = getattr(getattr(data, "data_adapter", None), "batch_size", None)
    if rows:
        told += f"; a batch has {rows} rows over {model.distribute_strategy.num_replicas_in_sync} replica(s)"
    return told + "; the rest are activations."


def _size(variables) -> int:
    return sum(math.prod(v.shape) * tf.as_dtype(v.dtype).size for v in variables)


def in_units(size: int) -> str:
    """A number of bytes with a unit.

    Example:
        >>> in_units(3 << 19), in_units(12)
        ('1.5 MiB', '12 bytes')
    """
    power = min(max(size.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{size / 1024**power:.3g} {_UNITS[power]}" if power else f"{size} bytes"
