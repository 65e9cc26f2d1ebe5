"""A model spread along all axes of a mesh at once: copies, stages, parts of layers, and sharded optimizer state.

`pipeline`, `tensor` and `shard` are short forms of `apply`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfgpu import strategies
from tfgpu.core import replication
from tfgpu.errors import InputError
from tfgpu.parallel import connection, device_placement, model_graph, placement
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.pipeline import execution, row_mixing, stage_assignment
from tfgpu.parallel.rematerialization import recomputed_layers
from tfgpu.parallel.tensor import parallel_layers, partitioning
from tfgpu.parallel.zero import sharded_optimizer

_MICROBATCHES = 4  # a stage: idle for less than a fifth of the time


def apply(
    model: keras.Model,
    mesh: Mesh,
    *,
    stages: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1f1b",
    recompute: bool = True,
    cuts: Sequence[str] | None = None,
    plan: Mapping[str, str | None] | str | None = "auto",
    zero: int = 0,
    batch: Any = None,
) -> keras.Model:
    """Spreads a model over a mesh, before it is compiled.

    Args:
        model: functional or Sequential, built. One that is too large for the first device is best made under
            `tf.device("CPU:0")`, outside of any strategy.
        mesh: how many ways along `data`, `pipeline` and `tensor`. Without devices of its own it takes the GPUs, or the
            logical CPU devices.
        stages: of the pipeline; None takes as many as the mesh has along `pipeline`, or twice as many for the schedule
            `"interleaved"`.
        microbatches: of the pipeline; None takes 4 a stage.
        schedule, recompute, cuts, batch: of the pipeline; see `pipeline`.
        plan: which layers lie in parts along `tensor`; see `tensor`.
        zero: 1, 2 or 3 shards the optimizer's state, gradients and parameters along `data`; see `shard`. 0 does not. 3
            takes a mesh that has `data` alone.

    Returns:
        The same model, to be compiled and fitted.

    Raises:
        InputError: the mesh does not fit the devices or the model; the message says how.

    Example:
        >>> layers = [keras.layers.Dense(8, "relu", name="body"), keras.layers.Dense(1, name="head")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = apply(model, Mesh(devices=["CPU:0"]))
        >>> model.compile("adam", "mse")
    """
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise InputError(f"`zero` is 0, 1, 2 or 3. Received: {zero!r}.")
    if zero and mesh.data == 1:
        raise InputError(f"`zero` spreads the optimizer along `data`, which {mesh} has not. Give it data=2 or more.")
    if zero == 3 and mesh.size > mesh.data:
        raise InputError(
            f"zero=3 spreads the parameters along `data` alone, and {mesh} has other axes. Take zero=2 there, or a "
            "mesh of `data` alone."
        )
    mesh = _with_devices(mesh)
    model_graph.functional(model)  # an error where there is none
    recomputed_layers.check_not_recomputed(model)
    strategy = _strategy(model, mesh)
    cut = _cut(model, mesh, plan)
    if stages is None and mesh.pipeline == 1 and (cuts is not None or microbatches is not None):
        raise InputError(f"`cuts` and `microbatches` are of a pipeline, and {mesh} has none. Leave them out.")
    stages = stages or mesh.pipeline * (2 if schedule == "interleaved" and mesh.pipeline > 1 else 1)
    microbatches = microbatches or _MICROBATCHES * stages
    stage_assignment.check_counts(stages=stages, microbatches=microbatches)
    stage_assignment.check_schedule(schedule, recompute, stages, microbatches, mesh.pipeline)
    is_staged = stages > 1 or mesh.pipeline > 1
    stage_of = (
        stage_assignment.assign_stages(model, stages, cuts, batch) if is_staged else [0] * len(model_graph.calls(model))
    )
    calls = model_graph.calls(model)
    places = [_home(mesh, at) for at in range(stages)]
    found = (
        row_mixing.probe(model, strategies.mirrored([mesh.device()]), batch) if is_staged else row_mixing.RowMixing()
    )
    how = stage_assignment.make_program(
        model, stage_of, places, mesh.pipeline, microbatches, schedule, recompute, found
    )
    stage_by_name = {call.name: stage for call, stage in zip(calls, stage_of, strict=True)}
    for call, stage in zip(calls, stage_of, strict=True):
        stage_by_name |= {layer.name: stage for layer in call.layers}

    def stage(path: str) -> int:
        return stage_by_name.get(path.partition("/")[0], 0)

    apart = []
    for path, segment in cut.segments:
        segment.settle(_across(mesh, stage(path)), strategy)
        apart += segment.layers
    for path, layer in cut.embeddings:
        parallel_layers.embed_by_rows(layer, _across(mesh, stage(path)), strategy)
    if zero == 3:  # before the rest moves: no device takes a whole copy first
        sharded_optimizer.shard_over(model, strategy, zero, place_of=lambda variable: _home(mesh, 0))
    layers = model_graph.layers_within(model_graph.functional(model))
    placement.place_layers(model, {path: _home(mesh, stage(path)) for path in layers}, strategy, apart)
    if is_staged:
        execution.install(model, how)
    if zero in (1, 2):
        sharded_optimizer.shard_over(model, strategy, zero)
    return model


def _cut(model: keras.Model, mesh: Mesh, plan) -> partitioning.Partitioning:
    """What lies in parts along `tensor`; prints the table."""
    if mesh.tensor == 1:
        if plan not in ("auto", None):
            raise InputError(f"`plan` is of the axis `tensor`, which {mesh} has not. Give the mesh tensor=2 or more.")
        return partitioning.Partitioning()
    found = partitioning.partition(model, mesh.tensor, "auto" if plan is None else plan)
    _show(found, mesh)
    if not found.segments and not found.embeddings:
        whys = "; ".join(f"{layer.path}: {layer.why}" for layer in found.layers[:3])
        raise InputError(f"No layer of {model.name!r} can be cut into {mesh.tensor} parts ({whys}).")
    for graph, calls in found.calls:
        model_graph.replace_calls(graph, calls)
    return found


def _show(found: partitioning.Partitioning, mesh: Mesh) -> None:
    table = Table("layer", "cut", "parameters", "each device", "")
    for layer in found.layers:
        each = layer.parameters / (mesh.tensor if layer.how else 1)
        table.add_row(layer.path, layer.how or "whole", f"{layer.parameters:,}", f"{each:,.0f}", layer.why)
    Console().print(table)


def _with_devices(mesh: Mesh) -> Mesh:
    if mesh.devices is None:
        chosen = connection.select(None)
        if len(chosen) < mesh.size:
            mesh.check(len(chosen))
        mesh = mesh.on(device.name for device in chosen[: mesh.size])
    connection.select(mesh.devices)
    return mesh


def _strategy(model: keras.Model, mesh: Mesh) -> tf.distribute.Strategy:
    """A strategy of as many replicas as the mesh has along `data`: the model's own where it fits."""
    placement.check_can_place(model)
    first = _home(mesh, 0)
    found = model.distribute_strategy
    if not replication.is_replicated(found):
        return strategies.mirrored([mesh.device(data=at) for at in range(mesh.data)])
    if device_placement.on_devices(found.extended.worker_devices) != first:
        raise InputError(
            f"The model was made for replicas on {', '.join(found.extended.worker_devices)}; the first stage is on "
            f"{', '.join(first.devices)}. Make it outside of any strategy."
        )
    return found


def _home(mesh: Mesh, stage: int, tensor: int = 0) -> device_placement.DevicePlacement:
    return device_placement.on_devices(
        mesh.device(data=at, pipeline=stage % mesh.pipeline, tensor=tensor) for at in range(mesh.data)
    )


def _across(mesh: Mesh, stage: int) -> list[device_placement.DevicePlacement]:
    return [_home(mesh, stage, at) for at in range(mesh.tensor)]
