"""Training in which replicas or workers do not wait for each other in every step."""

import importlib

_PLACES = {
    "evaluate_checkpoints": "tfgpu.asynchronous.evaluation",
    "on_workers": "tfgpu.asynchronous.parameter_server",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str):
    if name not in _PLACES:
        raise AttributeError(f"module 'tfgpu.asynchronous' has no attribute {name!r}")
    return getattr(importlib.import_module(_PLACES[name]), name)
