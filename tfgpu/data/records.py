"""Reads and writes TFRecord files of `tf.train.Example`.

The first record determines which features are the example and the label:

| example | meaning |
|---|---|
| `image/encoded`, `image` or `x`, bytes | an encoded image: JPEG, PNG, BMP or GIF |
| `image` or `x`, floats or integers | a flat array; its shape is in `image/shape` or `x/shape` |

| label | meaning |
|---|---|
| `image/class/label`, `label` or `y`, integers | the class, from 0; several integers for sequence models |

A path, a glob or a folder selects the files. `NAME-train...`, `NAME-validation...` and `NAME-test...` are the source's
own splits if there is a training split. Records are accessed at random, so the order of an epoch is exact without
reading the files from start to end. Compressed files are not supported. If `tfgpu.data.writer` wrote the files, their
index has all of this, and opening them reads no records.
"""

import glob
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tfgpu import atomic
from tfgpu.data import manifest
from tfgpu.data.decoding import Files, Reading, decode_image, open_files
from tfgpu.data.examples import Examples
from tfgpu.data.places import Index
from tfgpu.data.position import on_cpu
from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError

_X_NAMES = ("image/encoded", "image", "x")
_KINDS = {".tfrecord": "TFRecord", ".csv": "CSV", ".parquet": "Parquet", ".npz": "NPZ"}
_Y_NAMES = ("image/class/label", "label", "y")

_log = logging.getLogger(__name__)


def write(path: str | Path, examples: Iterable) -> int:
    """Writes examples as one TFRecord file that `load` reads back exactly.

    uint8 images become lossless PNG; other numbers are stored as float32 or int64 with their shape. The file appears
    under its name when it is complete.

    Args:
        path: the file; its name must contain `.tfrecord`.
        examples: `(x, y)` pairs; y is an integer or an array of integers.

    Returns:
        The number of examples.

    Raises:
        InputError: a wrong file name, or an example that is not numeric.

    Example:
        >>> import tempfile
        >>> image = np.zeros([8, 8, 1], np.uint8)
        >>> write(tempfile.mkdtemp() + "/two.tfrecord", [(image, 3), (image + 1, 4)])
        2
    """
    path = Path(path)
    if ".tfrecord" not in path.name:
        raise InputError(f"A TFRecord file's name must contain '.tfrecord'. Received: {str(path)!r}.")
    count = 0
    with atomic.replacing(path, suffix=".part") as aside, tf.io.TFRecordWriter(str(aside)) as writer:
        for x, y in examples:
            writer.write(serialize(np.asarray(x), np.asarray(y), number=count))
            count += 1
    return count


def open_records(pattern: str, reading: Reading) -> Examples:
    """Opens the TFRecord files at a path, glob or folder.

    Args:
        pattern: the path, glob or folder.
        reading: size, corrupt records, memory.

    Returns:
        The examples, ordered by file name and record.

    Raises:
        InputError: no such files, compressed files, unknown features, a corrupt record, or a shard that does not match
            its index.
    """
    paths = find(pattern)
    return open_shards(paths, _listed(Path(pattern), paths, reading.skip_corrupt), reading, name=Path(pattern).name)


def open_shards(
    paths: Sequence, listed: manifest.Manifest | None, reading: Reading, *, name: str, index_of: type[Index] = Index
) -> Examples:
    """Opens TFRecord files.

    Args:
        paths: the files: `Path`, or what `index_of` reads.
        listed: their index file, which matches them; None reads them to find what they hold.
        reading: size, corrupt records, memory.
        name: the source's name, if there is no index file.
        index_of: gives access to records by place.

    Raises:
        InputError: compressed files, unknown features, or a corrupt record.
    """
    if listed is None:
        index = index_of(paths)
        features, own = _features(index, paths), parts_of(paths)
        own = {part: np.flatnonzero(np.isin(index.file_of, files)) for part, files in own.items()}
        facts = {"name": name, "label": lambda i: _parse_label(index.record(i), features), "own": own}
    else:
        index, features, facts = _from_manifest(listed, paths, index_of)
    files = Files(
        count=len(index.offsets),
        size=sum(p.stat().st_size for p in paths),
        read=lambda i: _parse(index.record(i), features, reading.image_size),
        where=index.where,
        lost=index.lost,
        encoded=(lambda i: _parse_encoded(index.record(i), features)) if features["kind"] == "bytes_list" else None,
        paths=tuple(paths),
        ahead=index.ahead,
        **facts,
    )
    return open_files(files, reading)


