"""`parallel.pipeline`: a model in stages on different devices, which work on different micro-batches at the same time.

The batch is split into micro-batches by rows. While the second stage works on the first micro-batch, the first stage
works on the second. The loss, the metrics and the update are those of the whole batch: see `execution.py`.

With S stages of equal cost and M micro-batches, devices wait for `(S - 1) / (M + S - 1)` of a step (`schedule.bound`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import keras

from tfgpu.errors import InputError, whole_number
from tfgpu.parallel import connection, hybrid
from tfgpu.parallel.mesh import Mesh


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
    """Splits a model into pipeline stages, each on its own device. Call it before `compile`.

    Args:
        model: functional or Sequential, built. Build a model that is too large for the first device under
            `tf.device("CPU:0")`, outside any strategy.
        stages: how many. A layer is in one stage, even if it is called several times.
        microbatches: how many parts each replica's batch is split into; their rows differ by one at most. More
            micro-batches leave the devices less idle, and each with less to compute at once.
        schedule: `"1f1b"`, `"gpipe"` or `"interleaved"` (several stages per device): see `schedule.training`.
        recompute: keep only what the stages exchange, and run the forward pass again for the gradient. False, which
            only `"gpipe"` supports, keeps all activations of all micro-batches and runs the forward pass once.
        cuts: names of the layers that begin the second and later stages; None measures the layers, and makes the most
            expensive stage as cheap as possible.
        devices: how many, or their names. None uses the first GPUs, or logical CPU devices: one per stage, or
            half as many as stages for `"interleaved"`.
        mesh: devices with an axis `data` as well: several copies of the pipeline, each on its rows of the batch.
        batch: inputs to measure with, as the model takes them; None uses 8 rows of zeros.

    Returns:
        The same model, ready to be compiled and trained. `evaluate` and `predict` run stage after stage on whole
        batches.

    Raises:
        InputError: the model has no graph, a layer would be in two stages, there are fewer places to cut than cuts, no
            layer has a name of `cuts`, or two settings do not fit together.

    Example:
        >>> layers = [keras.layers.Dense(8, name=f"dense_{at}") for at in range(4)]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = pipeline(model, stages=1, microbatches=2, devices="CPU:0")
        >>> model.compile("adam", "mse")

    Source: Huang et al., GPipe, 2019; Narayanan et al., Efficient large-scale language model training, 2021.
    """
    whole_number("stages", stages)
    whole_number("microbatches", microbatches)
    mesh = _mesh_of(mesh, devices, stages, schedule)
    how = dict(schedule=schedule, recompute=recompute, cuts=cuts, batch=batch)
    return hybrid.apply(model, mesh, stages=stages, microbatches=microbatches, plan=None, **how)


def _mesh_of(mesh: Mesh | None, devices, stages: int, schedule: str) -> Mesh:
    if mesh is not None and devices is not None:
        raise InputError("Give `devices` or `mesh`, not both: a mesh already has devices.")
    wanted = -(-stages // 2) if schedule == "interleaved" else stages
    if mesh is None:
        chosen = connection.select(wanted if devices is None else devices)
        mesh = Mesh(pipeline=len(chosen), devices=tuple(device.name for device in chosen))
    elif mesh.devices is None:
        chosen = connection.select(None)
        mesh = mesh.on(device.name for device in chosen[: mesh.size])
    if mesh.tensor > 1:
        raise InputError(f"`pipeline` takes no mesh with an axis `tensor`. Received: {mesh}. Use `parallel.apply`.")
    connection.select(mesh.devices)
    return mesh
