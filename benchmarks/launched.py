"""Trainings whose steps wait instead of computing, under a real `tfgpu launch`: what stragglers and failures measure.

Waiting, not computing, fills the step, so that the figures say the same on a machine that has other work.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks import machine
from benchmarks.children import ROOT

# The launcher waits 1, 2, 4 and at last 30 s before it starts again. One that gives up after three restarts, and is
# itself started again, keeps these waits short beside the time between failures.
RESTARTS = 3


def waiting_model(wait: Callable[[], None]):
    """A small compiled model, whose step calls `wait` in the middle of the forward pass.

    What `wait` follows reads the weights, so that it begins when the step before has ended on all workers; what follows
    it, and so the gradients that all workers wait for, begins when it has returned.
    """
    import keras
    import tensorflow as tf

    def run(one):
        wait()
        return one

    class Waits(keras.layers.Layer):
        def call(self, inputs):
            one = tf.numpy_function(run, [tf.reduce_sum(inputs)], tf.float32)
            with tf.control_dependencies([one]):
                return tf.identity(inputs)

    layers = [keras.Input((16,)), keras.layers.Dense(32, "relu"), Waits(), keras.layers.Dense(4)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False)
    return model


def batches(count: int):
    """So many times the same batch of 32 rows."""
    import numpy as np
    import tensorflow as tf

    draw = np.random.default_rng(0)
    batch = draw.random((32, 16), "float32"), draw.integers(0, 4, 32)
    return tf.data.Dataset.from_tensors(batch).repeat(count)


def launch(workers: int, *words: object, restarts: int = 0, log: Path) -> subprocess.Popen:
    """Starts `tfgpu launch` with a script and its arguments; what it says goes to the end of a file."""
    options = ["launch", "-n", workers, "--gpus-per-worker", 0, "--no-logs", "--startup-timeout", 300]
    options += ["--max-restarts", restarts, *words]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with open(log, "ab") as file:
        return subprocess.Popen(
            [sys.executable, "-m", "tfgpu", *map(str, options)],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )


def end(process: subprocess.Popen) -> None:
    """Ends a launcher, with whom all ends that it has started."""
    process.kill()
    process.wait()


class Endless:
    """A training of two workers that is started again whatever happens to it, and notes its steps in `FOLDER/steps`.

    Args:
        folder: the run's directory.
        words: the script and its arguments, the folder among them.
    """

    def __init__(self, folder: Path, *words: object):
        self.folder, self.log, self._launcher, self._words = folder, folder / "log", None, words

    def look(self) -> None:
        """Starts the launcher if it is not running."""
        if self._launcher is None or self._launcher.poll() is not None:
            self._launcher = launch(2, *self._words, restarts=RESTARTS, log=self.log)

    def wait(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self.look()
            time.sleep(min(0.02, left))

    def steps(self) -> list[list[float]]:
        path = self.folder / "steps"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, after: float) -> None:
        limit = time.monotonic() + 300
        while not any(at > after for at, *_ in self.steps()[-1:]):
            if time.monotonic() > limit:
                raise SystemExit(f"No step within 300 s:\n{self.log.read_text()[-3000:]}")
            self.wait(time.monotonic() + 0.2)

    def kill(self, draw: random.Random) -> float | None:
        """Kills a worker; when that was, or None where none lives."""
        found = []
        for process in psutil.Process(self._launcher.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if "tfgpu.run" in words and str(self.folder) in words:
                found.append(process.pid)
        if not found:
            return None
        os.kill(draw.choice(sorted(found)), signal.SIGKILL)
        return time.monotonic()

    def end(self) -> None:
        if self._launcher is not None:
            end(self._launcher)


def load() -> float:
    """Processes that wanted a core, on the average of the last minute."""
    return round(os.getloadavg()[0], 1)


def facts(**settings: object) -> dict:
    """What the figures were measured on and with, for JSON."""
    return {**machine.facts(), "time": time.strftime("%H:%M"), **settings}


def measured_on(facts: dict) -> str:
    """A sentence for the page."""
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"{facts['device']}, {facts['all_cores']} cores, {versions}; {facts['date']}."


def keep(output: Path, facts: dict, runs: list[dict], table: Callable[[dict], list[str]]) -> None:
    """Writes the figures of a measurement, and prints the table that is made of them."""
    output.write_text(json.dumps({"facts": facts, "runs": runs}, indent=1) + os.linesep)
    print("\n".join(table(json.loads(output.read_text()))))
