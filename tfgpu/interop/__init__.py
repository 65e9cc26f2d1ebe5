"""Interoperability: arrays of other libraries by DLPack, NVIDIA DALI pipelines, and custom kernels.

Example:
    >>> import numpy as np
    >>> from tfgpu import interop
    >>> interop.from_dlpack(np.ones((2, 3), "float32")).shape
    TensorShape([2, 3])
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
