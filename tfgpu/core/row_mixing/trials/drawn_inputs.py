"""Drawn rows that look like a step's own: the same structure and dtypes, with a few rows in place of the batch's."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat.tensorflow import NoneTensorSpec
from tfgpu.core import batch_rows, step_context
from tfgpu.core.row_mixing.trials import draws
from tfgpu.core.row_mixing.trials.isolation import TrialShard, shards_of

_ROWS = (7, 8)  # the second for what takes an even number
_WHOLE_NUMBERS = 1e3  # the size from which whole numbers are multiplied, too
_WORDS = ("a", "b c", "the", "")


@dataclass(frozen=True)
class Spec:
    """What is drawn for one tensor.

    Attributes:
        dtype: its name.
        shape: without the axis of rows, where it has one; None is unknown.
        rows_each: rows of the tensor for each row of the batch; None where it has no rows.
        has_mask: Keras has given it a mask.
    """

    dtype: str
    shape: tuple[int | None, ...]
    rows_each: int | None
    has_mask: bool


def spec_of(tensor: tf.Tensor) -> Spec:
    """The spec of one of a step's tensors."""
    shape, each = tuple(tensor.shape), rows_each(tensor)
    has_mask = private.get_mask(tensor) is not None
    return Spec(tensor.dtype.name, shape if each is None else shape[1:], each, has_mask)


def rows_each(tensor: tf.Tensor) -> int | None:
    """How many of a tensor's rows belong to each row of this replica's batch; None where it has no rows.

    Of a tensor with an unknown number of rows it is 1, and of one that is empty, as a replica of a loop by hand may get
    it: other replicas, whose shards have a row, find the same.
    """
    if tensor.shape.rank in (0, None):
        return None
    local = batch_rows.local_rows()
    leading, held = tensor.shape[0], None if local is None else tf.get_static_value(local)
    if not leading:
        return 1
    if held is None:
        return None
    held = max(int(held), 1)
    return leading // held if leading % held == 0 else None


@dataclass(frozen=True)
class Drawn:
    """One draw.

    Attributes:
        tensors: for `DrawnInputs.arguments`.
        rows: of the batch.
        is_cut: long axes are cut.
        sizes: times which the rows of the one part and of the other are; None: all as drawn.
    """

    tensors: list[tf.Tensor]
    rows: int
    is_cut: bool
    sizes: tuple[float, float] | None = None


