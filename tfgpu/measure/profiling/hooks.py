"""Hooks of the profiler: reads of tensors, calls of tf.functions, functions in tf.data, and facts of the process.

The hooks are active only during a profile.
"""

import contextlib
import gc
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from tfgpu import environment
from tfgpu.cluster import Cluster
from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrapped
from tfgpu.core import step_blocks
from tfgpu.recipes import facts

HOST_READ = "tfgpu.host_read"
"""The event around a read of a tensor by the user's code; its stat is `where`."""
MOST_STEPS = 64
"""Most steps in a block during a profile: a trace grows with each."""

_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))
_OURS = str(Path(__file__).resolve().parents[2])
# Our files through which a script calls TensorFlow.
_SEAMS = ("hooks.py", "patch.py", "rng.py", "nested_graphs.py")


@dataclass(frozen=True)
class Stage:
    """A stage of a tf.data pipeline that calls a user's function.

    Args:
        kind: such as `"Map"` or `"ParallelMap"`.
        index: the number of stages before it.
        function: the function's name.
        where: its file and line.
    """

    kind: str
    index: int
    function: str
    where: str


@contextlib.contextmanager
def listening(listener: Any) -> Iterator[None]:
    """Notifies a `Session` of calls, reads and whole batches in the block.

    Args:
        listener: has `is_on`, whether the profiler records; `before_call(name)`, called before Python calls a
            tf.function or, with the name `"gradient"`, an eager tape's `gradient`; and `note_plain(where, replicas)`,
            called when `strategy.run` gets whole batches, so that every replica computes all rows.
    """
    # Must not create a tensor, which initializes the devices: the script may still configure them.
    with (
        wrapped("Function.__call__", _calls(listener)),
        wrapped("tf.GradientTape.gradient", _calls(listener, "gradient")),
        wrapped("EagerTensorBase.numpy", _reads(listener)),
        wrapped("tf.distribute.Strategy.run", _runs(listener)),
        wrapped(step_blocks.Pace, lambda stock, self, left: min(stock(self, left), MOST_STEPS), "of"),
    ):
        yield


def _calls(listener: Any, name: str = "") -> Callable:
    def call(stock, self, *args, **kwargs):
        if not tf.inside_function():
            listener.before_call(name or getattr(self, "__name__", "function"))
        return stock(self, *args, **kwargs)

    return call


def _reads(listener: Any) -> Callable:
    def read(stock, self):
        # TensorFlow itself also reads tensors, for gradients and shapes.
        where = _where(private.READERS) if listener.is_on else None
        if where is None:
            return stock(self)
        with tf.profiler.experimental.Trace(HOST_READ, where=where):
            return stock(self)

    return read


def _runs(listener: Any) -> Callable:
    def run(stock, self, fn, args=(), kwargs=None, options=None):
        values = tf.nest.flatten((args, kwargs or {}))
        batches = [value for value in values if tf.is_tensor(value) and value.shape.rank]
        spread = any(isinstance(value, tf.distribute.DistributedValues) for value in values)
        if self.num_replicas_in_sync > 1 and batches and not spread and (where := _where()):
            listener.note_plain(where, self.num_replicas_in_sync)
        return stock(self, fn, args=args, kwargs=kwargs, options=options)

    return run


def _where(through: tuple[str, ...] = ()) -> str | None:
    """The file and line of the running user code; None in calls by Keras's or tfgpu's own loop.

    Args:
        through: the only files of TensorFlow allowed on the way; empty allows all.
    """
    frame = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if any(part in file for part in private.KERAS_LOOP) or file.startswith(_OURS):
            if Path(file).name not in _SEAMS:
                return None
        elif through and private.SOURCE_FOLDER in file and not file.endswith(through):
            return None
        elif not file.startswith(("<frozen", *_LIBRARIES)) and "__autograph_generated" not in file:
            return f"{Path(file).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def functions(names: set[str]) -> list[Any]:
    """The living tf.functions with these names."""
    found = _alive(tf.types.experimental.PolymorphicFunction) if names else []
    return [each for each in found if getattr(each, "__name__", "") in names]


def _alive(kind: type) -> list[Any]:
    """All living objects of a type."""
    objects = gc.get_objects()
    # isinstance would access attributes of the objects, and some lazy modules would then import themselves.
    kinds = {each for each in {type(each) for each in objects} if issubclass(each, kind)}
    return [each for each in objects if type(each) in kinds]


def stages() -> tuple[Stage, ...]:
    """The stages with functions in all living pipelines."""
    found = {}
    for dataset in _alive(tf.data.Dataset):
        function = private.python_function_of_stage(dataset)
        code = getattr(function, "__code__", None)
        if code is None or code.co_filename.startswith(_LIBRARIES):
            continue
        kind = type(dataset).__name__.strip("_").removesuffix("Dataset")
        where = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
        before = 0  # along the first inputs
        while inputs := private.sources_of(dataset):
            dataset = inputs[0]
            before += 1
        found[Stage(kind, before, function.__name__, where)] = None
    return tuple(found)


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
    stages: tuple[Stage, ...] = ()
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
    workers, replicas = max(1, len(Cluster.from_environment().workers)), max(plain.values(), default=0)
    changed = tuple(change for each in functions(retraced) for change in changes(each))
    machine = tuple({"processor": platform.machine(), **versions}.items())
    return Around(workers, replicas, tuple(plain), changed, stages(), tuple(devices), machine, batch)


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
    shapes = {match and match[1] for match in map(_SPEC.fullmatch, values)}
    return "other" if None in shapes else "shape" if len(shapes) > 1 else "dtype"
