"""Input: sources, splits, and batches whose order and augmentation can be repeated.

Example:
    >>> from tfgpu import data
    >>> digits = data.pipeline("digits", global_batch=64, augment="auto", seed=1)
    >>> [len(x) for x, y in digits.train][-2:]
    [64, 42]
"""

from tfgpu.lazy import on_first_use

_PUBLIC = {
    "pipeline": "tfgpu.data.batches",
    "Data": "tfgpu.data.batches",
    "Info": "tfgpu.data.batches",
    "Feed": "tfgpu.data.feed",
    "Sequences": "tfgpu.data.sequences",
    "attention_mask": "tfgpu.data.sequences",
    "bucket": "tfgpu.data.sequences",
    "pack": "tfgpu.data.sequences",
    "tokenised": "tfgpu.data.tokens",
    "collated": "tfgpu.data.tokens",
    "retry": "tfgpu.data.retry",
    "parse_source": "tfgpu.data.names",
    "parse_stages": "tfgpu.data.stages",
    "write_shards": "tfgpu.data.writer",
    "check_shards": "tfgpu.data.manifest",
}
__all__ = sorted(_PUBLIC)
__getattr__ = on_first_use(__name__, _PUBLIC)  # a wrong source is found without starting TensorFlow
