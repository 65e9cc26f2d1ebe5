"""Measures and draws the pipeline schedule of a model, on random data."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np

from tfgpu import environment, models, parallel
from tfgpu.errors import InputError
from tfgpu.parallel.pipeline.drawing import Measured, idle
from tfgpu.parallel.pipeline.schedule import bound

DEEP = {"mlp": ((256,), {"widths": (1024,) * 8}), "transformer": ((64,), {"depth": 8})}
"""Input shapes and options that make a builder's model deep enough for a pipeline. Default: images of 32 x 32."""


@dataclass(frozen=True)
class Profile:
    """The measured schedule.

    Args:
        path: the picture.
        cells: the cells of the drawn step.
        idle_share: the share of the devices' time that is idle.
        bound: the idle share of a pipeline with equal stages.
        busy_s: busy seconds of each device.
    """

    path: Path
    cells: tuple[Measured, ...]
    idle_share: float
    bound: float
    busy_s: tuple[float, ...]

    def as_json(self) -> dict:
        return {
            "picture": str(self.path),
            "step_s": max(one.end for one in self.cells),
            "idle_share": self.idle_share,
            "bound": self.bound,
            "busy_s": list(self.busy_s),
            "cells": [
                {"stage": one.cell.stage, "micro": one.cell.micro, "device": one.device, "kind": one.kind}
                | {"start_s": one.start, "end_s": one.end}
                for one in self.cells
            ],
        }


def profile_stages(
    model: str,
    path: str | Path,
    *,
    stages: int = 4,
    microbatches: int = 8,
    schedule: str = "1f1b",
    devices: int | None = None,
    cuts: Sequence[str] | None = None,
    batch: int | None = None,
    steps: int = 3,
) -> Profile:
    """Trains a model as a pipeline on random numbers for a few steps, and draws one of them.

    Without a GPU, it uses logical CPU devices, which share the cores.

    Args:
        model: a builder, a model of `keras.applications`, or `module:function`, as for `models.build`.
        path: the picture: `.png`, `.svg` or `.html`.
        stages: the number of stages; this and the following arguments as for `parallel.pipeline`.
        batch: the batch size; None takes 8 per micro-batch.
        steps: the number of steps to measure.

    Returns:
        The measured schedule.

    Raises:
        InputError: see `models.build`, `parallel.pipeline` and `parallel.picture`.
    """
    count = devices or (max(1, stages // 2) if schedule == "interleaved" else stages)
    if not environment.devices("GPU") and len(environment.devices("CPU")) < count:
        environment.set_logical_devices(count)
        environment.set_threads(inter=max(8, 4 * count))  # a waiting stage occupies a thread
    shape, options = DEEP.get(model.lower(), ((32, 32, 3), {}))
    made = models.build(model, input_shape=shape, classes=10, options=options)
    pipe = parallel.pipeline(made, stages, microbatches, schedule=schedule, cuts=cuts, devices=count)
    pipe.compile("sgd", "mse", jit_compile=False)
    batch = 8 * microbatches if batch is None else batch
    if batch < microbatches:
        raise InputError(f"`batch` must be at least {microbatches}, one row per micro-batch. Received: {batch}.")
    cells = tuple(parallel.picture(pipe, _batch(pipe, batch), path, steps=steps))
    busy = [sum(one.end - one.start for one in cells if one.device == at) for at in range(count)]
    least = bound(count, microbatches * (stages // count))
    return Profile(Path(path), cells, idle(list(cells)), least, tuple(busy))


def _batch(model: keras.Model, rows: int) -> tuple:
    """Random inputs and targets."""
    random = np.random.default_rng(0)

    def values(tensor):
        shape = (rows, *(size or 1 for size in tensor.shape[1:]))
        if np.issubdtype(np.dtype(tensor.dtype), np.integer):
            return random.integers(0, 2, shape).astype(tensor.dtype)
        return random.normal(size=shape).astype(tensor.dtype)

    found = [[values(tensor) for tensor in tensors] for tensors in (model.inputs, model.outputs)]
    return tuple(each if len(each) > 1 else each[0] for each in found)


def summary(profile: Profile) -> str:
    """Summarizes a schedule in one or two lines.

    Example:
        >>> summary(Profile(Path("a.png"), (), 0.25, 0.2, (1.0, 1.0)))
        'The devices were idle for 25.0% of a step; equal stages would give 20.0%.'
    """
    middle = statistics.mean(profile.busy_s)
    text = f"The devices were idle for {profile.idle_share:.1%} of a step; equal stages would give {profile.bound:.1%}."
    if max(profile.busy_s) > 1.1 * middle:
        text += (
            f"\nThe busiest device worked {max(profile.busy_s) / middle:.1f} times as long as the average: other cuts "
            "may balance the stages."
        )
    return text
