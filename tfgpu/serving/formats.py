"""The export formats. Keras writes them; this module adds checks and missing operations."""

import contextlib
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from tfgpu.errors import InputError

INSTALL = "pip install 'tfgpu[export]'"


@dataclass(frozen=True)
class Format:
    """An export format.

    Args:
        name: the value of `--format`.
        keras_name: its name in Keras.
        suffix: the suffix of its file; `""` for a folder.
        needs: modules required to write it.
        runs_with: the module that runs it.
        lacks: types that it does not support.
    """

    name: str
    keras_name: str
    suffix: str
    needs: tuple[str, ...]
    runs_with: str
    lacks: tuple[str, ...] = ()

    def check_installed(self, *, running: bool) -> None:
        """Raises an `InputError` if a library to write (and run) this format is missing, or does not import here."""
        reasons = {}
        for name in (*self.needs, self.runs_with) if running else self.needs:
            try:
                importlib.import_module(name)
            except Exception as error:  # onnx for a newer ml_dtypes: an AttributeError
                reasons[name] = error
        if reasons:
            said = ", ".join(f"{name} ({error})" for name, error in reasons.items())
            raise InputError(f"The format {self.name!r} needs {said}. Run: {INSTALL}")


FORMATS = MappingProxyType(
    {
        each.name: each
        for each in (
            Format("savedmodel", "tf_saved_model", "", (), "tensorflow"),
            Format("onnx", "onnx", ".onnx", ("onnx", "tf2onnx"), "onnxruntime", ("bfloat16",)),
            Format("litert", "litert", ".tflite", ("ai_edge_litert",), "ai_edge_litert", ("bfloat16", "float16")),
        )
    }
)


def write(model: keras.Model, form: Format, path: Path, signature: Any = None) -> None:
    """Writes a model that is on one device.

    Args:
        model: built and uncompiled.
        form: one of `FORMATS`.
        path: a new file, or a new folder for a SavedModel.
        signature: `keras.InputSpec`s in the structure of the inputs; `None` takes the model's own.

    Raises:
        InputError: the format does not support the model.
    """
    if missing := sorted(computes_in(model) & set(form.lacks)):
        raise InputError(
            f"{form.name} does not support {missing[0]}. Build the model with the dtype policy float32, copy "
            "the weights (`other.set_weights(model.get_weights())`), and export that model."
        )
    options = {} if signature is None else {"input_signature": signature}
    with _without_messages(), _complementary_error_function() if form.name == "onnx" else contextlib.nullcontext():
        try:
            model.export(str(path), format=form.keras_name, verbose=False, **options)
        except Exception as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(
                f"{model.name!r} cannot be exported as {form.name}: {reason} Try another format, or replace the layer."
            ) from error
    if form.name == "onnx":
        _check_operations(path)


def computes_in(model: keras.Model) -> set[str]:
    """The types that a model's layers compute in.

    Example:
        >>> sorted(computes_in(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, dtype="mixed_float16")])))
        ['float16', 'float32']
    """
    found = {model.compute_dtype}
    for layer in getattr(model, "layers", []):
        found |= computes_in(layer)
    return found


def _check_operations(path: Path) -> None:
    """Checks the file: tf2onnx only logs unknown operations, and writes an invalid file."""
    import onnx

    try:
        onnx.checker.check_model(str(path))
    except onnx.checker.ValidationError as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"ONNX lacks an operation of the model: {reason} Try `savedmodel` or `litert`.") from None


@contextlib.contextmanager
def _without_messages() -> Iterator[None]:
    """Logs what Keras would print; its 3.13 prints for LiteRT in spite of `verbose=False`."""
    prints = keras.config.is_interactive_logging_enabled()
    keras.config.disable_interactive_logging()
    try:
        yield
    finally:
        if prints:
            keras.config.enable_interactive_logging()


@contextlib.contextmanager
def _complementary_error_function() -> Iterator[None]:
    """Adds `Erfc` to tf2onnx as one minus `Erf`; Keras's exact GELU uses it."""
    from tf2onnx.handler import tf_op

    @tf_op("Erfc")
    class Complement:
        @classmethod
        def version_9(cls, graph: Any, node: Any, **_: Any) -> None:
            kind = np.dtype({1: "float32", 10: "float16", 11: "float64"}[graph.get_dtype(node.input[0])])
            output, shape = node.output[0], graph.get_shape(node.output[0])
            number = graph.get_dtype(node.input[0])
            error = graph.make_node("Erf", [node.input[0]], shapes=[shape], dtypes=[number])
            one = graph.make_const(f"{node.name}_one", np.array(1, kind)).output[0]
            graph.remove_node(node.name)
            graph.make_node("Sub", [one, error.output[0]], outputs=[output], shapes=[shape], dtypes=[number])

    yield
