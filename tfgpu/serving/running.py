"""Runs an exported model in a process with only its library: without tfgpu or the model's code."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from tfgpu.errors import InputError, MachineError
from tfgpu.serving.examples import plain
from tfgpu.serving.formats import FORMATS, Format

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
_END = """
def plain(values):
    values = np.asarray(values)
    if values.dtype.kind not in "OU":
        return values
    texts = [text if isinstance(text, bytes) else str(text).encode() for text in values.ravel()]
    return np.array(texts, bytes).reshape(values.shape)
np.savez(made, *map(plain, outputs))
"""


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
        command = [sys.executable, "-c", _BEGIN + _RUNS[form.name] + _END, str(path), str(given), str(made), *inputs]
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
