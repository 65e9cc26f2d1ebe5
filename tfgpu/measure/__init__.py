"""Measurements of a user's own job: what is slow, and what would make it quicker."""

from tfgpu.lazy import on_first_use

__all__ = ["profile"]
__getattr__ = on_first_use(__name__, {"profile": "tfgpu.measure.profiling.session"})
