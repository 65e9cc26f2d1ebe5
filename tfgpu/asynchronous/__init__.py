"""Training in which replicas or workers do not wait for each other in every step."""

from tfgpu.lazy import on_first_use

_PLACES = {
    "evaluate_checkpoints": "tfgpu.asynchronous.evaluation",
    "on_workers": "tfgpu.asynchronous.parameter_server",
}

__all__ = sorted(_PLACES)
__getattr__ = on_first_use(__name__, _PLACES)
