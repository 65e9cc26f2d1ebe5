"""Layers on devices of their own: a model of which no device holds the whole.

Variables, the optimizer's slots, activations and gradients live where a layer was put; what the next layer needs is
copied to its device. One device computes at a time: `parallel.pipeline` lets them work together.
"""

import difflib
import fnmatch
import itertools
from collections.abc import Iterable, Mapping
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

from tfgpu import strategies
from tfgpu.core import replication
from tfgpu.core.error_messages import in_units
from tfgpu.errors import InputError
from tfgpu.parallel import balance, connection, costs, device_placement, model_graph, sharded_variable

Devices = str | Iterable[str]


def place(
    model: keras.Model, where: Mapping[str, Devices] | str, *, devices: int | Devices | None = None, batch: Any = None
) -> keras.Model:
    """Puts layers on devices, before the model is compiled.

    Where several patterns match a layer, the first one counts. A layer that none matches is where the layer is that
    holds it, or else on the device of the first pattern. Operations that belong to no layer (`x + y`) are where their
    first input is made.

    Args:
        model: any Keras model. One that is too large for the first device is best made under `tf.device("CPU:0")`,
            outside of any strategy. A model that was made in the scope of `mirrored` keeps its replicas.
        where: by name or pattern of layers (`"encoder*"`, or `"encoder/attention*"` for layers within a layer), a
            device (`"GPU:0"`), or one for each replica (`("GPU:0", "GPU:2")`). `"auto"` measures the layers of a
            functional model, gives each device a run of them with about the same bytes and time, and prints the table.
        devices: for `"auto"`: how many, or their names; None takes all GPUs, or all logical CPU devices.
        batch: for `"auto"`: inputs to measure with, as the model takes them; None takes 8 rows of zeros.

    Returns:
        The same model, to be compiled and fitted. What it saves is an ordinary model that knows of no device.

    Raises:
        InputError: a pattern matches no layer, a device does not exist, there are not as many as replicas, or the
            optimizer has been built.

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, name="body"), keras.layers.Dense(1)])
        >>> model = place(model, {"*": "CPU:0"})
        >>> model.compile("adam", "mse")
    """
    if where == "auto":
        where = _balanced(model, devices, batch)
    elif isinstance(where, str) or devices is not None or batch is not None:
        raise InputError(
            "Give `where` as patterns with devices, or as 'auto', which alone takes `devices` and `batch`."
        )
    chosen = {pattern: _devices(pattern, names) for pattern, names in dict(where).items()}
    if not chosen:
        raise InputError("`where` names no layer. Give patterns with devices, such as {'*': 'GPU:0'}.")
    _check_patterns(model, chosen)
    first = next(iter(chosen.values()))
    strategy = _strategy_of(model, first)
    for pattern, devices in chosen.items():
        if len(devices) != strategy.num_replicas_in_sync:
            raise InputError(
                f"{pattern!r} needs a device for each of the {strategy.num_replicas_in_sync} replica(s). "
                f"Received: {', '.join(devices)}."
            )
    place_layers(
        model,
        {path: device_placement.on_devices(_found(path, chosen) or first) for path in model_graph.layers_within(model)},
        strategy,
    )
    return model


def place_layers(
    model: keras.Model,
    places: Mapping[str, device_placement.DevicePlacement],
    strategy: tf.distribute.Strategy,
    apart: Iterable[keras.layers.Layer] = (),
) -> None:
    """Moves all variables of a model to their homes, and lets its layers, its loss and its metrics run at home.

    Args:
        model: not compiled, or with an optimizer that is not built.
        places: a home for each of `graphs.layers_within(model)`.
        strategy: what it shall train under.
        apart: layers that run on several devices, and find their way themselves.
    """
    layers = model_graph.layers_within(model)
    alone = {id(each) for layer in apart for each in (layer, *model_graph.layers_within(layer).values())}
    home_of = {
        id(v): (v, places[path])
        for path, layer in layers.items()
        for v in [*layer.variables, *layer.metrics_variables]
        if sharded_variable.shard_info(v) is None
    }
    device_placement.attach(model, strategy)
    for variable, place_of_it in home_of.values():
        device_placement.move_variable(variable, place_of_it, strategy)
    for path, layer in layers.items():
        if id(layer) not in alone:
            device_placement.run_on(layer, places[path])
            if hasattr(layer, "enable_lora"):
                device_placement.create_variables_on(layer, places[path], strategy, "enable_lora")
        if not layer.built:
            device_placement.build_on(layer, places[path])
    for path, layer in [("", model), *layers.items()]:
        if model_graph.is_functional(layer):
            _place_operations(layer, places, path)
        if isinstance(layer, keras.Sequential):
            model_graph.forbid_layer_changes(layer)
    last = places[list(layers)[-1]]
    for name in ("compute_loss", "compute_metrics"):
        device_placement.run_on(model, last, name)


