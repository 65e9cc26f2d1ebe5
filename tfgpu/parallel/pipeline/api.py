"""A model in stages on devices of their own, which work on parts of the batch at the same time.

The batch is cut into micro-batches by rows. While the second stage works on the first of them, the first stage works
on the second. The loss, the metrics and the update are those of the whole batch: see `parallel/pipeline/execution.py`.

A step's idle share is `(S - 1) / (M + S - 1)` with S stages that cost the same and M micro-batches (`schedule.bound`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import connection, hybrid
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.pipeline import stage_assignment


def pipeline(
    model: keras.Model,
    stages: int,
    microbatches: int,
    *,
    schedule: str = "1f1b",
    recompute: bool = True,
    cuts: Sequence[str] | None = None,
    devices: int | str | Iterable[str] | None = None,
    mesh: Mesh | None = None,
    batch: Any = None,
) -> keras.Model:
    """Cuts a model into stages, each on a device of its own, before it is compiled.

    Args:
        model: functional or Sequential, built. One that is too large for the first device is best made under
            `tf.device("CPU:0")`, outside of any strategy.
        stages: how many. A layer is in one stage, also where it is called several times.
        microbatches: how many parts the batch of each replica is cut into; they differ by one row at most. More of
            them leave the devices less idle, and each with less to compute at once.
        schedule: `"1f1b"`, `"gpipe"` or `"interleaved"` (several stages a device): see `schedule.training`.
        recompute: keep only what the stages hand on, and run the forward pass again for the gradient. Without, which
            `"gpipe"` alone can, all activations of all micro-batches are kept, and the forward pass runs once.
        cuts: names of the layers that begin the stages but the first; None measures the layers and makes the most
            expensive stage as cheap as can be.
        devices: how many, or their names; None takes the first GPUs, or logical CPU devices: one a stage, or for
            `"interleaved"` half as many as stages.
        mesh: devices with an axis `data` besides: several copies of the pipeline, each on its rows of the batch.
        batch: inputs to measure with, as the model takes them; None takes 8 rows of zeros.

    Returns:
        The same model, to be compiled and fitted. `evaluate` and `predict` run stage after stage on whole batches.

    Raises:
        InputError: the model has no graph, a layer would be in two stages, there are fewer places to cut at than cuts,
            no layer of a name, or a setting that does not fit the others; the message says which.

    Example:
        >>> layers = [keras.layers.Dense(8, name=f"dense_{at}") for at in range(4)]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = pipeline(model, stages=1, microbatches=2, devices="CPU:0")
        >>> model.compile("adam", "mse")

    Source: Huang et al., GPipe, 2019; Narayanan et al., Efficient large-scale language model training, 2021.
    """
    stage_assignment.check_counts(stages=stages, microbatches=microbatches)
    mesh = _mesh_of(mesh, devices, stages, schedule)
    how = dict(schedule=schedule, recompute=recompute, cuts=cuts, batch=batch)
    return hybrid.apply(model, mesh, stages=stages, microbatches=microbatches, plan=None, **how)


def _mesh_of(mesh: Mesh | None, devices, stages: int, schedule: str) -> Mesh:
    if mesh is not None and devices is not None:
        raise InputError("Give `devices` or `mesh`, not both: a mesh has devices of its own.")
    wanted = -(-stages // 2) if schedule == "interleaved" else stages
    if mesh is None:
        chosen = connection.select(wanted if devices is None else devices)
        mesh = Mesh(pipeline=len(chosen), devices=tuple(device.name for device in chosen))
    elif mesh.devices is None:
        chosen = connection.select(None)
        mesh = mesh.on(device.name for device in chosen[: mesh.size])
    if mesh.tensor > 1:
        raise InputError(f"A pipeline has no axis `tensor`. Received: {mesh}.")
    connection.select(mesh.devices)
    return mesh
