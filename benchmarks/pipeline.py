"""How idle the stages of a pipeline are: `python -m benchmarks.pipeline`, beside the bound `(S - 1) / (M + S - 1)`.

Each stage sleeps a fixed time forward and twice as long backward, so that the schedule, and not the number of cores,
sets the time of a step.
"""

import argparse
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.parallel import picture, pipeline
from tfgpu.parallel.pipeline.schedule import bound

CASES = (("gpipe", 4, 8, 4), ("1f1b", 4, 8, 4), ("1f1b", 4, 16, 4), ("1f1b", 2, 8, 2), ("interleaved", 8, 8, 4))


_slept: list[float] = []


class Slow(keras.layers.Layer):
    """Hands its input on after a while; its gradient takes twice as long."""

    def __init__(self, seconds: float, **kwargs):
        super().__init__(**kwargs)
        self.seconds = seconds

    def call(self, x):
        @tf.custom_gradient
        def wait(x):
            return self._after(x, 1), lambda upstream: self._after(upstream, 2)

        return wait(x)

    def _after(self, x, times: int):
        def sleep(value):
            begin = time.perf_counter()
            time.sleep(self.seconds * times)
            _slept.append(time.perf_counter() - begin)
            return value

        return tf.ensure_shape(tf.numpy_function(sleep, [x], x.dtype, stateful=False), x.shape)


def _stage(at: int, seconds: float) -> list[keras.layers.Layer]:
    """Both ways are slow, since there are weights to learn before and after."""
    return [keras.layers.Dense(4, name=f"begin_{at}"), Slow(seconds), keras.layers.Dense(4)]


def made(schedule: str, stages: int, microbatches: int, devices: int, *, seconds: float) -> keras.Model:
    """A compiled pipeline of sleeping stages."""
    layers = [layer for at in range(stages) for layer in _stage(at, seconds)]
    model = keras.Sequential([keras.Input((4,)), *layers])
    cuts = [f"begin_{at}" for at in range(1, stages)]
    names = [f"CPU:{at}" for at in range(devices)]
    pipeline(model, stages, microbatches, schedule=schedule, cuts=cuts, devices=names)
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse", steps_per_execution=1, jit_compile=False)
    return model


def steps_of(schedule: str, stages: int, microbatches: int, devices: int, *, seconds: float, steps: int) -> list[tuple]:
    """Single steps, after the first two: seconds, and how long all stages together were busy."""
    model = made(schedule, stages, microbatches, devices, seconds=seconds)
    taken, rows = [], np.ones((microbatches * 2, 4), "float32")
    for _ in range(steps + 2):
        _slept.clear()
        begin = time.perf_counter()
        model.train_on_batch(rows, rows)
        taken.append((time.perf_counter() - begin, sum(_slept)))
    return taken[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.02, help="of a stage's forward pass [0.02]")
    parser.add_argument("--steps", type=int, default=7, help="that are timed [7]")
    parser.add_argument("--picture", metavar="FILE", help="draw one schedule instead")
    asked = parser.parse_args()
    tfgpu.environment.set_logical_devices(8)
    tf.config.threading.set_inter_op_parallelism_threads(16)
    if asked.picture:
        rows = np.ones((64, 4), "float32")
        picture(made("1f1b", 4, 8, 4, seconds=0.1), (rows, rows), asked.picture)
        return
    print("| schedule | stages | micro-batches | devices | step, s | idle share | bound |")
    print("|---|---|---|---|---|---|---|")
    for schedule, stages, microbatches, devices in CASES:
        taken = steps_of(schedule, stages, microbatches, devices, seconds=asked.seconds, steps=asked.steps)
        idle = [1 - busy / (step * devices) for step, busy in taken]
        least = bound(devices, microbatches * (stages // devices))
        span = f"{min(taken)[0]:.3f} to {max(taken)[0]:.3f}"
        row = (schedule, stages, microbatches, devices, span, f"{statistics.median(idle):.3f}", f"{least:.3f}")
        print(f"| {' | '.join(map(str, row))} |")


if __name__ == "__main__":
    main()
