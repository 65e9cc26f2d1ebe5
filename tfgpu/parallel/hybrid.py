"""`parallel.apply`: a model spread along all axes of a mesh: replicas, pipeline stages, tensor shards, ZeRO.

`pipeline`, `tensor` and `shard` are short forms of `apply`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Column, Table

from tfgpu.core import replication
from tfgpu.errors import InputError, whole_number
from tfgpu.parallel import compiled_calls, connection, model_graph, placement, replicas
from tfgpu.parallel.device_placement import DevicePlacement, on_devices
from tfgpu.parallel.expert import execution as expert
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.pipeline import execution, row_mixing, stage_assignment
from tfgpu.parallel.rematerialization import recomputed_layers
from tfgpu.parallel.sequence import execution as sequence
from tfgpu.parallel.tensor import block_run, block_trial, embeddings, partitioning
from tfgpu.parallel.zero import sharded_optimizer

_MICROBATCHES_PER_STAGE = 4  # devices wait for less than a fifth of the time


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
    """Spreads a model over a mesh of devices. Call it before `compile`.

    Args:
        model: built; functional or Sequential along `pipeline`. Build a model that is too large for the first device
            under `tf.device("CPU:0")`, outside any strategy.
        mesh: its sizes along `data`, `pipeline`, `expert`, `sequence` and `tensor`. A mesh without devices uses the
            GPUs, or the logical CPU devices. `sequence` goes with `data` alone: each device computes its part of the
            positions. So does `expert`: each device holds its part of the experts, and all that is no expert.
        stages: of the pipeline; None takes the size along `pipeline`, or twice that for the schedule `"interleaved"`.
        microbatches: of the pipeline; None takes 4 per stage.
        schedule, recompute, cuts, batch: of the pipeline; see `pipeline`.
        plan: which layers are split along `tensor`; see `tensor`.
        zero: 1, 2 or 3 shards the optimizer's state, the gradients and the parameters along `data`; see `shard`. 0
            shards nothing. 3 needs a mesh with the axis `data` alone.

    Returns:
        The same model, ready to be compiled and trained.

    Raises:
        InputError: the mesh does not fit the devices or the model.

    Example:
        >>> layers = [keras.layers.Dense(8, "relu", name="body"), keras.layers.Dense(1, name="head")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = apply(model, Mesh(devices=["CPU:0"]))
        >>> model.compile("adam", "mse")
    """
    _check_zero(zero, mesh)
    _check_sequence(mesh, zero)
    _check_expert(mesh, zero, {"stages": stages, "microbatches": microbatches, "cuts": cuts, "batch": batch})
    mesh = _with_devices(mesh)
    if mesh.sequence > 1:
        return _along_sequence(model, mesh)
    if mesh.expert > 1:
        return _along_expert(model, mesh, plan)
    if mesh.pipeline > 1 or (stages or 1) > 1:
        model_graph.functional(model)  # raises if there is no graph
    _check_built(model)
    recomputed_layers.check_not_recomputed(model)
    strategy = _strategy(model, [mesh.device(data=at) for at in range(mesh.data)])
    partitioned = _partition(model, mesh, plan)
    stages, microbatches = _pipeline_sizes(mesh, stages, microbatches, schedule, recompute, cuts)
    stage_of, program = [0] * len(_calls(model)), None
    if stages > 1 or mesh.pipeline > 1:
        stage_of = stage_assignment.assign_stages(model, stages, cuts, batch)
        found = row_mixing.probe(model, replicas.mirrored(connection.select([mesh.device()])), batch)
        staged = [_placement(mesh, stage) for stage in range(stages)]
        how = dict(microbatches=microbatches, schedule=schedule, recompute=recompute, found=found)
        program = stage_assignment.make_program(model, stage_of, staged, mesh.pipeline, **how)
    places = _Placements.of(model, mesh, stage_of)
    trials = block_trial.record(model, partitioned.blocks)
    split = _split_layers(partitioned, places, strategy)
    if zero == 3:  # before the rest moves, so that no device holds a whole copy
        sharded_optimizer.shard_over(model, strategy, zero, place_of=lambda variable: _placement(mesh, 0))
    paths = model_graph.layers_within(model_graph.functional(model) if model_graph.has_graph(model) else model)
    placement.place_layers(model, {path: places.at(path) for path in paths}, strategy, split)
    for trial in trials:
        trial.check()
    if program is not None:
        execution.install(model, program)
    if zero in (1, 2):
        sharded_optimizer.shard_over(model, strategy, zero)
    compiled_calls.allow(model)
    return model


def _check_zero(zero: int, mesh: Mesh) -> None:
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise InputError(f"`zero` must be 0, 1, 2 or 3. Received: {zero!r}.")
    if zero and mesh.data == 1:
        raise InputError(f"`zero` shards along `data`, where {mesh} has one device. Give it data=2 or more.")
    if zero == 3 and mesh.size > mesh.data:
        raise InputError(
            f"zero=3 shards the parameters along `data`, and {mesh} has other axes. Use zero=2, or a mesh with the "
            "axis `data` alone."
        )


def _check_sequence(mesh: Mesh, zero: int) -> None:
    if mesh.sequence > 1 and (mesh.pipeline > 1 or mesh.tensor > 1 or zero):
        raise InputError(
            f"`sequence` combines with `data` only, without `zero`. Received: {mesh}, zero={zero}. Remove `pipeline`, "
            "`tensor` and `zero`, or `sequence`."
        )


def _check_expert(mesh: Mesh, zero: int, settings: Mapping) -> None:
    if mesh.expert == 1:
        return
    others = [axis for axis in ("pipeline", "sequence", "tensor") if getattr(mesh, axis) > 1]
    if others or zero:
        raise InputError(
            f"`expert` combines with `data` only, without `zero`. Received: {mesh}, zero={zero}. Remove "
            f"{', '.join(f'`{each}`' for each in others or ['zero'])}, or `expert`."
        )
    given = [name for name, value in settings.items() if value is not None]
    if given:
        raise InputError(f"`{given[0]}` describes a pipeline, and {mesh} has none. Remove it.")


def _along_expert(model: keras.Model, mesh: Mesh, plan) -> keras.Model:
    if plan not in ("auto", None):
        raise InputError(
            f"`plan` needs the axis `tensor`, where {mesh} has one device. Along `expert` the plan of each class says "
            "which weights belong to experts: `tfgpu.parallel.register_plan`."
        )
    recomputed_layers.check_not_recomputed(model)
    _check_built(model)
    expert.install(model, mesh, _strategy(model, mesh.devices))
    return model


def _check_built(model: keras.Model) -> None:
    if not model.built:
        raise InputError(f"{model.name!r} is not built. First call it on a batch, or give it an `Input`.")


def _along_sequence(model: keras.Model, mesh: Mesh) -> keras.Model:
    recomputed_layers.check_not_recomputed(model)
    _check_built(model)
    strategy = _strategy(model, [mesh.device(data=at) for at in range(mesh.data)])
    first = _placement(mesh, 0)
    placement.place_layers(model, dict.fromkeys(model_graph.layers_within(model), first), strategy)
    sequence.install(model, mesh)
    return model


def _with_devices(mesh: Mesh) -> Mesh:
    if mesh.devices is None:
        chosen = connection.select(None)
        if len(chosen) < mesh.size:
            mesh.check(len(chosen))
        mesh = mesh.on(device.name for device in chosen[: mesh.size])
    connection.select(mesh.devices)
    return mesh


def _strategy(model: keras.Model, devices: Sequence[str]) -> tf.distribute.Strategy:
    """A strategy with a replica on each of these devices: the model's own where it fits."""
    placement.forget_default_compile(model)
    placement.check_can_place(model)
    found = model.distribute_strategy
    if not replication.is_replicated(found):
        return replicas.mirrored(connection.select(devices))
    if on_devices(found.extended.worker_devices) != on_devices(devices):
        raise InputError(
            f"The model was made for replicas on {', '.join(found.extended.worker_devices)}; those of the mesh are on "
            f"{', '.join(devices)}. Make the model outside any strategy."
        )
    return found


def _pipeline_sizes(mesh: Mesh, stages, microbatches, schedule: str, recompute: bool, cuts) -> tuple[int, int]:
    """The numbers of stages and of micro-batches, with the defaults for this mesh.

    Raises:
        InputError: the arguments do not fit together.
    """
    if stages is None and mesh.pipeline == 1 and (cuts is not None or microbatches is not None):
        raise InputError(f"`cuts` and `microbatches` describe a pipeline, and {mesh} has none. Remove them.")
    stages = stages or mesh.pipeline * (2 if schedule == "interleaved" and mesh.pipeline > 1 else 1)
    microbatches = microbatches or _MICROBATCHES_PER_STAGE * stages
    whole_number("stages", stages)
    whole_number("microbatches", microbatches)
    stage_assignment.check_schedule(schedule, recompute, stages, microbatches, mesh.pipeline)
    return stages, microbatches


@dataclass(frozen=True)
class _Placements:
    """Where a model's layers are placed: by the stage of the layer or operation that the model itself calls."""

    mesh: Mesh
    stages: Mapping[str, int]

    @classmethod
    def of(cls, model: keras.Model, mesh: Mesh, stage_of: list[int]) -> "_Placements":
        staged = list(zip(_calls(model), stage_of, strict=True))
        stages = {call.name: stage for call, stage in staged}
        return cls(mesh, stages | {layer.name: stage for call, stage in staged for layer in call.layers})

    def _stage(self, path: str) -> int:
        return self.stages.get(path.partition("/")[0], 0)

    def at(self, path: str) -> DevicePlacement:
        """The placement of the layer with this path: the first device of each group along `tensor`."""
        return _placement(self.mesh, self._stage(path))

    def along_tensor(self, path: str) -> list[DevicePlacement]:
        """The placement of each shard of the layer with this path."""
        return [_placement(self.mesh, self._stage(path), at) for at in range(self.mesh.tensor)]


def _calls(model: keras.Model) -> list[model_graph.Call]:
    """The model's calls; none of a model without a graph, whose layers are split by plans alone."""
    return model_graph.calls(model) if model_graph.has_graph(model) else []


def _placement(mesh: Mesh, stage: int, tensor: int = 0) -> DevicePlacement:
    stage %= mesh.pipeline
    return on_devices(mesh.device(data=at, pipeline=stage, tensor=tensor) for at in range(mesh.data))


def _partition(model: keras.Model, mesh: Mesh, plan) -> partitioning.Partitioning:
    """Which layers are split along `tensor`; prints the table, and makes the model run the split layers."""
    if mesh.tensor == 1:
        if plan not in ("auto", None):
            raise InputError(f"`plan` needs the axis `tensor`, where {mesh} has one device. Give it tensor=2 or more.")
        return partitioning.Partitioning()
    found = partitioning.partition(model, mesh.tensor, "auto" if plan is None else plan)
    _print_table(found, mesh)
    if found.is_empty:
        model_graph.functional(model)  # raises if there is no graph
        reasons = "; ".join(f"{layer.path}: {layer.reason}" for layer in found.layers[:3])
        quantized = any("quantized" in layer.reason for layer in found.layers)
        fix = " Spread a model quantized in this way by `shard(model, 3)` or in a pipeline." * quantized
        raise InputError(f"No layer of {model.name!r} can be split into {mesh.tensor} shards ({reasons}).{fix}")
    for graph, calls in found.calls:
        model_graph.replace_calls(graph, calls)
    return found


def _print_table(found: partitioning.Partitioning, mesh: Mesh) -> None:
    """Prints how each layer is split; equal layers whose paths differ in numbers alone are one line."""
    alike: dict = {}
    for layer in found.layers:
        name = re.sub(r"\d+", "*", layer.path)
        alike.setdefault((name, layer.style, layer.reason, layer.parameters), []).append(layer.path)
    table = Table(Column("layer", overflow="fold"), "split", "parameters", "each device", "")
    for (name, style, reason, parameters), paths in alike.items():
        each = parameters / (mesh.tensor if style else 1)
        path = paths[0] if len(paths) == 1 else f"{name} ({len(paths)})"
        table.add_row(path, style or "whole", f"{parameters:,}", f"{each:,.0f}", reason)
    Console().print(table)


def _split_layers(found: partitioning.Partitioning, places: _Placements, strategy) -> list[keras.layers.Layer]:
    """Splits the variables along `tensor`; returns the layers that run on several devices from now on."""
    split = []
    for path, segment in found.segments:
        segment.split_variables(places.along_tensor(path), strategy)
        split += segment.layers
    for path, layer in found.embeddings:
        embeddings.split(layer, places.along_tensor(path), strategy)
    for block in reversed(found.blocks):  # a block within a block first, whose call the outer one then asks for
        block_run.split(block, places.along_tensor(block.path), strategy)
        split.append(block.layer)
    return split
