"""Tests whether an optimizer works element by element, by training a small variable with it whole and in two pieces."""

import threading
from collections.abc import Callable

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat.keras import MultiOptimizer


def why_not_elementwise(optimizer) -> str:
    """Why an optimizer cannot work on pieces of variables; an empty string where it can."""
    if isinstance(optimizer, MultiOptimizer):
        return "it divides the variables among several optimizers, which know nothing of pieces."
    found: dict = {}

    def run():  # in a thread of its own: without a strategy, a graph or Keras's scopes
        try:
            found["differs"] = _differs(type(optimizer), optimizer.get_config())
        except Exception as error:  # whatever a user's class raises
            found["error"] = f"{type(error).__name__}: {error}"

    thread = threading.Thread(target=run, name="tfgpu-try-optimizer")
    thread.start()
    thread.join()
    if "error" in found:
        return f"a trial on a small variable, with `from_config(get_config())`, failed with {found['error']}."
    if found["differs"]:
        return "its update of a number depends on other numbers of the variable, or on the variable's shape."
    return ""


def _differs(cls: type, config: dict) -> bool:
    """Whether two flat pieces of a variable, each by itself, are updated otherwise than the whole."""
    config = config | {"learning_rate": 0.01}
    config |= dict.fromkeys(("clipnorm", "global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor"))
    draw = np.random.default_rng(0)
    value, steps = draw.normal(size=(4, 6)).astype("float32"), draw.normal(size=(3, 4, 6)).astype("float32")

    def trained(piece_of: Callable) -> np.ndarray:
        variable, optimizer = keras.Variable(piece_of(value), name="kernel"), cls.from_config(dict(config))
        for gradient in steps:
            optimizer.apply([tf.constant(piece_of(gradient))], [variable])
        return variable.numpy().reshape(-1)

    pieces = [trained(lambda array, at=at: np.split(array.reshape(-1), 2)[at]) for at in range(2)]
    return not np.allclose(trained(lambda array: array), np.concatenate(pieces), rtol=1e-5, atol=1e-6)
