"""Tests which faults this version of Keras and TensorFlow has: `python -m tfgpu.repairs.probing [NAME ...]`.

Prints one JSON object, `{"name of the repair": true, ...}`; null if a probe gave no answer. Each probe runs stock
Keras in its own process, without active repairs: some faults end the process, and a tf.data iterator may hang at its
end.
"""

import json
import multiprocessing
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import tensorflow as private

if TYPE_CHECKING:
    from tfgpu.repairs import Repair

TIMEOUT_S = 60.0
"""Seconds within which a probe must answer; most take one."""

X = np.array([[1.0, 2.0], [3.0, -1.0], [0.5, 4.0]], "float32")
Y = np.array([[1.0], [0.0], [2.0]], "float32")


def ask(repairs: "Sequence[Repair]", *, timeout_s: float = TIMEOUT_S, at_once: int = 2) -> dict[str, bool | None]:
    """Runs probes, each in a fork of this process, which must not have used a device yet.

    Args:
        repairs: whose probes to run.
        timeout_s: for each probe, in seconds.
        at_once: how many run in parallel.

    Returns:
        Whether each fault exists, by the repair's name; None if its probe died or took too long.
    """
    waiting = list(repairs)
    found: dict[str, bool | None] = {repair.name: None for repair in waiting}
    fork, running = multiprocessing.get_context("fork"), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            repair = waiting.pop(0)
            here, there = fork.Pipe(duplex=False)
            process = fork.Process(target=_answer, args=(repair.probe, there), daemon=True)
            process.start()
            there.close()
            running[repair.name] = process, here
        name, (process, here) = next(iter(running.items()))
        try:
            found[name] = here.recv() if here.poll(timeout_s) else None
        except EOFError:  # the probe's process died
            pass
        process.kill()
        process.join()
        del running[name]
    return found


def _answer(probe, there: Connection) -> None:
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
    there.send(bool(probe()))
    there.close()


def ask_in_new_process(name: str) -> bool | None:
    """Runs one probe in a new process, whatever the state of this one; None if there is no answer."""
    environment = {**os.environ, "TFGPU_REPAIR": "0", "CUDA_VISIBLE_DEVICES": "-1"}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, "-m", "tfgpu.repairs.probing", name]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=2 * TIMEOUT_S)
        return json.loads(done.stdout.splitlines()[-1])[name]
    except (subprocess.TimeoutExpired, IndexError, ValueError, KeyError):
        return None


def mirrored() -> tf.distribute.Strategy:
    """Two replicas on two logical CPU devices."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def differs(
    *, rows=3, loss="mse", weights=None, layer=None, optimizer=None, steps=1, is_built=True, model_class=None
) -> bool:
    """Whether two replicas learn other weights than one device in an epoch of one batch, or crash."""

    def train(strategy: tf.distribute.Strategy) -> list[np.ndarray]:
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.layers.Dense(2)] + ([layer()] if layer else []) + [keras.layers.Dense(1)]
            layers = ([keras.Input((2,))] if is_built else []) + layers
            model = keras.Sequential(layers) if model_class is None else model_class()
            model.compile(keras.optimizers.SGD(0.1, **(optimizer or {})), loss, steps_per_execution=steps)
        data = [a[:rows] for a in (X, Y)]
        model.fit(*data, sample_weight=weights, batch_size=rows, epochs=2, shuffle=False, verbose=0)
        return model.get_weights()

    alone = train(tf.distribute.get_strategy())
    try:
        spread = train(mirrored())
    except Exception:
        return True
    return max(float(np.abs(a - b).max()) for a, b in zip(alone, spread, strict=True)) > 1e-5


def fails(call: Callable[[], object], errors: type[Exception] | tuple[type[Exception], ...] = Exception) -> bool:
    """Whether a call raises one of these errors."""
    try:
        call()
    except errors:
        return True
    return False


def operations(function) -> set[str]:
    """The kinds of operation in a function's graph."""
    graph = tf.function(function, autograph=False).get_concrete_function().graph
    return {operation.type for operation in graph.get_operations()}


def left_to_host(function, *specs: tf.TensorSpec) -> set[str]:
    """The kinds of operation on whole batches that a GPU would leave to the host.

    Args:
        function: of tensors.
        specs: of its arguments, of 64 rows.
    """
    graph = tf.function(function, autograph=False).get_concrete_function(*specs).graph
    work = [each for each in graph.get_operations() if each.type not in ("Placeholder", "Const", "Identity")]
    batches = [each for each in work if any(64 in tensor.shape for tensor in (*each.inputs, *each.outputs))]
    return {each.type for each in batches if private.is_left_to_host(each)}


if __name__ == "__main__":
    from tfgpu.repairs import all_repairs

    print(json.dumps(ask([repair for repair in all_repairs() if not sys.argv[1:] or repair.name in sys.argv[1:]])))