def _listed(pattern: Path, paths: list[Path], skip_corrupt: bool) -> manifest.Manifest | None:
    """Returns the files' index, if they have one and match it."""
    listed = manifest.find(pattern) if pattern.is_dir() else manifest.of_files(paths)
    if listed is None:
        return None
    shards = {shard.file: shard for shard in listed.shards}
    try:
        if pattern.is_dir():
            manifest.check_files(pattern, listed)
        for path in paths:
            manifest.check_shard(path, shards[path.name])
    except InputError as error:
        if not skip_corrupt:
            raise
        _log.warning("%s Reading the files without the index, in their order on disk.", error)
        return None
    return listed


def _from_manifest(listed: manifest.Manifest, paths: Sequence, index_of: type[Index]) -> tuple[Index, dict, dict]:
    """The records in the source's order, their features, and what else the files' index says of them."""
    path_of = {path.name: path for path in paths}
    shards = sorted((shard for shard in listed.shards if shard.file in path_of), key=lambda s: PARTS.index(s.part))
    index = index_of([path_of[shard.file] for shard in shards], known=[shard.offsets() for shard in shards])
    part_of = np.repeat([PARTS.index(shard.part) for shard in shards], [shard.examples for shard in shards])
    # The source's order: a split's examples were dealt to its shards round-robin.
    order = np.lexsort((index.file_of, index.places, part_of))
    index = index.reordered(order)
    features = {**listed.features, "shape": tuple(listed.features["shape"]), "dtype": listed.dtype}
    own = {PARTS[number]: np.flatnonzero(part_of == number) for number in np.unique(part_of)}
    own = own if "train" in own else {"train": np.arange(len(order))}
    facts = {"name": listed.name, "own": own, "class_names": listed.class_names}
    if any(shard.labels is None for shard in shards):
        return index, features, {**facts, "label": lambda i: _parse_label(index.record(i), features)}
    labels = np.concatenate([manifest.unpack(shard.labels, shard.examples) for shard in shards])[order]
    label_of = on_cpu(labels)
    return index, features, {**facts, "label": lambda i: label_of[i], "labels": labels}


def find(pattern: str, *, end: str = ".tfrecord") -> list[Path]:
    """Lists the files at a path, glob or folder, sorted; in a folder, those with `end` in their names.

    Raises:
        InputError: there are no such files.
    """
    path = Path(pattern)
    if path.is_dir():
        names = sorted(p for p in path.iterdir() if end in p.name and not p.name.startswith("."))
    else:
        names = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(pattern))
    if not names:
        raise InputError(
            f"No {_KINDS.get(end, end)} files at {pattern!r}. Use a file, a folder or a glob such as 'data/*{end}'."
        )
    return names


def _features(index: Index, paths) -> dict:
    """Finds the example's and the label's feature in the first readable record."""
    for i in range(len(index.offsets)):
        try:
            example = tf.train.Example.FromString(index.record(tf.constant(i, tf.int64)).numpy())
            break
        except (tf.errors.OpError, DecodeError):
            continue
    else:
        detail = f" Corrupt: {index.lost[0]}." if index.lost else ""
        raise InputError(f"No readable records in {', '.join(map(str, paths[:3]))}.{detail} Write them again.")
    kinds = {name: feature.WhichOneof("kind") for name, feature in example.features.feature.items()}
    x = next((n for n in _X_NAMES if n in kinds), None)
    y = next((n for n in _Y_NAMES if n in kinds), None)
    if x is None or y is None:
        missing, choices = ("example", _X_NAMES) if x is None else ("label", _Y_NAMES)
        raise InputError(
            f"{paths[0]}: the records lack a known {missing} feature. Received: "
            f"{', '.join(sorted(kinds)) or 'none'}. Expected one of {', '.join(choices)}."
        )
    if kinds[y] != "int64_list":
        raise InputError(f"{paths[0]}: the label feature {y!r} must hold integers. Received: {kinds[y]}.")
    shape = example.features.feature[f"{x}/shape"].int64_list.value if f"{x}/shape" in kinds else None
    count = len(getattr(example.features.feature[x], kinds[x]).value)
    many = len(example.features.feature[y].int64_list.value)
    return {"x": x, "y": y, "kind": kinds[x], "shape": tuple(shape or (count,)), "labels": many, "dtype": None}