class DrawnInputs:
    """Draws arguments in the place of a step's own.

    Args:
        structure: arguments in which tensors are replaced; everything else stays.
        numbers: whole numbers that may stand for something special, such as a label that is not to be learned.

    Attributes:
        specs: of the tensors that are replaced.
        has_composites: there are ragged or sparse tensors, which stay as they are.
    """

    def __init__(self, structure: object, numbers: list[float]):
        self._structure, self._numbers = structure, numbers
        self._leaves = leaves = keras.tree.flatten(structure)
        self._at = [at for at, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
        self.specs = [spec_of(leaves[at]) for at in self._at]
        self.has_composites = any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves)
        self._are_given = all(hasattr(leaves[at], "numpy") for at in self._at) and step_context.current().is_trying

    @property
    def kinds(self) -> list[str]:
        """Ways of drawing, best first: a function may not bear all of them. "given" are the very tensors of a trial."""
        has_whole = any(tf.as_dtype(spec.dtype).is_integer for spec in self.specs)
        whole = ["special", "many", "two"] if has_whole else ["many"]
        return ["given"] * self._are_given + [*whole, "positive"]

    def drawn(self, kinds: list[str]) -> Iterator["Drawn"]:
        """Draw after draw for a trial: first with long axes cut, then of the very sizes.

        Args:
            kinds: of `kinds`, best first.
        """
        for is_cut in (True, False):
            for rows in _ROWS:
                for kind in kinds:
                    tensors = self.draw(rows, kind, is_cut=is_cut)
                    if tensors is not None:
                        yield Drawn(tensors, rows, is_cut)

    def draw(self, rows: int, kind: str, *, is_cut: bool) -> list[tf.Tensor | np.ndarray] | None:
        """Tensors for `arguments`; None where there would be too many numbers, or nothing to cut.

        Args:
            rows: of the batch.
            kind: one of `kinds`.
            is_cut: long axes that all tensors with rows share are cut.
        """
        if kind == "given":
            return self._given(rows) if not is_cut else None
        shapes = self._shapes(rows)
        if is_cut:
            shapes = self._cut(shapes)
        if shapes is None or max(map(math.prod, shapes), default=0) > draws.LARGEST:
            return None
        source = np.random.default_rng(0)
        return [self._drawn(source, spec, shape, kind) for spec, shape in zip(self.specs, shapes, strict=True)]

    def sized(self, draw: Drawn, sizes: tuple[float, float]) -> Drawn | None:
        """The same draw with the rows of its two parts of different sizes, as by `draws.sized`.

        Whole numbers are multiplied where there are no others.

        Args:
            draw: any.
            sizes: of the first part's rows and of the others, as factors.

        Returns:
            None where no tensor has rows of numbers.
        """
        floats, whole = (
            [spec.rows_each is not None and getattr(tf.as_dtype(spec.dtype), kind) for spec in self.specs]
            for kind in ("is_floating", "is_integer")
        )
        multiplied = floats if any(floats) or sizes[1] < _WHOLE_NUMBERS else whole
        if not any(multiplied):
            return None
        first = shards_of(draw.rows)[1].count
        tensors = [
            _with_mask_of(tensor, draws.sized(tensor, first * spec.rows_each, sizes)) if is_meant else tensor
            for is_meant, spec, tensor in zip(multiplied, self.specs, draw.tensors, strict=True)
        ]
        return Drawn(tensors, draw.rows, draw.is_cut, sizes)

    def marked(self, draw: Drawn) -> Drawn | None:
        """The same draw with numbers of the code in some rows of floats: a place to leave out, or a value not known.

        Returns:
            None where the code has no such numbers, or no tensor has rows of floats.
        """
        are_meant = [each.rows_each is not None and tf.as_dtype(each.dtype).is_floating for each in self.specs]
        numbers = float_marks(self._numbers)
        if not (numbers and any(are_meant)):
            return None
        source = np.random.default_rng(0)
        tensors = [
            _with_mask_of(tensor, draws.marked(source, tensor, numbers)) if is_meant else tensor
            for is_meant, tensor in zip(are_meant, draw.tensors, strict=True)
        ]
        return Drawn(tensors, draw.rows, draw.is_cut)

    def nudged(self, draw: Drawn, by: float) -> list[tf.Tensor]:
        """The tensors of a draw as rounding may make them: all numbers are moved by a part of them."""
        marks = float_marks(self._numbers)
        return [_with_mask_of(each, draws.nudged(each, by, marks)) for each in draw.tensors]

    def arguments(self, tensors: list[tf.Tensor], shard: TrialShard) -> tuple[object, list[tf.Tensor]]:
        """The arguments that a replica with these rows gets, and their tensors.

        Args:
            tensors: from `draw`, or recorded ones of the whole.
            shard: which rows.
        """
        leaves, given = list(self._leaves), []
        for at, spec, tensor in zip(self._at, self.specs, tensors, strict=True):

            def of_shard(rows, has_rows=spec.rows_each is not None):
                return shard.of(rows) if has_rows else rows

            leaves[at] = private.carry_mask(tensor, tf.identity(of_shard(tensor)), of_shard)
            given.append(leaves[at])
        return keras.tree.pack_sequence_as(self._structure, leaves), given

    def _given(self, rows: int) -> list[tf.Tensor] | None:
        tensors = [self._leaves[at] for at in self._at]
        pairs = zip(self.specs, tensors, strict=True)
        fits = [spec.rows_each is None or len(tensor) == rows * spec.rows_each for spec, tensor in pairs]
        return tensors if all(fits) else None

    def _shapes(self, rows: int) -> list[tuple[int, ...]]:
        known = [tuple(size if size is not None else draws.UNKNOWN for size in spec.shape) for spec in self.specs]
        return [
            shape if spec.rows_each is None else (rows * spec.rows_each, *shape)
            for spec, shape in zip(self.specs, known, strict=True)
        ]

    def _cut(self, shapes: list[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        """Axes that all tensors with rows share, cut; None where there is no need."""
        if max(map(math.prod, shapes), default=0) <= draws.SMALL:
            return None
        with_rows = [at for at, spec in enumerate(self.specs) if spec.rows_each is not None]
        found = [list(shape) for shape in shapes]
        for axis, sizes in enumerate(zip(*(shapes[at][1:] for at in with_rows), strict=False), start=1):
            if len(set(sizes)) == 1:
                for at in with_rows:
                    found[at][axis] = min(found[at][axis], draws.SHORT)
        return [tuple(shape) for shape in found]

    def _drawn(self, source: np.random.Generator, spec: Spec, shape: tuple[int, ...], kind: str) -> tf.Tensor:
        dtype = tf.as_dtype(spec.dtype)
        if dtype == tf.string:
            return tf.constant(source.choice(_WORDS, shape))
        if dtype.is_bool:
            values = source.random(shape) < 0.7
        elif dtype.is_integer:
            values = draws.values(source, shape, "whole", below=2 if kind in ("two", "positive") else 8)
            for number in self._numbers if kind == "special" else ():
                values = draws.with_special(source, values, number, 0.2)
        else:
            values = draws.values(source, shape, "positive" if kind == "positive" else "normal")
        tensor = draws.cast(values, dtype)
        if spec.has_mask:  # of a sequence: its first places count
            length = shape[1] if len(shape) > 1 else 1
            until = source.integers(1, length + 1, (shape[0], 1))
            private.set_mask(tensor, tf.constant(np.arange(length)[None] < until))
        return tensor


def float_marks(numbers: Sequence[float]) -> list[float]:
    """Those of a code's whole numbers that may stand for "none" among floats: many others are sizes.

    Example:
        >>> float_marks([64, -999, 255.0])
        [-999, 255.0]
    """
    return [number for number in numbers if number < 0 or isinstance(number, float)]


def _with_mask_of(tensor: tf.Tensor, found: tf.Tensor) -> tf.Tensor:
    private.set_mask(found, private.get_mask(tensor))
    return found


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
            something, else one. More may come while the batches are used.
        rows: of each batch.
        has_told: whether the last batch told anything.

    Raises:
        CannotTry: no numbers can be drawn for one of them.
    """
    draw, done = np.random.default_rng(0), []
    for how, classes in (("normal", 2), ("positive", 8)):
        yield _batch(draw, specs, how, classes, (), rows)
    while nones := [each for each in _nones(specs, numbers) if each not in done]:
        together = nones[: _NONES_TOGETHER if has_told() else 1]
        yield _batch(draw, specs, "normal", 2, together, rows)
        if has_told() or len(together) == 1:
            done += together


def _nones(specs: list, numbers: list[float]) -> list[float]:
    """What may stand for none among the labels of a batch."""
    dtypes = [getattr(each, "dtype", tf.string) for each in specs[1:]]
    if any(each.is_integer for each in dtypes):
        return [*draws.NONES, *(int(n) for n in numbers if n == int(n) and n not in draws.NONES)]
    return float_marks(numbers) if any(each.is_floating for each in dtypes) else []


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
        marks = float_marks([none for none in nones if none not in draws.NONES])
        values = draws.with_specials(draw, values, marks, _NONES_RATE) if marks and shape else values
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
