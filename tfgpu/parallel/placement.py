"""`parallel.place`: layers on chosen devices, for a model that no single device can hold.

A layer's variables, optimizer slots, activations and gradients are on its device; what the next layer needs is copied
there. One device computes at a time: use `parallel.pipeline` to overlap them.
"""

import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfgpu.core import replication
from tfgpu.core.error_messages import in_units
from tfgpu.core.state import sharded_variable
from tfgpu.errors import InputError
from tfgpu.parallel import balance, compiled_calls, connection, costs, device_placement, model_graph, replicas

Devices = str | Iterable[str]
Placements = Mapping[str, device_placement.DevicePlacement]
"""By the path of a layer."""


def place(
    model: keras.Model, where: Mapping[str, Devices] | str, *, devices: int | Devices | None = None, batch: Any = None
) -> keras.Model:
    """Places layers on devices. Call it before `compile`.

    If several patterns match a layer, the first one counts. A layer that none matches is on the device of the layer
    that holds it, or on that of the first pattern. Operations that belong to no layer (`x + y`) run where their first
    input is computed.

    Args:
        model: any Keras model. Build a model that is too large for the first device under `tf.device("CPU:0")`,
            outside any strategy. A model that was made in the scope of `mirrored` keeps its replicas.
        where: by name or pattern of layers (`"encoder*"`, or `"encoder/attention*"` for layers within a layer), a
            device (`"GPU:0"`), or one for each replica (`("GPU:0", "GPU:2")`). `"auto"` measures the layers of a
            functional model, gives each device consecutive layers with about equal bytes and time, and prints a table.
        devices: for `"auto"`: how many, or their names; None uses all GPUs, or all logical CPU devices.
        batch: for `"auto"`: inputs to measure with, as the model takes them; None uses 8 rows of zeros.

    Returns:
        The same model, ready to be compiled and trained. What it saves is an ordinary model.

    Raises:
        InputError: a pattern matches no layer, a device does not exist, a pattern has fewer or more devices than there
            are replicas, or the optimizer is built.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="body"), keras.layers.Dense(1)])
        >>> model = place(model, {"*": "CPU:0"})
        >>> model.compile("adam", "mse")
    """
    if where == "auto":
        where = _balanced(model, devices, batch)
    elif isinstance(where, str) or devices is not None or batch is not None:
        raise InputError(
            "`where` must be patterns with devices, or 'auto'; only 'auto' takes `devices` and `batch`. "
            f"Received: where={where!r}."
        )
    chosen = {pattern: _devices(pattern, names) for pattern, names in dict(where).items()}
    if not chosen:
        raise InputError("`where` names no layer. Give patterns with devices, such as {'*': 'GPU:0'}.")
    model_graph.check_patterns(model, chosen)
    first = next(iter(chosen.values()))
    forget_default_compile(model)
    check_can_place(model)
    strategy = model.distribute_strategy
    if not replication.is_replicated(strategy):
        strategy = replicas.mirrored(connection.select(first))
    for pattern, devices in chosen.items():
        if len(devices) != strategy.num_replicas_in_sync:
            raise InputError(
                f"{pattern!r} needs one device for each of the {strategy.num_replicas_in_sync} replica(s). "
                f"Received: {', '.join(devices)}."
            )
    place_layers(
        model,
        {path: device_placement.on_devices(_found(path, chosen) or first) for path in model_graph.layers_within(model)},
        strategy,
    )
    compiled_calls.allow(model)
    return model


def place_layers(
    model: keras.Model,
    placements: Placements,
    strategy: tf.distribute.Strategy,
    split: Iterable[keras.layers.Layer] = (),
) -> None:
    """Moves a model's variables to their placements, and makes its layers, loss and metrics run there.

    Args:
        model: not compiled, or with an optimizer that is not built.
        placements: one for each of `model_graph.layers_within(model)`.
        strategy: the strategy that the model will train under.
        split: layers that run on several devices, which choose them themselves.
    """
    layers = model_graph.layers_within(model)
    device_placement.attach(model, strategy)
    _move_variables(layers, placements, strategy)
    split = set(map(id, model_graph.with_layers_within(split)))
    for path, layer in layers.items():
        if id(layer) not in split:
            device_placement.run_on(layer, placements[path])
        if hasattr(layer, "enable_lora") and not sharded_variable.has_shards(layer.weights):
            device_placement.create_variables_on(layer, placements[path], strategy, "enable_lora")
        if not layer.built:
            device_placement.build_on(layer, placements[path])
    for path, layer in [("", model), *layers.items()]:
        if model_graph.is_functional(layer):
            _place_operations(layer, placements, path)
        if isinstance(layer, keras.Sequential):
            model_graph.forbid_layer_changes(layer)
    last = placements[list(layers)[-1]]
    for name in ("compute_loss", "compute_metrics"):
        device_placement.run_on(model, last, name)


def move_variables(model: keras.Model, placement: device_placement.DevicePlacement, strategy) -> None:
    """Moves all variables of a model that are no shards to one placement."""
    layers = {"": model, **model_graph.layers_within(model)}
    _move_variables(layers, dict.fromkeys(layers, placement), strategy)


