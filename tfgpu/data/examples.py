"""The common form of every source: examples with an index, a label and a way to fetch them."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data.structure.arrays import Structure, Task, check_finite, has_numbers, numbers
from tfgpu.errors import InputError


@dataclass(frozen=True)
class Examples:
    """All examples of one source, indexed from 0 to n-1. Exactly one of `array`, `stored` and `load` is set.

    Attributes:
        name: the source's name in logs and reports.
        labels: [n] or [n, ...] integers from 0.
        shape: one example's shape as the model sees it.
        class_names: one name per class.
        array: [n, ...] if the examples are in memory; uint8 images stay uint8 until they are batched.
        stored: makes the [n, ...] tensor of decoded examples in a memory-mapped file.
        load: index (int64 scalar tensor) -> one example, read and decoded on demand.
        where: index -> string tensor that names an example; set if `load` may find a corrupt one.
        encoded: index -> the encoded image, a string scalar; for sources of encoded images.
        copies: int64 [n]; equal examples share a number. None: unknown, or computed from `array`.
        own: the source's own splits, name to int64 indices; always has `train`.
        skipped: the names of the corrupt examples that were skipped.
        ahead: indices (int64 [n]) -> a tensor; begins to fetch what `load` will read of examples that are far away.
        blend: how several sources make an epoch (`mixture.blended`, without its first arguments).
        structure: arrays beside the classes, gathered by index; where it has targets, `labels` are all 0.
    """

    name: str
    labels: np.ndarray
    shape: tuple[int | None, ...]
    class_names: tuple[str, ...]
    array: np.ndarray | None = None
    stored: Callable[[], tf.Tensor] | None = None
    load: Callable[[tf.Tensor], tf.Tensor] | None = None
    where: Callable[[tf.Tensor], tf.Tensor] | None = None
    encoded: Callable[[tf.Tensor], tf.Tensor] | None = None
    copies: np.ndarray | None = None
    own: Mapping[str, np.ndarray] = field(default_factory=dict)
    skipped: tuple[str, ...] = ()
    ahead: Callable[[tf.Tensor], tf.Tensor] | None = None
    blend: Any = None
    structure: Structure | None = None

    @property
    def has_classes(self) -> bool:
        """Whether what the model learns is the class of an example, or classes along a sequence."""
        return self.structure is None or self.structure.targets is None

    @property
    def decoded_shape(self) -> tuple[int | None, ...]:
        """The shape of one example as it is read: with its masks, which lie behind an image's channels."""
        planes = 0 if self.structure is None else self.structure.planes
        return (*self.shape[:-1], self.shape[-1] + planes) if planes else self.shape

    @property
    def cache(self) -> str:
        """Where decoded examples are kept: `memory`, `disk` or `none`."""
        return "memory" if self.array is not None else "disk" if self.stored is not None else "none"

    @property
    def dtype(self) -> np.dtype:
        """The dtype of examples as they are read."""
        if self.array is not None:
            return self.array.dtype
        of = self.stored() if self.stored is not None else tf.data.Dataset.range(1).map(self.load).element_spec
        return np.dtype(of.dtype.as_numpy_dtype)

    def tell_skipped(self, log: logging.Logger) -> None:
        """Warns of corrupt examples that were skipped."""
        if self.skipped:
            log.warning("%s: skipped %d corrupt example(s): %s", self.name, len(self.skipped), ", ".join(self.skipped))

    def held(self) -> tf.Tensor:
        """All examples, [n, ...], of a source that keeps them in memory or in a file."""
        return tf.constant(self.array) if self.stored is None else self.stored()

    def example(self, index: tf.Tensor) -> tf.Tensor:
        """One example, as it is read."""
        if self.load is not None:
            return self.load(index)
        with tf.device("CPU:0"):
            return tf.ensure_shape(tf.gather(self.held(), index), self.decoded_shape)


