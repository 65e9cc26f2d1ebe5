"""Further state that a checkpoint keeps: a replay memory, a penalty on weights, any object with a state."""

import logging
from collections.abc import Mapping
from typing import Any

import keras

from tfgpu.checkpoint import callback_state
from tfgpu.checkpoint.storage import Snapshot
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_KEY = "remembered"


class ExtraState:
    """Objects whose state a checkpoint carries.

    Args:
        objects: by name; each with `state()` and `put(state, model)`.

    Raises:
        InputError: it is not a mapping of names to such objects.
    """

    def __init__(self, objects: Mapping[str, Any] | None):
        if not isinstance(objects or {}, Mapping) or not all(isinstance(name, str) for name in objects or {}):
            raise InputError(f'`remember` must be a mapping such as {{"replay": replay}}. Received: {objects!r}.')
        for name, one in (objects or {}).items():
            if not callable(getattr(one, "state", None)) or not callable(getattr(one, "put", None)):
                raise InputError(
                    f"Objects in `remember` must have `state()` and `put(state, model)`, as Replay and "
                    f"ElasticWeights have. Received: {name}={one!r}."
                )
        self._objects = dict(objects or {})

    def has(self, one: Any) -> bool:
        """Whether an object is one of them."""
        return any(other is one for other in self._objects.values())

    def take(self) -> dict[str, Any]:
        """Returns their states now, as a checkpoint keeps them.

        Raises:
            InputError: a state contains something that cannot be saved.
        """
        return {_KEY: {name: _plain(name, one.state()) for name, one in self._objects.items()}}

    def put(self, read: Snapshot, model: keras.Model) -> None:
        """Restores their states from a checkpoint.

        Raises:
            InputError: the checkpoint lacks the state of one of them.
        """
        states, where = read.memory.get(_KEY, {}), read.position.directory
        for name in states.keys() - self._objects.keys():
            _log.warning("%s has the state of %r, which this run does not have: add it to `remember`.", where, name)
        for name, one in self._objects.items():
            if name not in states:
                raise InputError(
                    f"{where} was saved without {name!r} in `remember`, so its state is missing. Received: "
                    f"{sorted(self._objects)}; the checkpoint has {sorted(states)}. Use another directory, or remove "
                    f"{name!r} from `remember`."
                )
            one.put(states[name], model)


def _plain(name: str, state: Any) -> Any:
    try:
        return callback_state.plain(state)
    except callback_state.Unknown as error:
        raise InputError(
            f"The state of {name!r} contains a value of type `{error}`, which cannot be saved. Give numbers, text, "
            "arrays, lists or dicts."
        ) from None
