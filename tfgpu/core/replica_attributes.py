"""Keeps what Python holds separate for each replica that traces a step.

The replicas of one process trace the same Python objects, each in its own thread, and every collective switches
threads. After it, a replica would find another replica's tensors in `Layer.losses`, in an attribute that a model sets
for its loss (`self.z = ...`), or in a list of skip connections. Where a trial finds that code counts its calls, draws
from a generator of Python's or NumPy's or keeps something for its next call, each replica begins with what there was
before the step (`PythonState`), and so ends with what one device has.
"""

import contextlib
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

import tensorflow as tf

from tfgpu.compat.keras import call_context
from tfgpu.compat.layers import layers_within
from tfgpu.compat.patch import wrap
from tfgpu.core import replication, step_context
from tfgpu.core.state import python_places, python_state

_log = logging.getLogger(__name__)
_state = step_context.Slot("replica_attributes.state")


def isolate_replica_attributes() -> None:
    """Restores a replica's attributes of its layers after each collective."""

    @wrap("tf.distribute.ReplicaContext.merge_call")
    def merge_call(stock, self, *args, **kwargs):
        state: PythonState | None = _state.get()
        with _preserved(_layers()), state.preserved() if state is not None else contextlib.nullcontext():
            return stock(self, *args, **kwargs)


def of_model(model):
    """Inside the block, this replica has its own attributes of the model's layers, also between calls of the model."""
    return step_context.scope(models=(model,))


class PythonState:
    """What a step changes in Python, of which each replica has its own; all of them begin a step with the same.

    It holds what is noted of each piece of the step, so that a step that changes nothing costs nothing.
    """

    def __init__(self):
        self._start: dict[tuple, tuple[python_state.Place, object]] = {}  # each place, and what a step finds there
        self._noted: dict[tuple, list[object]] = {}  # what an `id` is of
        self._is_traced = False

    def note(self, things: Iterable[object], names: Iterable[str], layers: Iterable[object] | None = None) -> None:
        """Notes that a piece of the step changes values of some names, before it does.

        Args:
            things: the piece and what it works on.
            names: as of `python_state.Kept.changes`.
            layers: as of `python_state.Kept`.
        """
        things, names = list(things), tuple(names)
        piece = *map(id, things), names
        if names and piece not in self._noted:
            self._noted[piece] = things
            for place in python_state.Kept(things, layers).places(names):
                self._start.setdefault(place.key, (place, place.value()))

    @property
    def names(self) -> set[str]:
        """Those of all that was noted."""
        return {name for *_, names in self._noted for name in names}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Surrounds an eager step of all replicas, or a trace of one; each trace begins with what the first one saw."""
        if tf.executing_eagerly() or not self._is_traced:
            self._start = {key: (place, place.value()) for key, (place, _) in self._start.items()}
            self._is_traced = not tf.executing_eagerly()
            yield
            return
        with self.preserved():
            yield

    @contextlib.contextmanager
    def on_replica(self) -> Iterator[None]:
        """Surrounds what one replica runs."""
        self._give({})
        with _state.set_to(self):
            yield

    @contextlib.contextmanager
    def preserved(self) -> Iterator[None]:
        """Lets others run in the block."""
        before = {key: place.value() for key, (place, _) in self._start.items()}
        try:
            yield
        finally:
            self._give(before)

    def _give(self, values: dict) -> None:
        """Gives values back; of what was noted since, those with which the step began."""
        for key, (place, start) in self._start.items():
            place.give(values.get(key, start))


def note(things: Iterable[object], names: Iterable[str], layers: Iterable[object] | None = None) -> None:
    """Notes what a piece of this replica's step changes in Python; see `PythonState.note`."""
    state: PythonState | None = _state.get()
    if state is not None:
        state.note(things, names, layers)


class Found(Protocol):
    """What a trial has found: names of generators of random numbers that code draws from, and of what it counts."""

    @property
    def generators(self) -> Iterable[str]: ...
    @property
    def counts(self) -> Iterable[str]: ...


def tell(
    name: str, found: Found, strategy: tf.distribute.Strategy, shared: Iterable[str] = (), *, is_eager: bool
) -> None:
    """Warns of what code changes in Python where that may not be one device's.

    Args:
        name: of the code.
        found: what it changes.
        strategy: under which it runs.
        shared: names of what all replicas of a process change, and see.
        is_eager: it runs in each step, not when a step is traced.
    """
    seed = "Use `keras.random` with a `keras.random.SeedGenerator` instead."
    if shared or (found.counts and not is_eager):
        how = "each replica does this, and sees the others' changes"
        traced = "this happens when TensorFlow traces the step, not in each step"
        _log.warning(
            "%s changes Python state (%s): %s, so results that depend on it may differ. Count in a `tf.Variable`, or "
            "use `optimizer.iterations`.",
            name,
            _listed(shared or found.counts),
            how if is_eager else traced,
        )
    if found.generators and not is_eager:
        text = (
            "%s draws from a generator of Python or NumPy (%s). This happens when TensorFlow traces the step, not in "
            "each step: all steps get the same numbers, perhaps not those of one device. %s"
        )
        _log.warning(text, name, _listed(found.generators), seed)
    elif found.generators and replication.spans_processes(strategy):
        text = (
            "%s draws from a generator of Python or NumPy (%s), and each worker has its own. Give all the same seed. %s"
        )
        _log.warning(text, name, _listed(found.generators), seed)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{each}`" for each in names)


def _layers() -> list:
    called = call_context()
    models = (*step_context.current().models, *([called.entry_layer] if called is not None else ()))
    return list({id(layer): layer for model in models for layer in layers_within(model)}.values())


@contextlib.contextmanager
def _preserved(layers: list):
    before = [(vars(layer), dict(vars(layer)), _snapshot(vars(layer))) for layer in layers]
    try:
        yield
    finally:
        for attributes, all_before, was in before:
            for name in [n for n, value in attributes.items() if n not in was and _holds_tensors(value)]:
                if name in all_before:
                    attributes[name] = all_before[name]
                else:
                    del attributes[name]  # made by another replica
            for name, (value, content) in was.items():
                attributes[name] = value
                if content is not None and _differ(value, content):
                    _restore(value, content)


def _snapshot(attributes: dict) -> dict[str, tuple]:
    """The attributes that may hold a step's tensors: each value, and the content of a list or dict."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, (list, dict)):
            found[name] = value, dict(value) if isinstance(value, dict) else list(value)
        elif isinstance(value, tuple) or _is_tensor(value):
            found[name] = value, None
    return found


def _is_tensor(value) -> bool:
    return isinstance(value, python_places.TENSORS)


def _holds_tensors(value) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(map(_is_tensor, values))


def _differ(value, content) -> bool:
    """Whether other replicas have changed a list or dict that holds, or held, tensors."""
    if isinstance(value, dict):
        is_same = value.keys() == content.keys() and all(value[key] is content[key] for key in content)
    else:
        is_same = len(value) == len(content) and all(a is b for a, b in zip(value, content, strict=True))
    return not is_same and (_holds_tensors(value) or _holds_tensors(content))


def _restore(value, content) -> None:
    # Bypasses Keras's tracking of a layer's lists.
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, content)
    else:
        list.clear(value)
        list.extend(value, content)