def mapped(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> Callable[[], tf.Tensor]:
    """Returns the function that maps a file of numbers into memory, as `Examples.stored`."""

    def stored() -> tf.Tensor:
        with tf.device("CPU:0"):
            return tf.raw_ops.ImmutableConst(
                dtype=tf.as_dtype(dtype), shape=shape, memory_region_name=str(path.absolute())
            )

    return stored


def from_arrays(
    x, y, *, name: str, own: Mapping[str, np.ndarray] | None = None, class_names=None, task: Task = None
) -> Examples:
    """Checks arrays and makes them `Examples`.

    Args:
        x: [n, ...] numbers. uint8 of [n, height, width] or [n, height, width, channels] are images, which become
            float32 in [0, 1]. float64 becomes float32; other integers (tokens) stay as they are.
        y: [n] integers from 0, or strings (sorted into classes); [n, 1] is flattened; [n, length] integers are for
            sequence models. Floats that are not all whole, or several a row, are numbers to predict.
        name: the source's name.
        own: the source's own splits, as indices.
        class_names: one name per class, if known.
        task: `"classification"` or `"regression"`; None: found from `y`.

    Returns:
        Examples in memory.

    Raises:
        InputError: different lengths, no examples, invalid labels, values that are not finite.

    Example:
        >>> examples = from_arrays(np.zeros([3, 4]), np.array(["cat", "dog", "cat"]), name="pets")
        >>> examples.class_names, examples.labels.tolist()
        (('cat', 'dog'), [0, 1, 0])
    """
    x = features(np.asarray(x), name=name)
    labels, class_names, structure = labeled(np.asarray(y), name=name, class_names=class_names, task=task)
    if len(x) != len(labels):
        raise InputError(
            f"{name}: x and y must have one row per example. Received: {len(x)} rows in x, {len(labels)} in y."
        )
    own = own or {"train": np.arange(len(x))}
    return Examples(name, labels, x.shape[1:], class_names, array=x, own=own, structure=structure)


def labeled(
    y: np.ndarray, *, name: str, class_names=None, task: Task = None
) -> tuple[np.ndarray, tuple[str, ...], Structure | None]:
    """Labels as classes, or as numbers to predict.

    Returns:
        int64 labels, all 0 for numbers; the classes' names, none for numbers; and the numbers, if any.

    Raises:
        InputError: labels that are neither.
    """
    if class_names is None and has_numbers(y, task, name):
        return np.zeros(len(y), np.int64), (), Structure(targets=numbers(y, "regression", name))
    return (*labels_of(y, name=name, class_names=class_names), None)


def labels_of(y: np.ndarray, *, name: str, class_names=None) -> tuple[np.ndarray, tuple[str, ...]]:
    """Converts labels to int64 from 0 and names the classes.

    Returns:
        The labels and one name per class.

    Raises:
        InputError: labels that are not whole numbers from 0 or strings, or more classes than examples.
    """
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim == 0 or not len(y):
        raise InputError(f"{name} has no examples. Provide at least one example and its label.")
    if y.dtype.kind in "USO":
        words, labels = np.unique([w.decode() if isinstance(w, bytes) else str(w) for w in y], return_inverse=True)
        return labels.astype(np.int64), tuple(words.tolist())
    are_whole = y.dtype.kind in "biu" or (y.dtype.kind == "f" and y.ndim == 1 and np.all(y == np.floor(y)))
    if not are_whole:
        raise InputError(
            f"{name}: labels must be whole numbers from 0 to classes-1, or strings. Received: {y.dtype} of shape "
            f"{y.shape}. For one-hot rows use y.argmax(-1)."
        )
    labels = y.astype(np.int64)
    if labels.min() < 0:
        raise InputError(f"{name}: labels must be 0 or more. Received: {labels.min()}. Number the classes from 0.")
    classes = int(labels.max()) + 1
    if class_names and classes > len(class_names):
        raise InputError(f"{name} has the label {classes - 1}, but {len(class_names)} classes. Number them from 0.")
    if not class_names and labels.ndim == 1 and classes > max(len(labels), 2):
        raise InputError(
            f"{name}: labels must be 0 to classes-1. Received: {classes - 1} as the largest of {len(labels)} labels. "
            "Number the classes from 0 without gaps."
        )
    return labels, tuple(map(str, class_names or range(classes)))


def to_model(x: tf.Tensor) -> tf.Tensor:
    """Converts uint8 images [..., channels] to float32 in [0, 1]; other examples stay as they are."""
    return tf.cast(x, tf.float32) / 255.0 if x.dtype == tf.uint8 else x


def features(x: np.ndarray, *, name: str, first: int = 0) -> np.ndarray:
    """Converts rows of examples as `from_arrays` describes; `first` is the number of the first row, for errors.

    Raises:
        InputError: no rows, or values that are not numbers or not finite.
    """
    if x.ndim == 0 or not len(x):
        raise InputError(f"{name} has no examples. Provide at least one example and its label.")
    if x.ndim == 1:
        x = x[:, None]
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[..., None]
    if x.dtype == np.uint8 and x.ndim == 2:
        return x.astype(np.float32)
    if x.dtype.kind == "f":
        x = x.astype(np.float32)
        check_finite(f"{name}: x", x, first)
    elif x.dtype.kind == "b":
        x = x.astype(np.float32)
    elif x.dtype.kind not in "iu":
        raise InputError(f"{name}: x must be numbers. Received: {x.dtype} of shape {x.shape}. Convert it to float32.")
    return x