def _parse(record: tf.Tensor, features: dict, size: tuple[int, int] | None) -> tuple[tf.Tensor, tf.Tensor]:
    if features["kind"] == "bytes_list":
        spec = tf.io.FixedLenFeature([], tf.string)
    else:
        dtype = tf.float32 if features["kind"] == "float_list" else tf.int64
        spec = tf.io.FixedLenFeature(features["shape"], dtype)
    parsed = tf.io.parse_single_example(record, {features["x"]: spec, features["y"]: _label_spec(features)})
    x = parsed[features["x"]]
    if features["kind"] == "bytes_list":
        x = decode_image(x, size)
    elif features["dtype"]:
        x = tf.cast(x, features["dtype"])
    return x, parsed[features["y"]]


def _parse_encoded(record: tf.Tensor, features: dict) -> tf.Tensor:
    spec = tf.io.FixedLenFeature([], tf.string)
    return tf.io.parse_single_example(record, {features["x"]: spec})[features["x"]]


def _parse_label(record: tf.Tensor, features: dict) -> tf.Tensor:
    return tf.io.parse_single_example(record, {features["y"]: _label_spec(features)})[features["y"]]


def _label_spec(features: dict) -> tf.io.FixedLenFeature:
    return tf.io.FixedLenFeature([] if features["labels"] == 1 else [features["labels"]], tf.int64)


def parts_of(paths: list[Path]) -> dict[str, list[int]]:
    """Groups files into splits by their names: the indices of each split's files. Without a train split, all train."""
    words = [set(re.split(r"[^a-z]+", p.name.lower())) for p in paths]
    part_of = [next((part for part in PARTS if part in w), None) for w in words]
    if "train" not in part_of or None in part_of:
        return {"train": list(range(len(paths)))}
    return {part: [i for i, p in enumerate(part_of) if p == part] for part in PARTS if part in part_of}


def serialize(x: np.ndarray | bytes, y: np.ndarray, *, number: int) -> bytes:
    """Serializes one example as a record.

    Args:
        x: numbers, or an encoded image.
        y: an integer or an array of integers.
        number: the example's number, for errors.

    Raises:
        InputError: other values.
    """
    is_encoded = isinstance(x, bytes)
    if y.dtype.kind not in "iub" or not (is_encoded or x.dtype.kind in "fiub"):
        kind = "bytes" if is_encoded else x.dtype
        raise InputError(f"Example {number}: x must be numbers and y integers. Received: {kind} and {y.dtype}.")
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(y).tolist()))
    if not is_encoded and x.dtype == np.uint8 and x.ndim == 3 and x.shape[-1] in (1, 3):
        x, is_encoded = tf.io.encode_png(x).numpy(), True
    if is_encoded:
        encoded = tf.train.BytesList(value=[x])
        return _serialized({"image/encoded": tf.train.Feature(bytes_list=encoded), "image/class/label": label})
    flat = np.ravel(x)
    if x.dtype.kind == "f":
        values = tf.train.Feature(float_list=tf.train.FloatList(value=flat.astype(np.float32)))
    else:
        values = tf.train.Feature(int64_list=tf.train.Int64List(value=flat.tolist()))
    shape = tf.train.Feature(int64_list=tf.train.Int64List(value=x.shape))
    return _serialized({"x": values, "x/shape": shape, "y": label})


def _serialized(named: Mapping[str, tf.train.Feature]) -> bytes:
    return tf.train.Example(features=tf.train.Features(feature=named)).SerializeToString()
