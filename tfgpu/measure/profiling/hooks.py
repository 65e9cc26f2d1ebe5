"""Hooks of the profiler: reads of tensors, calls of tf.functions, functions in tf.data, and trace files.

They are active only during a profile.
"""

import contextlib
import gc
import sys
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.compat.patch import wrapped
from tfgpu.core import step_blocks

HOST_READ = "tfgpu.host_read"
"""The event around a read of a tensor by the user's code; its stat is `where`."""
MOST_STEPS = 64
"""Most steps in a block during a profile: a trace grows with each."""

_LIBRARIES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib", "stdlib"))
_OURS = str(Path(__file__).resolve().parents[2])
# Our files through which a script calls TensorFlow.
_SEAMS = ("hooks.py", "patch.py", "rng.py", "nested_graphs.py")


class Listener(Protocol):
    """A profile that is notified of calls.

    Attributes:
        is_on: the profiler records.
    """

    is_on: bool

    def before_call(self, name: str) -> None:
        """Called before Python calls a tf.function or, with the name `"gradient"`, an eager tape's `gradient`."""

    def note_plain(self, where: str, replicas: int) -> None:
        """Called when `strategy.run` gets whole batches, so that every replica computes all rows."""


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


class BrokenSpace(Exception):
    """A file is not an XSpace message."""


def space_of(path: Path) -> Any:
    """Reads an XSpace message.

    Raises:
        BrokenSpace: the file is something else, or incomplete.
    """
    from google.protobuf.message import DecodeError

    # TensorFlow's own description of the message; no public module has it.
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    try:
        return xplane_pb2.XSpace.FromString(path.read_bytes())
    except DecodeError as error:
        raise BrokenSpace("it does not parse") from error


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Notifies the listener of calls, reads and whole batches in the block."""
    # Must not create a tensor, which initializes the devices: the script may still configure them.
    with contextlib.ExitStack() as held:
        held.enter_context(wrapped("Function.__call__", _calls(listener)))
        held.enter_context(wrapped("tf.GradientTape.gradient", _calls(listener, "gradient")))
        held.enter_context(wrapped("EagerTensorBase.numpy", _reads(listener)))
        held.enter_context(wrapped("tf.distribute.Strategy.run", _runs(listener)))
        held.enter_context(wrapped(step_blocks.Pace, _few_steps, "of"))
        yield


def _few_steps(stock, self, left):
    return min(stock(self, left), MOST_STEPS)


def _calls(listener: Listener, name: str = "") -> Callable:
    def call(stock, self, *args, **kwargs):
        if not tf.inside_function():
            listener.before_call(name or getattr(self, "__name__", "function"))
        return stock(self, *args, **kwargs)

    return call


def _reads(listener: Listener) -> Callable:
    def read(stock, self):
        # TensorFlow itself also reads tensors, for gradients and shapes.
        where = _where(private.READERS) if listener.is_on else None
        if where is None:
            return stock(self)
        with tf.profiler.experimental.Trace(HOST_READ, where=where):
            return stock(self)

    return read


def _runs(listener: Listener) -> Callable:
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
        found[Stage(kind, _before(dataset), function.__name__, where)] = None
    return tuple(found)


def _before(dataset: Any) -> int:
    """The number of stages before a pipeline's last one, along its first inputs."""
    count = 0
    while inputs := private.sources_of(dataset):
        dataset = inputs[0]
        count += 1
    return count
