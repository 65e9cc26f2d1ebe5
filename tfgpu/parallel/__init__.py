"""Models that do not fit on one device, spread over several, with what one device would have learned."""

from tfgpu.lazy import on_first_use

_PLACES = {
    "Layout": "tfgpu.parallel.layouts",
    "Mesh": "tfgpu.parallel.mesh",
    "Transformer": "tfgpu.parallel.workload",
    "apply": "tfgpu.parallel.hybrid",
    "pipeline": "tfgpu.parallel.pipeline",
    "place": "tfgpu.parallel.placement",
    "plan": "tfgpu.parallel.planner",
    "predict": "tfgpu.parallel.planner",
    "tensor": "tfgpu.parallel.tensor",
}

__all__ = sorted(_PLACES)
__getattr__ = on_first_use(__name__, _PLACES)
