"""Reads examples from files: finds the corrupt ones before training starts, keeps in memory what fits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.data.examples import Examples, labels_of
from tfgpu.errors import InputError


@dataclass(frozen=True)
class Reading:
    """How to read files.

    Attributes:
        image_size: (height, width) to resize images to, or None to keep their own.
        skip_corrupt: leave corrupt examples out rather than stop.
        memory_bytes: the most bytes of decoded examples to keep in memory.
        examine_bytes: files of at most this many bytes together are all decoded once before training.
            Larger sets are not, unless `skip_corrupt`: there a corrupt example stops training when it is
            met, and is named.
        any_size: images may have different sizes, for copying them as they are.
    """

    image_size: tuple[int, int] | None = None
    skip_corrupt: bool = False
    memory_bytes: int = 1 << 30
    examine_bytes: int = 2 << 30
    any_size: bool = False


@dataclass(frozen=True)
class Files:
    """Examples as they lie in files.

    Attributes:
        name: the source's name.
        count: how many examples.
        size: bytes of all files together.
        read: index (int64 scalar tensor) -> (example, label): uint8 [height, width, 1 to 4] for an image.
        label: index -> label alone, without decoding the example.
        where: index -> string tensor that names the file (and the place in it).
        own: the source's own parts, name to int64 indices.
        class_names: one name a class, where they are known.
        lost: names of what is known to be corrupt already.
        encoded: index -> the encoded image, for sources of images.
        file_of: int64 [count], the number of the file that each lies in.
        labels: [count], where they are known without reading.
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
    file_of: np.ndarray | None = None
    labels: np.ndarray | None = None


def check_size(image_size) -> tuple[int, int] | None:
    """Makes an image size given as a side or as (height, width) a pair; None stays None.

    Raises:
        InputError: it is neither.
    """
    if image_size is None:
        return None
    pair = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size, image_size)
    if len(pair) != 2 or any(isinstance(s, bool) or not isinstance(s, (int, np.integer)) or s < 1 for s in pair):
        raise InputError(
            f"`image_size` must be a side or (height, width) in pixels. Received: {image_size!r}. Try 224."
        )
    return int(pair[0]), int(pair[1])


def check_unsized(name: str, image_size) -> None:
    """Raises `InputError` if an image size was given for examples that are no image files."""
    if image_size is not None:
        raise InputError(f"`image_size` resizes images of files only. Received: {image_size} for {name}. Leave it out.")


def decode_image(encoded: tf.Tensor) -> tf.Tensor:
    """Decodes JPEG, PNG, BMP or the first frame of a GIF to uint8 [height, width, channels]."""
    image = tf.io.decode_image(encoded, channels=0, expand_animations=False)
    return tf.ensure_shape(image, [None, None, None])


def shape_image(image: tf.Tensor, *, channels: int, size: tuple[int, int] | None) -> tf.Tensor:
    """Gives a uint8 image 1 or 3 channels (alpha is dropped) and the wanted size; uint8 again, rounded."""
    own = tf.shape(image)[-1]
    wanted = tf.where(own < 3, [0, 0, 0], [0, 1, 2]) if channels == 3 else tf.constant([0])
    image = tf.gather(image, wanted, axis=-1)
    return image if size is None else tf.ensure_shape(resize(image, size), [*size, channels])


def resize(image: tf.Tensor, size: tuple[int, int]) -> tf.Tensor:
    """Resizes a uint8 image, smoothly, to (height, width); uint8 again, rounded."""
    resized = tf.image.resize(image, size, method="bilinear", antialias=True)
    return tf.cast(tf.clip_by_value(tf.round(resized), 0.0, 255.0), tf.uint8)


def open_files(files: Files, reading: Reading) -> Examples:
    """Examines the files, then keeps the decoded examples or a way to read them.

    Returns:
        Examples in memory if they fit, else ones that are read as they are needed; the same values either
        way.

    Raises:
        InputError: a corrupt example (named, unless `skip_corrupt`), images of different sizes, no examples.
    """
    whole = reading.skip_corrupt or files.size <= reading.examine_bytes
    survey = _Survey(files, reading, whole)
    lost = (*files.lost, *survey.lost)
    if lost and not reading.skip_corrupt:
        raise InputError(
            f"Corrupt: {lost[0]}{f' ({len(lost)} in all)' if len(lost) > 1 else ''}. "
            "Mend or remove it, or leave such examples out with skip_corrupt (--skip-corrupt)."
        )
    if not len(survey.good):
        raise InputError(f"{files.name}: none of its {files.count} examples can be read. Check the files.")
    shape, channels = survey.shape(reading.image_size, reading.any_size)
    labels, class_names = labels_of(survey.labels, name=files.name, class_names=files.class_names)
    position = np.full(files.count, -1, np.int64)
    position[survey.good] = np.arange(len(survey.good))
    own = {part: position[indices][position[indices] >= 0] for part, indices in files.own.items()}
    if not len(own["train"]):
        raise InputError(f"{files.name}: none of its training examples can be read. Check the files.")
    facts = {"labels": labels, "shape": shape, "class_names": class_names, "own": own, "skipped": lost}
    if files.file_of is not None:
        facts["file_of"] = files.file_of[survey.good]
    if files.encoded is not None and channels:
        facts["encoded"] = _encoded(files, survey.good)
    array = None if None in shape else survey.stacked(channels, reading.memory_bytes)
    if array is not None:
        return Examples(files.name, array=array, **facts)
    return Examples(files.name, load=_loader(files, survey.good, shape, channels, reading, guard=not whole), **facts)


