"""Reads examples from files, finds corrupt ones before training starts, and keeps decoded ones if they fit."""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data import cache, splits
from tfgpu.data.examples import Examples, labels_of
from tfgpu.data.position import on_cpu
from tfgpu.data.structure.arrays import Task
from tfgpu.errors import InputError, MachineError, whole_number

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reading:
    """How to read files.

    Attributes:
        image_size: (height, width) to resize images to, or None to keep their size.
        skip_corrupt: skip corrupt examples instead of stopping.
        cache: where to keep decoded examples: `memory`, `disk`, `none`, or `auto`: memory if they fit, else disk if
            `cache_directory` is set, else none.
        cache_directory: the folder for those on disk.
        memory_bytes: the most bytes of decoded examples to keep in memory.
        examine_bytes: files of at most this total size are all decoded once before training. Larger sets only with
            `skip_corrupt` or if they will be kept in memory; otherwise a corrupt example stops training when it is
            read, with its name.
        any_size: images may have different sizes, for copying them as they are.
        length: bytes per sequence of a corpus; None: the default, or not text.
        task: `classification` or `regression`, or a dict of these by target; None: found from the labels.
    """

    image_size: tuple[int, int] | None = None
    skip_corrupt: bool = False
    cache: str = "auto"
    cache_directory: str | Path | None = None
    memory_bytes: int = 1 << 30
    examine_bytes: int = 2 << 30
    any_size: bool = False
    length: int | None = None
    task: Task = None


@dataclass(frozen=True)
class Files:
    """Examples as stored in files.

    Attributes:
        name: the source's name.
        count: the number of examples.
        size: total bytes of the files.
        read: index (int64 scalar tensor) -> (example, label): uint8 [height, width, 1 to 4] for an image.
        label: index -> label alone, without decoding the example.
        where: index -> string tensor that names the file (and the record in it).
        own: the source's own splits, name to int64 indices.
        class_names: one name per class, if known.
        lost: names of examples already known to be corrupt.
        encoded: index -> the encoded image, for sources of images.
        labels: [count], if they are known without reading.
        paths: the files; a cache on disk uses them to detect changes.
        ahead: indices (int64 [n]) -> a tensor; begins to fetch examples that are far away.
        planes: how many of an image's last channels are masks; `read` then returns images of their last size.
    """

    name: str
    count: int
    size: int
    read: Callable[[tf.Tensor], tuple[tf.Tensor, tf.Tensor]]
    label: Callable[[tf.Tensor], tf.Tensor]
    where: Callable[[tf.Tensor], tf.Tensor]
    own: Mapping[str, np.ndarray]
    class_names: tuple[str, ...] | None = None
    lost: tuple[str, ...] = ()
    encoded: Callable[[tf.Tensor], tf.Tensor] | None = None
    labels: np.ndarray | None = None
    paths: tuple[Path, ...] = ()
    ahead: Callable[[tf.Tensor], tf.Tensor] | None = None
    planes: int = 0


def check_size(image_size) -> tuple[int, int] | None:
    """Returns an image size as a pair (height, width); a single side means a square, and None stays None.

    Raises:
        InputError: it is none of these.
    """
    if image_size is None:
        return None
    pair = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size, image_size)
    if len(pair) != 2:
        raise InputError(f"`image_size` must be a side or (height, width) in pixels. Received: {image_size!r}.")
    return whole_number("image_size", pair[0]), whole_number("image_size", pair[1])


def check_unsized(name: str, image_size) -> None:
    """Raises `InputError` if an image size was given for examples that are not image files."""
    if image_size is not None:
        raise InputError(f"`image_size` only applies to image files. Received: {image_size} for {name}. Remove it.")


