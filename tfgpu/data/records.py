"""TFRecord files of `tf.train.Example`: read, examined and written.

The first record tells which features hold the example and the label:

| example | meaning |
|---|---|
| `image/encoded`, `image` or `x`, bytes | an encoded image: JPEG, PNG, BMP or GIF |
| `image` or `x`, floats or integers | a flat array; its shape is in `image/shape` or `x/shape` |

| label | meaning |
|---|---|
| `image/class/label`, `label` or `y`, integers | the class, from 0; several integers serve sequence models |

Files are named by a path, a glob or a folder. `NAME-train...`, `NAME-validation...` and `NAME-test...` are
the source's own parts where a training part is among them. Records are read by their place, so the order of
an epoch is exact without reading the files through. Compressed files cannot be read by place.
"""

import glob
import os
import re
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf
from google.protobuf.message import DecodeError

from tfgpu.data.decoding import Files, Reading, decode_image, open_files
from tfgpu.data.examples import Examples
from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError

_X_NAMES = ("image/encoded", "image", "x")
_Y_NAMES = ("image/class/label", "label", "y")
_HEAD, _FOOT = 12, 4  # bytes around a record: its length with a checksum, and the data's checksum


def write(path: str | Path, examples: Iterable) -> int:
    """Writes examples as one TFRecord file that `pipeline` reads back exactly.

    uint8 images become lossless PNG; other numbers are stored as float32 or int64 with their shape. The file
    appears under its name when it is whole.

    Args:
        path: the file; its name must contain `.tfrecord`.
        examples: `(x, y)` pairs; y is an integer or an array of integers.

    Returns:
        How many were written.

    Raises:
        InputError: a wrong file name, or an example that is no number.

    Example:
        >>> import tempfile
        >>> image = np.zeros([8, 8, 1], np.uint8)
        >>> write(tempfile.mkdtemp() + "/two.tfrecord", [(image, 3), (image + 1, 4)])
        2
    """
    path = Path(path)
    if ".tfrecord" not in path.name:
        raise InputError(f"A TFRecord file's name must contain '.tfrecord'. Received: {str(path)!r}.")
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    count = 0
    try:
        with tf.io.TFRecordWriter(str(aside)) as writer:
            for x, y in examples:
                writer.write(_example(np.asarray(x), np.asarray(y), count).SerializeToString())
                count += 1
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return count


def open_records(pattern: str, reading: Reading) -> Examples:
    """Reads the TFRecord files that a path, a glob or a folder names.

    Args:
        pattern: the path, glob or folder.
        reading: size, corrupt records, memory.

    Returns:
        The examples, in the order of the file names and of the records.

    Raises:
        InputError: no such files, compressed files, unknown features, a corrupt record (file and place
            named).
    """
    paths = find(pattern)
    index = Index(paths)
    features = _features(index, paths)
    files = Files(
        name=Path(pattern).name,
        count=len(index.offsets),
        size=sum(p.stat().st_size for p in paths),
        read=lambda i: _parse(index.record(i), features),
        label=lambda i: _parse_label(index.record(i), features),
        where=index.where,
        own=_own_parts(paths, index),
        lost=index.lost,
    )
    return open_files(files, reading)


def find(pattern: str) -> list[Path]:
    """Lists the files that a path, a glob or a folder names, sorted.

    Raises:
        InputError: there is none.
    """
    path = Path(pattern)
    if path.is_dir():
        names = sorted(p for p in path.iterdir() if ".tfrecord" in p.name and not p.name.startswith("."))
    else:
        names = [path] if path.is_file() else sorted(Path(p) for p in glob.glob(pattern))
    if not names:
        raise InputError(
            f"No TFRecord files at {pattern!r}. Give a file, a folder or a glob such as 'data/*.tfrecord'."
        )
    return names


class Index:
    """Where each record of some files begins, so that any of them can be read by its number.

    Only the records' headers are read. A broken header ends its file: what follows cannot be found; it is
    named in `lost`.

    Args:
        paths: the files.

    Raises:
        InputError: a file is compressed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "a.tfrecord"
        >>> _ = write(path, [([1.0], 0), ([2.0], 1)])
        >>> Index([path]).offsets.tolist()[0]
        0
    """

    def __init__(self, paths: list[Path]):
        lost, offsets, file_of, places = [], [], [], []
        for number, path in enumerate(paths):
            starts, broken = _scan(path)
            offsets += starts
            file_of += [number] * len(starts)
            places += range(len(starts))
            if broken:
                lost.append(f"record {len(starts)} of {path} and what follows it")
        self.lost = tuple(lost)
        self.offsets, self.file_of = np.array(offsets, np.int64), np.array(file_of, np.int64)
        with tf.device("CPU:0"):
            self._paths = tf.constant([str(p) for p in paths])
            self._offsets, self._file_of = tf.constant(self.offsets), tf.constant(self.file_of)
            self._places = tf.constant(np.array(places, np.int64))

    def record(self, i: tf.Tensor) -> tf.Tensor:
        """Reads record `i` as a string tensor; its checksums are compared."""
        opened = tf.raw_ops.TFRecordDatasetV2(
            filenames=self._paths[self._file_of[i]][None],
            compression_type="",
            buffer_size=0,
            byte_offsets=self._offsets[i][None],
        )
        one = tf.data.experimental.from_variant(opened, tf.TensorSpec([], tf.string)).take(1)
        return one.get_single_element()

    def where(self, i: tf.Tensor) -> tf.Tensor:
        """Names record `i`: its place in its file, from 0, and the file."""
        return tf.strings.join(
            ["record ", tf.strings.as_string(self._places[i]), " of ", self._paths[self._file_of[i]]]
        )


