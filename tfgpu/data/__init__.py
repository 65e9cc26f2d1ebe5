"""Input pipelines: sources, splits, and batches with a reproducible order and augmentation.

Example:
    >>> from tfgpu import data
    >>> digits = data.load("digits", global_batch=64, augment="auto", seed=1)
    >>> [len(x) for x, y in digits.train][-2:]
    [64, 5]
"""

from tfgpu.lazy import on_first_use

__getattr__, __dir__, __all__ = on_first_use(__name__, __file__)