class _Survey:
    """One pass over all examples: which can be read, their shapes, labels, and values while they fit."""

    def __init__(self, files: Files, reading: Reading, whole: bool):
        self._files, self._size = files, reading.image_size
        self._kept: list[np.ndarray] | None = []
        self._images = False
        self.shapes: dict[tuple[int, ...], int] = {}  # shape -> index of the first example that has it
        good, labels, size = [], [], 0
        known = files.labels is not None and not whole  # A million labels one by one take minutes.
        for index, x, label in () if known else _readable(files, reading.image_size, whole):
            good.append(index)
            labels.append(label)
            self.shapes.setdefault(x.shape, int(index))
            self._images = x.dtype == np.uint8 and x.ndim == 3
            size += x.nbytes
            if not whole or size > reading.memory_bytes:
                self._kept = None
            if self._kept is not None:
                self._kept.append(x)
        if known:
            self._kept = None
        self.good = np.arange(files.count) if known else np.array(good, np.int64)
        self.labels = files.labels if known else np.array(labels)
        self.lost = self._describe(np.setdiff1d(np.arange(files.count), self.good))
        if not whole and len(self.good):
            x = files.read(tf.constant(self.good[0]))[0]
            self.shapes = {tuple(x.shape): int(self.good[0])}
            self._images = x.dtype == tf.uint8 and len(x.shape) == 3

    def _describe(self, missing) -> tuple[str, ...]:
        return tuple(self._files.where(tf.constant(i, tf.int64)).numpy().decode() for i in missing)

    def shape(self, size, any_size: bool) -> tuple[tuple[int | None, ...], int]:
        """Returns one example's shape and its channels (0: not an image)."""
        if not self._images:
            check_unsized(self._files.name, size)
            if len(self.shapes) > 1:
                raise InputError(f"{self._files.name}: all examples must have one shape. Received: {self._seen()}.")
            return next(iter(self.shapes)), 0
        channels = 1 if all(s[2] < 3 for s in self.shapes) else 3
        sizes = {s[:2] for s in self.shapes}
        if size is None and any_size:
            return (None, None, channels), channels
        if size is None and len(sizes) > 1:
            raise InputError(
                f"{self._files.name}: the images have different sizes. Received: {self._seen()}. "
                "Give one with image_size (--image-size), such as 224."
            )
        height, width = size or sizes.pop()
        return (height, width, channels), channels

    def _seen(self) -> str:
        seen = sorted({s[:2] if len(s) == 3 else s for s in self.shapes})
        more = f" and {len(seen) - 4} more" if len(seen) > 4 else ""
        return ", ".join("x".join(map(str, s)) for s in seen[:4]) + more

    def stacked(self, channels: int, memory_bytes: int) -> np.ndarray | None:
        if self._kept is None:
            return None
        if not channels:
            return np.stack(self._kept)
        pick = [0, 1, 2] if channels == 3 else [0]
        return np.stack([x[..., pick if x.shape[-1] >= 3 else [0] * channels] for x in self._kept])


def _readable(files: Files, size, whole: bool):
    """Yields (index, example, label) of what can be read; an empty example where only labels are wanted."""

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


def _encoded(files: Files, good):
    with tf.device("CPU:0"):
        good = tf.constant(good)
    return lambda place: files.encoded(good[place])


def _loader(files: Files, good, shape, channels, reading: Reading, guard: bool):
    with tf.device("CPU:0"):
        good = tf.constant(good)

    def read(index):
        x = files.read(index)[0]
        return tf.ensure_shape(shape_image(x, channels=channels, size=reading.image_size) if channels else x, shape)

    def load(place):
        index = good[place]
        if not guard:
            return read(index)
        # A decoder's error names no file: read in a data set of one, and look whether it came out.
        one = tf.data.Dataset.from_tensors(index).map(read).ignore_errors()
        start = (tf.constant(0), tf.zeros(shape, one.element_spec.dtype))
        count, x = one.reduce(start, lambda state, value: (state[0] + 1, tf.ensure_shape(value, shape)))
        with tf.control_dependencies([tf.debugging.Assert(tf.equal(count, 1), ["Corrupt:", files.where(index)])]):
            return tf.identity(x)

    return load
