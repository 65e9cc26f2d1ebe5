"""Other libraries beside TensorFlow: their arrays by DLPack, NVIDIA DALI's pipelines, kernels of your own.

Example:
    >>> import numpy as np
    >>> from tfgpu import interop
    >>> interop.from_dlpack(np.ones((2, 3), "float32")).shape
    TensorShape([2, 3])
"""

from tfgpu.lazy import on_first_use

_PUBLIC = {
    "from_dlpack": "tfgpu.interop.dlpack",
    "to_dlpack": "tfgpu.interop.dlpack",
    "dali": "tfgpu.interop.pipelines",
    "CustomOp": "tfgpu.interop.operations",
    "custom_op": "tfgpu.interop.operations",
    "build_kernel": "tfgpu.interop.building",
}
__all__ = sorted(_PUBLIC)
__getattr__ = on_first_use(__name__, _PUBLIC)
