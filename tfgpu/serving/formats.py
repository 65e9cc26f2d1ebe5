"""The export formats. Keras writes them; this module adds checks and missing operations.

An export is moved to its path atomically, and replaces nothing but an earlier export. It runs in a process with only
its library: without tfgpu or the model's code.
"""

import contextlib
import importlib
import inspect
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import keras
import numpy as np

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError
from tfgpu.serving.examples import plain

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


_FORMATS = (
    Format("savedmodel", "tf_saved_model", "", (), "tensorflow"),
    Format("onnx", "onnx", ".onnx", ("onnx", "tf2onnx"), "onnxruntime", ("bfloat16",)),
    Format("litert", "litert", ".tflite", ("ai_edge_litert",), "ai_edge_litert", ("bfloat16", "float16")),
)
FORMATS = MappingProxyType({each.name: each for each in _FORMATS})


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
    return {model.compute_dtype}.union(*(computes_in(layer) for layer in getattr(model, "layers", [])))


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
            number, output = graph.get_dtype(node.input[0]), node.output[0]
            kind, shape = {1: "float32", 10: "float16", 11: "float64"}[number], graph.get_shape(output)
            error = graph.make_node("Erf", [node.input[0]], shapes=[shape], dtypes=[number])
            one = graph.make_const(f"{node.name}_one", np.array(1, kind)).output[0]
            graph.remove_node(node.name)
            graph.make_node("Sub", [one, error.output[0]], outputs=[output], shapes=[shape], dtypes=[number])

    yield


_OF_SAVED_MODEL = ("assets", "assets.extra", "fingerprint.pb", "saved_model.pb", "saved_model.pbtxt", "variables")


def check_path(path: Path, form: Format, *, overwrite: bool) -> None:
    """Checks that nothing would be lost and the path can be written.

    Args:
        path: the output path.
        form: its format.
        overwrite: whether an earlier export may be replaced.

    Raises:
        InputError: the path contains something else, or one of its parents is a file.
    """
    if path.is_symlink() or path.exists():
        if not overwrite:
            raise InputError(f"{path} exists. Choose another path, or use overwrite=True (--overwrite).")
        if other := _other(path, form):
            raise InputError(f"{path} {other}, and is not replaced. Choose another path, or remove it yourself.")
    nearest = next(folder for folder in path.absolute().parents if folder.exists())
    if not nearest.is_dir():
        raise InputError(f"{nearest} is a file, not a folder. Choose another path than {path}.")


def _other(path: Path, form: Format) -> str:
    """Why the path is not an export of this format; empty if it is one."""
    if path.is_symlink():
        return f"is a link to {os.readlink(path)}"
    if form.suffix:
        return "" if path.is_file() else "is not a file"
    if not (path / "saved_model.pb").is_file():
        return "is not an exported model"
    more = sorted({each.name for each in path.iterdir()} - set(_OF_SAVED_MODEL))
    return f"contains more than an exported model ({', '.join(more[:4])})" if more else ""


def put(made: Path, path: Path) -> None:
    """Moves a file or folder to a path, replacing it atomically.

    Args:
        made: a file or folder, on any disk.
        path: the target, accepted by `check_path`.

    Raises:
        MachineError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic.replacing(path) as aside:
            shutil.move(made, aside)
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error}. Free disk space, or choose another path.") from error


TIMEOUT_S = 180
_BEGIN = """
import sys
import numpy as np
path, given, made, *names = sys.argv[1:]
with np.load(given) as file:
    inputs = {name: file[at] for name, at in zip(names, file.files, strict=True)}
def last_number(name):
    digits = "".join(c if c.isdigit() else " " for c in name).split()
    return int(digits[-1]) if digits else 0
"""
_RUNS = {
    "savedmodel": """
import tensorflow as tf
model = tf.saved_model.load(path)
answer = model.signatures["serving_default"](**{name: tf.constant(value) for name, value in inputs.items()})
is_numbered = all(name.startswith("output_") and name[7:].isdigit() for name in answer)
outputs = [answer[name].numpy() for name in sorted(answer, key=last_number if is_numbered else None)]
""",
    "onnx": """
import onnxruntime
session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
texts = {place.name for place in session.get_inputs() if place.type == "tensor(string)"}
given = {n: np.char.decode(v, "utf-8").astype(object) if n in texts else v for n, v in inputs.items()}
outputs = session.run(None, given)
""",
    "litert": """
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter(path)
places = interpreter.get_input_details()
by_name = {place["name"].removeprefix("serving_default_").rpartition(":")[0]: place for place in places}
if set(by_name) != set(inputs):
    by_name = dict(zip(inputs, places, strict=True))
for name, value in inputs.items():
    interpreter.resize_tensor_input(by_name[name]["index"], value.shape)
interpreter.allocate_tensors()
for name, value in inputs.items():
    interpreter.set_tensor(by_name[name]["index"], value.astype(by_name[name]["dtype"]))
interpreter.invoke()
details = sorted(interpreter.get_output_details(), key=lambda place: last_number(place["name"]))
outputs = [interpreter.get_tensor(place["index"]) for place in details]
""",
}
_END = "\nnp.savez(made, *map(plain, outputs))\n"


def run(path: str | os.PathLike[str], inputs: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Runs an exported model once on the CPU, in a separate process.

    Args:
        path: the folder of a SavedModel, or an `.onnx` or `.tflite` file.
        inputs: arrays `[rows, ...]` by the inputs' names; texts as `str` or `bytes`.

    Returns:
        The outputs in the model's order: that of its list, or of the sorted names; texts as bytes.

    Raises:
        InputError: the file does not exist, or its library is not installed.
        MachineError: the library rejects the file or the inputs; the message quotes its error.

    Example:
        >>> import keras, numpy as np
        >>> from tfgpu import serving
        >>> model = keras.Sequential([keras.Input((2,), name="x"), keras.layers.Dense(1, kernel_initializer="ones")])
        >>> made = serving.export(model, "summed", format="litert", check=False)
        >>> serving.run(made.path, {"x": np.array([[1, 2]], "float32")})[0].tolist()
        [[3.0]]
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{str(path)!r} does not exist. Give a model written by `tfgpu export`.")
    form = format_of(path)
    form.check_installed(running=True)
    with tempfile.TemporaryDirectory() as folder:
        given, made = Path(folder, "given.npz"), Path(folder, "made.npz")
        np.savez(given, *map(plain, inputs.values()))
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
        code = _BEGIN + inspect.getsource(plain) + _RUNS[form.name] + _END
        command = [sys.executable, "-c", code, str(path), str(given), str(made), *inputs]
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise MachineError(f"{path} did not finish within {TIMEOUT_S} s. Try it with fewer rows.") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise MachineError(f"{form.runs_with} cannot run {path}: {last}")
        with np.load(made) as file:
            return [file[name] for name in file.files]


def format_of(path: Path) -> Format:
    """The format of a path, by its name.

    Example:
        >>> format_of(Path("model.onnx")).name
        'onnx'
    """
    if path.is_dir():
        return FORMATS["savedmodel"]
    for form in FORMATS.values():
        if form.suffix and path.suffix == form.suffix:
            return form
    endings = ", ".join(form.suffix for form in FORMATS.values() if form.suffix)
    raise InputError(f"{str(path)!r} is not an exported model. Give a SavedModel's folder, or a file: {endings}.")
