"""Spreads models that do not fit on one device over several, with the results of one device."""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
