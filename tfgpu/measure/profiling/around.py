"""Facts of the process that a trace lacks: workers, replicas, retraced arguments, functions of the input."""

import platform
import re
from dataclasses import asdict, dataclass
from typing import Any

from tfgpu import environment
from tfgpu.cluster import Cluster
from tfgpu.measure.profiling import hooks
from tfgpu.recipes import facts

_PARAMETER = re.compile(r"^  (\w+) \([A-Z_]+\): (.*)$", re.MULTILINE)
_SPEC = re.compile(r"TensorSpec\(shape=(.*?), dtype=tf\.(\w+),.*\)")
_MOST = 4


@dataclass(frozen=True)
class Change:
    """An argument in which the graphs of a tf.function differ.

    Args:
        function: the function's name.
        graphs: the number of its graphs.
        argument: the argument's name.
        values: the first few values, as in the function's signature.
        kind: `"python"` for a Python value, `"shape"`, `"dtype"`, or `"other"`.
    """

    function: str
    graphs: int
    argument: str
    values: tuple[str, ...]
    kind: str


@dataclass(frozen=True)
class Around:
    """Facts of the process besides the trace.

    Args:
        workers: number of processes that train together.
        replicas: replicas of a strategy that received whole batches; 0 if none did.
        plain: source lines that passed whole batches to `strategy.run`.
        changes: the arguments that caused retracing.
        stages: functions of the input.
        devices: names of the devices.
        machine: processor and versions.
        batch: rows of a step, if known.
    """

    workers: int = 1
    replicas: int = 0
    plain: tuple[str, ...] = ()
    changes: tuple[Change, ...] = ()
    stages: tuple[hooks.Stage, ...] = ()
    devices: tuple[str, ...] = ()
    machine: tuple[tuple[str, str], ...] = ()
    batch: int | None = None

    def as_json(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        return asdict(self) | {"machine": dict(self.machine)}


def look(retraced: set[str], plain: dict[str, int], batch: int | None = None) -> Around:
    """Collects the facts of this process.

    Args:
        retraced: names of the tf.functions that were retraced.
        plain: source lines that passed whole batches to `strategy.run`, with the number of replicas.
        batch: rows of a step, if known.
    """
    devices = [device.name for kind in ("GPU", "CPU") for device in environment.devices(kind)]
    versions = {name: str(version) for name, version in facts.versions().items()}
    return Around(
        workers=max(1, len(Cluster.from_environment().workers)),
        replicas=max(plain.values(), default=0),
        plain=tuple(plain),
        changes=tuple(change for each in hooks.functions(retraced) for change in changes(each)),
        stages=hooks.stages(),
        devices=tuple(devices),
        machine=tuple({"processor": platform.machine(), **versions}.items()),
        batch=batch,
    )


def changes(function: Any) -> list[Change]:
    """Returns the arguments in which the graphs of a tf.function differ.

    Example:
        >>> import tensorflow as tf
        >>> double = tf.function(lambda x, times: x * times)
        >>> for times in range(3):
        ...     result = double(tf.ones([2]), times)
        >>> changes(double)[0].argument, changes(double)[0].values, changes(double)[0].kind
        ('times', ('0', '1', '2'), 'python')
    """
    signatures = function.pretty_printed_concrete_signatures().split("Input Parameters:")[1:]
    graphs = [dict(_PARAMETER.findall(text)) for text in signatures]
    found = []
    for argument in dict.fromkeys(name for graph in graphs for name in graph):
        values = list(dict.fromkeys(graph[argument] for graph in graphs if argument in graph))
        if len(values) > 1:
            shown = tuple(_short(value) for value in values[:_MOST])
            found.append(Change(function.__name__, len(graphs), argument, shown, _kind(values)))
    return found


def _short(value: str) -> str:
    if value.startswith("Literal["):
        return value[8:-1][:40]
    match = _SPEC.fullmatch(value)
    return f"{match[2]}{match[1]}" if match else value[:40]


def _kind(values: list[str]) -> str:
    if any(value.startswith("Literal[") for value in values):
        return "python"
    specs = [_SPEC.fullmatch(value) for value in values]
    if not all(specs):
        return "other"
    return "shape" if len({match[1] for match in specs}) > 1 else "dtype"