def _place_operations(model: keras.Model, places: Mapping[str, device_placement.DevicePlacement], path: str) -> None:
    """Lets operations that are no layers, such as `x + y`, run where their first input is made."""
    home_of = {}
    outside = places.get(path) or next(iter(places.values()))
    for call in model_graph.calls(model):
        found = places.get(f"{path}/{call.name}".lstrip("/"))
        if not call.layers or found is None:
            found = next((home_of[id(tensor)] for tensor in call.needs if id(tensor) in home_of), outside)
            device_placement.run_on(call.operation, found)
        home_of |= {id(tensor): found for tensor in call.makes}


def _balanced(model: keras.Model, devices, batch) -> dict[str, str]:
    """Layers in a row, cut where bytes and seconds of the parts are about the same; prints the table."""
    chosen = connection.select(devices)
    found = costs.measure(model, batch)
    totals = [
        sum(getattr(cost, name) for cost in found) or 1 for name in ("parameter_bytes", "activation_bytes", "seconds")
    ]
    shares = [
        sum(
            part / total for part, total in zip((c.parameter_bytes, c.activation_bytes, c.seconds), totals, strict=True)
        )
        for c in found
    ]
    begins = [0, *balance.cut(shares, len(chosen))]
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


def _devices(pattern: str, names: Devices) -> tuple[str, ...]:
    if not isinstance(pattern, str):
        raise InputError(f"A pattern is a string, such as 'encoder*'. Received: {pattern!r}.")
    return tuple(device.name for device in connection.select([names] if isinstance(names, str) else names))


def _check_patterns(model: keras.Model, chosen: Mapping[str, tuple[str, ...]]) -> None:
    paths = list(model_graph.layers_within(model))
    for pattern in chosen:
        if not fnmatch.filter(paths, pattern):
            near = difflib.get_close_matches(pattern, paths, 3, 0.3) or paths[:3]
            raise InputError(f"No layer of {model.name!r} is called {pattern!r}. There are {', '.join(near)}, ...")


def _found(path: str, chosen: Mapping[str, tuple[str, ...]]) -> tuple[str, ...] | None:
    """The devices of the first pattern that matches a layer, or else the nearest layer that holds it."""
    while path:
        for pattern, devices in chosen.items():
            if fnmatch.fnmatchcase(path, pattern):
                return devices
        path = path.rpartition("/")[0]
    return None


def check_can_place(model: keras.Model) -> None:
    """Refuses to move a model when it is too late.

    Raises:
        InputError: it was compiled outside of any replicas, its optimizer has been built, or its strategy is one of
            several workers or of averaging.
    """
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        raise InputError("The model has trained already, or its optimizer was built. Place it before `compile`.")
    if getattr(model, "compiled", False) and not replication.is_replicated(model.distribute_strategy):
        raise InputError("The model was compiled outside of any replicas. Place it before `compile`.")
    if (
        replication.spans_processes(model.distribute_strategy)
        or replication.local_training_of(model.distribute_strategy) is not None
    ):
        raise InputError(
            "The model was made for several workers, or for replicas that train apart. Make it outside of any "
            "strategy, or in the scope of `mirrored`."
        )
    within = (getattr(layer, "distribute_strategy", None) for layer in model_graph.layers_within(model).values())
    if any(map(device_placement.is_placed, (model.distribute_strategy, *within))):
        raise InputError("The model, or one within it, was placed before. Make it anew.")


def _strategy_of(model: keras.Model, devices: tuple[str, ...]) -> tf.distribute.Strategy:
    """The strategy of a model's replicas; a new one where it has none."""
    check_can_place(model)
    found = model.distribute_strategy
    return found if replication.is_replicated(found) else strategies.mirrored(devices)