def decode_image(encoded: tf.Tensor, size: tuple[int, int] | None = None) -> tf.Tensor:
    """Decodes JPEG, PNG, BMP or the first frame of a GIF to uint8 [height, width, channels].

    Args:
        encoded: string scalar.
        size: (height, width) that the image will be resized to. A JPEG at least twice as large is decoded at 1/2, 1/4
            or 1/8 of its size, which is faster and has the same smoothing effect as resizing.
    """

    def whole():
        image = tf.io.decode_image(encoded, channels=0, expand_animations=False)
        image.set_shape([None, None, None])
        return image

    def scaled():
        times = tf.reduce_min(tf.image.extract_jpeg_shape(encoded)[:2] // tf.constant(size))
        which = tf.reduce_sum(tf.cast(times >= tf.constant([2, 4, 8]), tf.int32))
        return tf.switch_case(which, [lambda r=ratio: tf.io.decode_jpeg(encoded, ratio=r) for ratio in (1, 2, 4, 8)])

    return whole() if size is None else tf.cond(tf.io.is_jpeg(encoded), scaled, whole)


def with_channels(image: tf.Tensor, channels: int, planes: int = 0) -> tf.Tensor:
    """Gives a uint8 image 1 or 3 channels, and keeps the masks behind them; alpha is dropped, and gray is repeated."""
    if planes:
        return tf.concat([with_channels(image[..., :-planes], channels), image[..., -planes:]], axis=-1)
    own = tf.shape(image)[-1]
    wanted = tf.where(own < 3, [0, 0, 0], [0, 1, 2]) if channels == 3 else tf.constant([0])
    # Gathering channels takes as long as decoding a JPEG (measured), so it is skipped if they are right already.
    image = tf.cond(own == channels, lambda: image, lambda: tf.gather(image, wanted, axis=-1))
    return tf.ensure_shape(image, [None, None, channels])


def resize(image: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Resizes a uint8 image to (height, width) with antialiasing; the result is rounded to uint8."""
    resized = tf.image.resize(image, size, method="bilinear", antialias=True)
    return tf.cast(tf.round(resized), tf.uint8)  # positive weights that sum to 1 stay within 0 to 255


def image_files(name: str, paths: Sequence[Path], labels: Sequence[int], reading: Reading, **facts: Any) -> Files:
    """Images in files, by their paths and labels; `facts` replace or complete what `Files` takes."""
    path_of, label_of = on_cpu([str(path) for path in paths]), on_cpu(labels, tf.int64)

    def encoded(i: tf.Tensor) -> tf.Tensor:
        return tf.io.read_file(tf.gather(path_of, i))

    def label(i: tf.Tensor) -> tf.Tensor:
        return tf.gather(label_of, i)

    known = {
        "size": sum(path.stat().st_size for path in paths),
        "read": lambda i: (decode_image(encoded(i), reading.image_size), label(i)),
        "where": lambda i: tf.strings.join(["the image ", path_of[i]]),
        "encoded": encoded,
        "paths": tuple(paths),
    }
    return Files(name, len(paths), label=label, labels=np.array(labels), **{**known, **facts})


def open_files(files: Files, reading: Reading) -> Examples:
    """Opens a cache of the decoded examples, or examines the files and keeps the examples as `reading.cache` says.

    Returns:
        Examples in memory, in a file, or read on demand; the values are the same.

    Raises:
        InputError: a corrupt example (unless `skip_corrupt`), images of different sizes, no examples, or too many for
            `cache="memory"`.
        MachineError: the disk has no room for `cache="disk"`.
    """
    kept = None
    if reading.cache_directory is not None:
        settings = (reading.image_size, reading.skip_corrupt, files.count)
        kept = cache.place(files.name, files.paths, reading.cache_directory, *settings)
        found = cache.find(kept)
        if found is not None:
            return found
    examples = _examine(files, reading)
    if kept is None or examples.array is not None:
        return examples
    try:
        return cache.write(kept, examples)
    except MachineError as error:
        if reading.cache == "disk":
            raise
        _log.warning("%s They are decoded on demand.", error)
        return examples


def _examine(files: Files, reading: Reading) -> Examples:
    whole = reading.skip_corrupt or files.size <= reading.examine_bytes or _fits(files, reading)
    survey = _Survey(files, reading, whole)
    lost = (*files.lost, *survey.lost)
    if lost and not reading.skip_corrupt:
        raise InputError(
            f"Corrupt: {lost[0]}{f' ({len(lost)} in total)' if len(lost) > 1 else ''}. "
            "Repair or remove it, or skip corrupt examples with skip_corrupt (--skip-corrupt)."
        )
    if not len(survey.good):
        raise InputError(f"{files.name}: none of its {files.count} examples can be read. Check the files.")
    shape, channels = survey.shape(reading.image_size, reading.any_size)
    labels, class_names = labels_of(survey.labels, name=files.name, class_names=files.class_names)
    among_good = np.full(files.count, -1, np.int64)
    among_good[survey.good] = np.arange(len(survey.good))
    own = {split: among_good[of][among_good[of] >= 0] for split, of in files.own.items()}
    if not len(own["train"]):
        raise InputError(f"{files.name}: none of its training examples can be read. Check the files.")
    facts = {"labels": labels, "shape": shape, "class_names": class_names, "own": own, "skipped": lost}
    good = on_cpu(survey.good)
    if files.encoded is not None and channels:
        facts["encoded"] = lambda place: files.encoded(tf.gather(good, place))
    if whole:
        facts["copies"] = splits.same(survey.digests)
    array = None if None in shape else survey.stacked(channels)
    if array is not None:
        return Examples(files.name, array=array, **facts)
    if reading.cache == "memory":
        raise InputError(
            f"{files.name}: {len(labels)} decoded examples of shape {shape} do not fit in memory_bytes="
            f"{reading.memory_bytes}. Increase it, or use cache='auto' or 'disk'."
        )
    as_they_are = whole and {s[2] for s in survey.shapes if len(s) == 3} <= {channels + files.planes}
    load = _loader(files, good, shape, 0 if as_they_are else channels, reading)
    if files.ahead is not None:
        facts["ahead"] = lambda places: files.ahead(tf.gather(good, places))
    where = None if whole else lambda place: files.where(tf.gather(good, place))
    return Examples(files.name, load=load, where=where, **facts)


def _fits(files: Files, reading: Reading) -> bool:
    """Whether all decoded examples may be kept in memory, judging by the first."""
    if reading.cache not in ("auto", "memory"):
        return False
    try:
        x = files.read(tf.constant(0, tf.int64))[0].numpy()
    except tf.errors.OpError:
        return False
    is_resized = x.dtype == np.uint8 and x.ndim == 3 and reading.image_size
    size = math.prod(reading.image_size) * x.shape[-1] if is_resized else x.nbytes
    return size * files.count <= reading.memory_bytes


class _Survey:
    """One pass over all examples: which are readable, their shapes and labels, and their values while they fit."""

    def __init__(self, files: Files, reading: Reading, whole: bool):
        self._files, self._size = files, reading.image_size
        self._kept: list[np.ndarray] | None = [] if reading.cache in ("auto", "memory") else None
        self._images = False
        self.digests: list[bytes] = []  # of all decoded examples; equal examples have equal ones
        self.shapes: dict[tuple[int, ...], int] = {}  # shape -> index of the first example that has it
        good, labels, size = [], [], 0
        known = files.labels is not None and not whole  # a million labels, one by one, take minutes
        size_to = None if files.planes else reading.image_size
        for index, x, label in () if known else _readable(files, size_to, whole):
            good.append(index)
            labels.append(label)
            self.shapes.setdefault(x.shape, int(index))
            self._images = x.dtype == np.uint8 and x.ndim == 3
            size += x.nbytes
            if not whole or size > reading.memory_bytes:
                self._kept = None
            if self._kept is not None:
                self._kept.append(x)
            if whole:
                self.digests.append(splits.digest(x))
        if known:
            self._kept = None
        self.good = np.arange(files.count) if known else np.array(good, np.int64)
        self.labels = files.labels if known else np.array(labels)
        self.lost = self._describe(np.setdiff1d(np.arange(files.count), self.good))
        if not whole and len(self.good):
            try:
                x = files.read(tf.constant(self.good[0]))[0]
            except tf.errors.OpError:
                self.lost = (*self.lost, *self._describe(self.good[:1]))
                return
            self.shapes = {tuple(x.shape): int(self.good[0])}
            self._images = x.dtype == tf.uint8 and len(x.shape) == 3

    def _describe(self, missing) -> tuple[str, ...]:
        return tuple(self._files.where(tf.constant(i, tf.int64)).numpy().decode() for i in missing)

    def shape(self, size, any_size: bool) -> tuple[tuple[int | None, ...], int]:
        """Returns one example's shape and its number of channels (0: not an image)."""
        if not self._images:
            check_unsized(self._files.name, size)
            if len(self.shapes) > 1:
                raise InputError(f"{self._files.name}: all examples must have one shape. Received: {self._seen()}.")
            return next(iter(self.shapes)), 0
        planes = self._files.planes
        channels = 1 if all(s[2] - planes < 3 for s in self.shapes) else 3
        sizes = {s[:2] for s in self.shapes}
        if size is None and any_size:
            return (None, None, channels + planes), channels
        if size is None and len(sizes) > 1:
            raise InputError(
                f"{self._files.name}: the images have different sizes. Received: {self._seen()}. "
                "Choose one with image_size (--image-size), such as 224."
            )
        height, width = size or sizes.pop()
        return (height, width, channels + planes), channels

    def _seen(self) -> str:
        seen = sorted({s[:2] if len(s) == 3 else s for s in self.shapes})
        more = f" and {len(seen) - 4} more" if len(seen) > 4 else ""
        return ", ".join("x".join(map(str, s)) for s in seen[:4]) + more

    def stacked(self, channels: int) -> np.ndarray | None:
        if self._kept is None:
            return None
        if not channels:
            return np.stack(self._kept)
        planes, pick = self._files.planes, [0, 1, 2] if channels == 3 else [0]
        masks = [*range(-planes, 0)]
        return np.stack(
            [x[..., [*(pick if x.shape[-1] - planes >= 3 else [0] * channels), *masks]] for x in self._kept]
        )


def _readable(files: Files, size, whole: bool):
    """Yields (index, example, label) of readable examples; the example is empty if only labels are needed."""

    def read(index):
        if not whole:
            return index, tf.zeros([0], tf.uint8), files.label(index)
        x, label = files.read(index)
        if x.dtype == tf.uint8 and x.shape.rank == 3 and size is not None:
            x = resize(x, size)
        return index, x, label

    indices = tf.data.Dataset.range(files.count)
    read_all = indices.map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    yield from read_all.ignore_errors().as_numpy_iterator()


def _loader(files: Files, good: tf.Tensor, shape, channels: int, reading: Reading):
    """Makes the function that reads the example at a position among the good ones.

    Every operation costs some microseconds per example, compared with 300 for a small JPEG (measured), so unneeded ones
    are left out; `channels` is 0 if all examples have the right number.
    """
    has_all = len(good) == files.count

    def load(place):
        x = files.read(place if has_all else tf.gather(good, place))[0]
        if channels:
            x = with_channels(x, channels, files.planes)
        if reading.image_size is not None and not files.planes and x.dtype == tf.uint8:
            x = resize(x, reading.image_size)
        return tf.ensure_shape(x, shape)

    return load
