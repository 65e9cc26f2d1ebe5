"""Models that do not fit on one device, spread over several, with what one device would have learned."""

from tfgpu.lazy import on_first_use

_PLACES = {
    "Layout": "tfgpu.parallel.planning.layouts",
    "Mesh": "tfgpu.parallel.mesh",
    "Transformer": "tfgpu.parallel.planning.workload",
    "apply": "tfgpu.parallel.hybrid",
    "connect": "tfgpu.parallel.processes",
    "memory_by_device": "tfgpu.parallel.memory",
    "picture": "tfgpu.parallel.pictures",
    "pipeline": "tfgpu.parallel.pipeline",
    "place": "tfgpu.parallel.placement",
    "plan": "tfgpu.parallel.planning.planner",
    "predict": "tfgpu.parallel.planning.planner",
    "recompute": "tfgpu.parallel.recomputation",
    "shard": "tfgpu.parallel.sharded_optimizer",
    "tensor": "tfgpu.parallel.tensor",
}

__all__ = sorted(_PLACES)
__getattr__ = on_first_use(__name__, _PLACES)
