"""Writes any source as TFRecord shards with an index, which are easy to copy, verify, shard and access at random.

    OUT/digits-train-00000-of-00008.tfrecord
    OUT/...
    OUT/index.json                              see `tfgpu.data.manifest`

`load("OUT", ...)` gives the same batches as the source. Encoded images keep their bytes; other images become
lossless PNG, other numbers float32 or int64. Only the example and its label are kept from each record.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu import atomic
from tfgpu.data import manifest, records, sources
from tfgpu.data.decoding import Reading, check_size
from tfgpu.data.examples import Examples
from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError, MachineError, whole_number

_log = logging.getLogger(__name__)


def write_shards(
    source: Any,
    out: str | Path,
    *,
    shards: int = 8,
    name: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    skip_corrupt: bool = False,
    overwrite: bool = False,
) -> manifest.Manifest:
    """Writes a source's splits as TFRecord shards with an index.

    The folder is written under a temporary name and renamed when it is complete.

    Args:
        source: any source that `load` accepts.
        out: the folder.
        shards: number of files for the training split; the other splits get files of about the same size.
        name: prefix of the file names; default: the source's name.
        image_size: side, or (height, width), in pixels to resize images to; they are then stored as PNG.
        skip_corrupt: skip corrupt examples instead of stopping.
        overwrite: replace shards that are already in the folder.

    Returns:
        The index.

    Raises:
        InputError: the source cannot be read, has fewer training examples than shards, or the folder is in use.
        MachineError: the disk has no room.

    Example:
        >>> import tempfile
        >>> out = tempfile.mkdtemp() + "/shards"
        >>> written = write_shards((np.zeros([6, 2]), [0, 1, 0, 1, 0, 1]), out, shards=2, name="few")
        >>> [(shard.file, shard.examples) for shard in written.shards]
        [('few-train-00000-of-00002.tfrecord', 3), ('few-train-00001-of-00002.tfrecord', 3)]
    """
    whole_number("shards", shards, maximum=manifest.MOST_SHARDS)
    path = manifest.check_output(out, overwrite=overwrite)
    reading = Reading(image_size=check_size(image_size), skip_corrupt=skip_corrupt, any_size=True)
    examples = sources.open_source(source, reading)
    if examples.structure is not None:
        raise InputError(
            f"Shards hold an array or image and its class. Received: {examples.name} with numbers to predict, named "
            "arrays or sample weights. Keep it in its own format, and pass it to `load`."
        )
    examples.tell_skipped(_log)
    train = len(examples.own["train"])
    if shards > train:
        raise InputError(
            f"There are more shards than training examples. Received: shards={shards}, {train} training examples in "
            f"{examples.name}. Use {train} or fewer."
        )
    is_encoded = examples.encoded is not None and image_size is None
    if not is_encoded and _is_image(examples) and examples.shape[-1] not in (1, 3):
        raise InputError(
            f"{examples.name}: uint8 images must have 1 or 3 channels. Received: shape {examples.shape}. "
            "Convert them to float32 in [0, 1]."
        )
    stem = _stem(examples.name if name is None else name)
    with atomic.replacing(path) as aside:
        try:
            aside.mkdir(parents=True)
        except OSError as error:
            raise InputError(f"Cannot write {str(aside)!r}: {error.strerror}. Use another folder.") from error
        layout = _layout(examples, shards)
        payloads = _payloads(examples, np.concatenate([indices for *_, indices in layout]), is_encoded)
        written = []
        for part, number, count, indices in layout:
            file = f"{stem}-{part}-{number:05d}-of-{count:05d}.tfrecord"
            written.append(_write_shard(aside / file, part, payloads, examples, indices))
        listed = _manifest(examples, tuple(written), is_encoded)
        listed.write(aside)
        manifest.check_output(path, overwrite=overwrite)  # another process may have written there meanwhile
    return listed


def _is_image(examples: Examples) -> bool:
    return examples.dtype == np.uint8 and len(examples.shape) == 3


def _stem(name: str) -> str:
    """Makes a file name prefix from a source's name; one that contains a split's name would be mistaken for it."""
    stem = re.sub(r"[^A-Za-z0-9_]+", "-", name).strip("-") or "data"
    words = set(re.split(r"[^a-z]+", stem.lower()))
    return "data" if words & set(PARTS) else stem


def _layout(examples: Examples, shards: int) -> list[tuple[str, int, int, np.ndarray]]:
    """Deals each split's examples to its shards round-robin: (part, number, count, indices)."""
    train = len(examples.own["train"])
    layout = []
    for part in PARTS:
        indices = np.asarray(examples.own.get(part, ()), np.int64)
        count = shards if part == "train" else min(max(round(shards * len(indices) / train), 1), len(indices))
        layout += [(part, number, count, indices[number::count]) for number in range(count)]
    return layout


def _payloads(examples: Examples, order: np.ndarray, is_encoded: bool) -> Iterator:
    """Reads the examples in the given order, in parallel: encoded images, or numbers."""
    if is_encoded:
        payload = examples.encoded
    elif _is_image(examples):
        payload = lambda i: tf.io.encode_png(examples.example(i))  # noqa: E731
    else:
        payload = examples.example
    read = tf.data.Dataset.from_tensor_slices(order).map(payload, num_parallel_calls=tf.data.AUTOTUNE)
    return read.prefetch(tf.data.AUTOTUNE).as_numpy_iterator()


def _read(payloads: Iterator, name: str):
    try:
        return next(payloads)
    except tf.errors.OpError as error:
        message = " ".join(error.message.split())
        raise InputError(f"Cannot read {name}: {message}. Skip corrupt examples with `skip_corrupt`.") from error


def _write_shard(path: Path, part: str, payloads, examples: Examples, indices) -> manifest.Shard:
    lengths = []
    try:
        with tf.io.TFRecordWriter(str(path)) as writer:
            for index in indices.tolist():
                payload = _read(payloads, examples.name)
                lengths.append(len(record := records.serialize(payload, examples.labels[index], number=index)))
                writer.write(record)
    except (OSError, tf.errors.OpError) as error:
        message = error.message if isinstance(error, tf.errors.OpError) else error.strerror
        raise MachineError(f"Cannot write {path}: {message}. Use another folder.") from error
    one_label = examples.labels.ndim == 1
    return manifest.Shard(
        file=path.name,
        part=part,
        examples=len(lengths),
        bytes=path.stat().st_size,
        sha256=manifest.digest(path),
        lengths=manifest.pack(lengths),
        labels=manifest.pack(examples.labels[indices]) if one_label else None,
    )


def _manifest(examples: Examples, written: tuple[manifest.Shard, ...], is_encoded: bool) -> manifest.Manifest:
    encoded = is_encoded or _is_image(examples)
    kind = "bytes_list" if encoded else "float_list" if examples.dtype.kind == "f" else "int64_list"
    x, y = ("image/encoded", "image/class/label") if encoded else ("x", "y")
    labels = 1 if examples.labels.ndim == 1 else examples.labels.shape[1]
    return manifest.Manifest(
        name=examples.name,
        features={"x": x, "y": y, "kind": kind, "shape": list(examples.shape), "labels": labels},
        dtype=None if encoded else examples.dtype.name,
        shape=tuple(examples.shape),
        class_names=examples.class_names,
        shards=written,
    )
