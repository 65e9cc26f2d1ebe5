"""Models that do not fit on one device, spread over several, with what one device would have learned."""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
