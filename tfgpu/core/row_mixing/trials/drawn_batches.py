"""Batches of drawn rows, for a step whose own rows are not there yet."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from tfgpu.compat.tensorflow import NoneTensorSpec
from tfgpu.core.row_mixing.trials import draws

_NONES_TOGETHER, _NONES_RATE = 3, 0.3  # labels that stand for none in one batch: each at one place at least
_UNKNOWN = object()


class CannotTry(Exception):
    """The step does not run on drawn rows."""

    is_of_outputs = False  # what it returns are no numbers


def drawn_batches(specs: list, numbers: list[float], rows: int, has_told: Callable[[], bool]) -> Iterator[list]:
    """Batches of drawn rows: normal and positive numbers, few and many classes, labels that stand for none.

    Args:
        specs: of each tensor of a batch; the first one's are no labels.
        numbers: whole numbers in the code, which may stand for none: several in one batch where the last batch told
            something, else one.
        rows: of each batch.
        has_told: whether the last batch told anything.

    Raises:
        CannotTry: no numbers can be drawn for one of them.
    """
    draw = np.random.default_rng(0)
    nones = [*draws.NONES, *(int(n) for n in numbers if n == int(n) and n not in draws.NONES)]
    has_labels = any(getattr(each, "dtype", tf.string).is_integer for each in specs[1:])
    for how, classes in (("normal", 2), ("positive", 8)):
        yield _batch(draw, specs, how, classes, (), rows)
    while nones and has_labels:
        together = nones[: _NONES_TOGETHER if has_told() else 1]
        yield _batch(draw, specs, "normal", 2, together, rows)
        if has_told() or len(together) == 1:
            nones = nones[len(together) :]


def _batch(draw: np.random.Generator, specs: list, how: str, classes: int, nones: Sequence[int], rows: int) -> list:
    drawn = [_drawn(draw, spec, how, classes, nones if at else (), rows) for at, spec in enumerate(specs)]
    if any(value is _UNKNOWN for value in drawn):
        raise CannotTry("its data cannot be drawn")
    return drawn


def _drawn(draw: np.random.Generator, spec, numbers: str, classes: int, nones: Sequence[int], rows: int):
    """A tensor of drawn rows for a spec, or `_UNKNOWN` where none can be drawn."""
    if spec is None or isinstance(spec, (NoneTensorSpec, tf.OptionalSpec)):
        return None
    is_sparse = isinstance(spec, tf.SparseTensorSpec)
    if not isinstance(spec, (tf.TensorSpec, tf.SparseTensorSpec)) or spec.shape.rank is None:
        return _UNKNOWN
    known = [draws.UNKNOWN if size is None else size for size in spec.shape[1:]]
    shape = [rows, *known] if spec.shape.rank else []
    if spec.dtype.is_floating:
        values = draws.values(draw, shape, numbers)
    elif spec.dtype.is_integer:
        values = draws.values(draw, shape, "whole", below=classes)
        fitting = [none for none in nones if spec.dtype.min <= none <= spec.dtype.max]
        values = draws.with_specials(draw, values, fitting, _NONES_RATE) if fitting and shape else values
    elif spec.dtype.is_bool:
        values = draw.random(shape) < 0.5
    else:
        return _UNKNOWN
    if is_sparse:
        return tf.sparse.from_dense(draws.cast(np.where(draw.random(shape) < 0.5, values, 0), spec.dtype))
    return draws.cast(values, spec.dtype)