def _move_variables(layers: Mapping[str, keras.layers.Layer], placements: Mapping, strategy) -> None:
    """Moves each variable to the placement of the innermost layer that has it; shards are placed already."""
    placement_of = {
        id(v): (v, placements[path])
        for path, layer in layers.items()
        for v in [*layer.variables, *layer.metrics_variables]
        if sharded_variable.shard_info(v) is None
    }
    for variable, placement in placement_of.values():
        device_placement.move_variable(variable, placement, strategy)


def _place_operations(model: keras.Model, placements: Placements, path: str) -> None:
    """Makes operations that are not layers, such as `x + y`, run where their first input is computed."""
    placement_of = {}
    outside = placements.get(path) or next(iter(placements.values()))
    for call in model_graph.calls(model):
        found = placements.get(f"{path}/{call.name}".lstrip("/"))
        if not call.layers or found is None:
            known = (placement_of[id(tensor)] for tensor in call.inputs if id(tensor) in placement_of)
            found = next(known, outside)
            device_placement.run_on(call.operation, found)
        placement_of |= {id(tensor): found for tensor in call.outputs}


def _balanced(model: keras.Model, devices, batch) -> dict[str, str]:
    """A device for each layer: consecutive layers with about equal bytes and seconds; prints the table."""
    chosen = connection.select(devices)
    found = costs.measure(model, batch)
    begins = [0, *balance.cut(_shares(found), len(chosen))]
    table = Table("device", "layers", "parameters", "activations", "time")
    where = {}
    for device, (begin, end) in zip(chosen, itertools.pairwise([*begins, len(found)]), strict=True):
        part = found[begin:end]
        where |= {cost.name: where.get(cost.name, device.name) for cost in part}
        names = part[0].name if len(part) == 1 else f"{part[0].name} to {part[-1].name}"
        bytes_of = [in_units(sum(getattr(c, name) for c in part)) for name in ("parameter_bytes", "activation_bytes")]
        table.add_row(device.name, names, *bytes_of, f"{sum(c.seconds for c in part) * 1e3:.2f} ms")
    Console().print(table)
    layers = model_graph.layers_within(model)
    return {name: device for name, device in where.items() if name in layers}


def _shares(found: list[costs.Cost]) -> list[float]:
    """Each call's share of the model's parameters, activations and time, added up."""
    kinds = ("parameter_bytes", "activation_bytes", "seconds")
    totals = {kind: sum(getattr(cost, kind) for cost in found) or 1 for kind in kinds}
    return [sum(getattr(cost, kind) / totals[kind] for kind in kinds) for cost in found]


def _devices(pattern: str, names: Devices) -> tuple[str, ...]:
    if not isinstance(pattern, str):
        raise InputError(f"A pattern is a string, such as 'encoder*'. Received: {pattern!r}.")
    return tuple(device.name for device in connection.select([names] if isinstance(names, str) else names))


def _found(path: str, chosen: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """The devices of the first pattern that matches a layer, or else the nearest layer around it."""
    while path:
        for pattern, devices in chosen.items():
            if fnmatch.fnmatchcase(path, pattern):
                return devices
        path = path.rpartition("/")[0]
    return None


def has_default_compile(model: keras.Model) -> bool:
    """Whether a model is a task of KerasHub, which compiles itself when it is made, and has not been trained."""
    is_task = any(owner.__module__.startswith("keras_hub.") for owner in type(model).__mro__)
    optimizer = getattr(model, "optimizer", None)
    return is_task and optimizer is not None and not optimizer.built


def forget_default_compile(model: keras.Model) -> None:
    """Makes a task of KerasHub, which compiles itself when it is made, one that is to be compiled.

    Its optimizer would belong to no strategy. `fit` without `compile` then raises Keras's error.
    """
    if has_default_compile(model) and not replication.is_replicated(model.distribute_strategy):
        model.compiled, model.optimizer = False, None


def check_can_place(model: keras.Model) -> None:
    """Refuses a model whose variables can no longer be moved.

    Raises:
        InputError: it was compiled outside any strategy, its optimizer is built, its strategy is one of several workers
            or of averaging, or it was placed before.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise InputError("The model's optimizer is already built. Place the model before `compile`.")
    if getattr(model, "compiled", False) and not replication.is_replicated(model.distribute_strategy):
        raise InputError("The model was compiled outside any strategy. Place it before `compile`.")
    strategy = model.distribute_strategy
    if replication.spans_processes(strategy) or replication.local_training_of(strategy) is not None:
        raise InputError(
            "The model was made for several workers, or for `averaging`. Make it outside any strategy, or in the scope "
            "of `mirrored`."
        )
    within = (getattr(layer, "distribute_strategy", None) for layer in model_graph.layers_within(model).values())
    if any(map(device_placement.is_placed, (strategy, *within))):
        raise InputError("The model, or a model within it, was placed before. Build a new model.")
