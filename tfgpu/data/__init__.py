"""Input: sources, splits, and batches whose order and augmentation can be repeated.

Example:
    >>> from tfgpu import data
    >>> digits = data.pipeline("digits", global_batch=64, augment="auto", seed=1)
    >>> [len(x) for x, y in digits.train][-2:]
    [64, 42]
"""

import importlib

_PUBLIC = {
    "pipeline": "tfgpu.data.batches",
    "Data": "tfgpu.data.batches",
    "Info": "tfgpu.data.batches",
    "Feed": "tfgpu.data.feed",
    "Sequences": "tfgpu.data.sequences",
    "attention_mask": "tfgpu.data.sequences",
    "bucket": "tfgpu.data.sequences",
    "pack": "tfgpu.data.sequences",
    "retry": "tfgpu.data.retry",
    "parse_source": "tfgpu.data.names",
    "parse_stages": "tfgpu.data.stages",
    "write_shards": "tfgpu.data.writer",
    "check_shards": "tfgpu.data.manifest",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    # On first use: a wrong name of a source is found without starting TensorFlow.
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value
