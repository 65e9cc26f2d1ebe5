"""What must be the same on all workers when `fit` begins, as plain text by name.

A callback must be the same if it acts on the training: Keras's own that stop it, change its learning rate or its
weights (`ACTING`), and those of tfgpu that say so (`on_all_workers`). Others may differ, because they write, or are the
user's own: they are named, and what they change is found where the replicas are compared.
"""

import hashlib
import json
import types

import keras
import numpy as np
import tensorflow as tf

from tfgpu.core import step_blocks

ACTING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.SwapEMAWeights,
    keras.callbacks.TerminateOnNaN,
)
_ARGUMENTS = {
    "batch_size": None,
    "epochs": 1,
    "initial_epoch": 0,
    "steps_per_epoch": None,
    "validation_split": 0.0,
    "validation_steps": None,
    "validation_batch_size": None,
    "validation_freq": 1,
    "shuffle": True,
    "class_weight": None,
}
"""Arguments of `fit` and their defaults."""
_PRESENT = ("validation_data", "sample_weight")  # arguments of `fit` that all workers give, or none
_NAMES = ("name", "shared_object_id", "registered_name", "build_config", "verbose")
_PLAIN = (bool, int, float, str, type(None))
_DIGITS = 12


def of_arguments(run: step_blocks.Run) -> dict[str, str]:
    """The arguments of `fit`."""
    given = run.arguments
    found = {name: given.get(name, default) for name, default in _ARGUMENTS.items()}
    found |= {name: "given" if given.get(name) is not None else None for name in _PRESENT}
    return flat(found)


def of_compile(model: keras.Model) -> dict[str, str]:
    """The arguments of `compile`."""
    try:
        found = model.get_compile_config() or {}
    except Exception:  # of a loss or metric that cannot be written
        found = {"optimizer": model.optimizer, "loss": model.loss}
    found |= {"steps_per_execution": model.steps_per_execution, "run_eagerly": model.run_eagerly}
    return flat(found)


def of_callbacks(run: step_blocks.Run, *, acting: bool) -> dict[str, str]:
    """The callbacks that act on the training with their settings, or the names of the others."""
    found: dict[str, object] = {}
    for callback in step_blocks.listed(run.arguments.get("callbacks")):
        is_stock = isinstance(callback, ACTING)
        if (is_stock or getattr(callback, "on_all_workers", False)) != acting:
            continue
        name, at = type(callback).__name__, 2
        while name in found:
            name, at = f"{type(callback).__name__} {at}", at + 1
        found[name] = "yes"
        if is_stock:
            found |= {f"{name}.{key}": value for key, value in _settings(callback).items()}
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in found.items()}


def of_model(model: keras.Model) -> dict[str, str]:
    """Shapes, dtypes and trainability of the weights that exist, without their names, which counters give."""
    found = [f"{tuple(v.shape)} {v.dtype}{'' if v.trainable else ', not trained'}" for v in model.weights]
    return {f"variable {at:04d}": each for at, each in enumerate(found)}


def of_blocks(run: step_blocks.Run, block: object) -> dict[str, str]:
    """How many steps run before something must be done."""
    found = {"first block": getattr(block, "count", None), "steps per call": run.steps}
    return flat(found | {f"limit {at}": most() for at, most in enumerate(run.ends)})


def of_batch(batch: object) -> dict[str, str]:
    """Shapes, dtypes and digests of a batch's tensors; those of the inputs begin with "inputs"."""
    parts = batch if isinstance(batch, tuple) else (batch,)
    names = ("inputs", "labels", "weights")
    found = {}
    for part, name in zip(parts, names, strict=False):
        tensors = [t for t in tf.nest.flatten(part, expand_composites=True) if t is not None]
        for at, tensor in enumerate(tensors):
            array = np.asarray(tensor)
            found[f"{name} {at}" if len(tensors) > 1 else name] = f"{array.dtype} {array.shape} {_hash(array)}"
    return found


def flat(value: object, path: str = "") -> dict[str, str]:
    """A nested value as text by path.

    Example:
        >>> flat({"optimizer": {"rate": 0.1, "name": "sgd"}, "loss": ["mse"]})
        {'optimizer.rate': '0.1', 'loss.0': '"mse"'}
    """
    value = _plain(value)
    if isinstance(value, dict):
        items = [(key, each) for key, each in value.items() if key not in _NAMES]
    elif isinstance(value, list):
        items = list(enumerate(value))
    else:
        return {path: json.dumps(value)}
    found = {}
    for key, each in items:
        found |= flat(each, f"{path}.{key}" if path else str(key))
    return found


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, dict):
        return {str(key): each for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, (np.ndarray, tf.Tensor, tf.Variable, keras.Variable)):
        return _hash(np.asarray(value))
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    config = getattr(value, "get_config", None)
    if callable(config) and not isinstance(value, type):
        return {"class": type(value).__name__, "config": config()}
    return getattr(value, "__qualname__", type(value).__name__)


def _settings(callback: keras.callbacks.Callback) -> dict[str, object]:
    """The attributes of a callback that are plain values or functions, but for files and what it prints."""
    found = {}
    for key, value in vars(callback).items():
        is_file = any(word in key for word in ("dir", "path", "file"))
        if key in _NAMES or is_file or not isinstance(value, (*_PLAIN, np.generic, types.FunctionType)):
            continue
        found[key.lstrip("_")] = _plain(value)
    return found


def _of_function(function: types.FunctionType) -> str:
    code = function.__code__
    constants = [each for each in code.co_consts if isinstance(each, _PLAIN)]
    content = code.co_code + repr((constants, code.co_names)).encode()
    return f"{function.__qualname__} {hashlib.sha256(content).hexdigest()[:_DIGITS]}"


def _hash(array: np.ndarray) -> str:
    """A digest of an array's bytes; of texts, of the texts."""
    if array.dtype.kind == "O":
        content = b"".join(len(each).to_bytes(8, "little") + each for each in array.reshape(-1).tolist())
    else:
        content = np.ascontiguousarray(array).tobytes()
    return hashlib.sha256(content).hexdigest()[:_DIGITS]