def _scan(path: Path) -> tuple[list[int], bool]:
    """Returns where the records begin, and whether the file ends in something that is no record."""
    starts, size, place = [], path.stat().st_size, 0
    with open(path, "rb") as file:
        if file.read(2) == b"\x1f\x8b":
            raise InputError(
                f"{path} is compressed, so its records cannot be read by place. Decompress it: gunzip {path}."
            )
        while place < size:
            file.seek(place)
            head = file.read(_HEAD)
            if len(head) < _HEAD or struct.unpack("<I", head[8:])[0] != _masked_checksum(head[:8]):
                return starts, True
            after = place + _HEAD + struct.unpack("<Q", head[:8])[0] + _FOOT
            if after > size:
                return starts, True
            starts.append(place)
            place = after
    return starts, False


def _checksum_table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_TABLE = _checksum_table()


def _masked_checksum(data: bytes) -> int:
    """CRC-32C, rotated and shifted as the format does; of eight bytes only, so Python is quick enough."""
    value = 0xFFFFFFFF
    for byte in data:
        value = _TABLE[(value ^ byte) & 0xFF] ^ (value >> 8)
    value ^= 0xFFFFFFFF
    return (((value >> 15) | (value << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def _features(index: Index, paths) -> dict:
    """Learns from the first readable record which features hold the example and the label."""
    example = _first_example(index, paths)
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
    return {"x": x, "y": y, "kind": kinds[x], "shape": tuple(shape or (count,)), "labels": many}


def _first_example(index: Index, paths) -> tf.train.Example:
    for i in range(len(index.offsets)):
        try:
            return tf.train.Example.FromString(index.record(tf.constant(i, tf.int64)).numpy())
        except (tf.errors.OpError, DecodeError):
            continue
    detail = f" Corrupt: {index.lost[0]}." if index.lost else ""
    raise InputError(f"No readable records in {', '.join(map(str, paths[:3]))}.{detail} Write them again.")


def _parse(record: tf.Tensor, features: dict) -> tuple[tf.Tensor, tf.Tensor]:
    if features["kind"] == "bytes_list":
        spec = tf.io.FixedLenFeature([], tf.string)
    else:
        dtype = tf.float32 if features["kind"] == "float_list" else tf.int64
        spec = tf.io.FixedLenFeature(features["shape"], dtype)
    parsed = tf.io.parse_single_example(record, {features["x"]: spec, features["y"]: _label_spec(features)})
    x = parsed[features["x"]]
    return decode_image(x) if features["kind"] == "bytes_list" else x, parsed[features["y"]]


def _parse_label(record: tf.Tensor, features: dict) -> tf.Tensor:
    return tf.io.parse_single_example(record, {features["y"]: _label_spec(features)})[features["y"]]


def _label_spec(features: dict) -> tf.io.FixedLenFeature:
    return tf.io.FixedLenFeature([] if features["labels"] == 1 else [features["labels"]], tf.int64)


def _own_parts(paths, index: Index) -> dict[str, np.ndarray]:
    """Reads the parts out of the file names, where one of them is called train."""
    words = [set(re.split(r"[^a-z]+", p.name.lower())) for p in paths]
    part_of = [next((part for part in PARTS if part in w), None) for w in words]
    if "train" not in part_of or None in part_of or set(part_of) == {"train"}:
        return {"train": np.arange(len(index.offsets))}
    numbers = {part: [i for i, p in enumerate(part_of) if p == part] for part in PARTS if part in part_of}
    return {part: np.flatnonzero(np.isin(index.file_of, files)) for part, files in numbers.items()}


def _example(x: np.ndarray, y: np.ndarray, number: int) -> tf.train.Example:
    if y.dtype.kind not in "iub" or x.dtype.kind not in "fiub":
        raise InputError(f"Example {number}: x must be numbers and y integers. Received: {x.dtype} and {y.dtype}.")
    label = tf.train.Feature(int64_list=tf.train.Int64List(value=np.ravel(y).tolist()))
    if x.dtype == np.uint8 and x.ndim == 3 and x.shape[-1] in (1, 3):
        encoded = tf.train.BytesList(value=[tf.io.encode_png(x).numpy()])
        named = {"image/encoded": tf.train.Feature(bytes_list=encoded), "image/class/label": label}
        return tf.train.Example(features=tf.train.Features(feature=named))
    flat = np.ravel(x)
    if x.dtype.kind == "f":
        values = tf.train.Feature(float_list=tf.train.FloatList(value=flat.astype(np.float32)))
    else:
        values = tf.train.Feature(int64_list=tf.train.Int64List(value=flat.tolist()))
    shape = tf.train.Feature(int64_list=tf.train.Int64List(value=x.shape))
    return tf.train.Example(features=tf.train.Features(feature={"x": values, "x/shape": shape, "y": label}))
