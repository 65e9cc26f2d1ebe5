"""Measurements of a user's own job: what is slow, and what would make it quicker."""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
