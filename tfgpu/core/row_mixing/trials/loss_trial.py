"""Whether a loss or metric function is a mean over rows: it is run on drawn rows, whole and in two parts."""

import contextlib
import enum
import functools
import itertools
import math
from collections.abc import Callable, Iterator

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private
from tfgpu.compat import variables
from tfgpu.core import step_context
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.row_mixing.row_sums import Meets
from tfgpu.core.row_mixing.trials import captures, comparison, draws, isolation
from tfgpu.core.state import layer_state, python_state

_ROWS = 6  # in parts of a third and two
_MANY, _MOST = 64, 2048  # rows of the try with many, which has up to `draws.SMALL` numbers
_NOT_CLASSES = (*draws.NONES, math.nan)


class Needs(enum.Enum):
    """What a function of labels and outputs needs, and gives."""

    ITS_ROWS = "each replica's own rows; it gives a number a row"
    ITS_MEAN = "each replica's own rows; it gives a mean over them"
    ALL_GIVES_ROWS = "all rows; it gives a number a row"
    ALL = "all rows; it gives something of the whole batch"
    ALL_BY_SHAPE = "all rows; what it gives is told by its shape"


class _Apart(keras.StatelessScope):
    """Nothing that a function assigns stays, and a single number that waits at 0, as a weight that grows, is 0.5.

    Attributes:
        before: variables that it has assigned, with the values that they had, by `id`.
    """

    def __init__(self):
        super().__init__()
        self.before: dict[int, tuple] = {}

    def add_update(self, update):
        variable = update[0]
        if id(variable) not in self.before:
            value = self.get_current_value(variable)
            self.before[id(variable)] = variable, variables.held(variable) if value is None else value
        super().add_update(update)

    def get_current_value(self, variable):
        found = super().get_current_value(variable)
        if found is None and variable.shape == () and tf.as_dtype(variable.dtype).is_floating:
            held = variables.held(variable)
            if held is not None and float(tf.convert_to_tensor(held)) == 0.0:
                return tf.constant(0.5, variable.dtype)
        return found


class LossTrial:
    """A function is run on drawn rows, all at once and in two parts, outside the step that is traced.

    Args:
        function: of labels and outputs.
        rows: what a step calls it with.
        owner: the loss or metric that has it.

    Attributes:
        why: it could not be tried.
        changes, generators, counts: what it changes in Python, as in `part_trial.Tried`.
        draws: its random draws.
    """

    def __init__(self, function: Callable, rows: tuple, owner: object):
        self._function, self._owner, self._captured = function, owner, captures.of(owner)
        self.changes, self.generators, self.counts = set(), [], []
        self._structure, self._tensors = rows, keras.tree.flatten(rows)
        self._count_true = len(keras.tree.flatten(rows[0]))
        self.why = ""
        self._gives_one_number = True
        self._assigned: dict[int, tuple] = {}
        self._noted = layer_state.Noted()
        self.draws = draw_sizes.Noted()

    def run(self) -> Needs | None:
        """What the function needs; None where that could not be told, and `why` says why."""
        found = self._found()
        if found is None and (not self.why or not self._gives_one_number):
            return Needs.ITS_MEAN if self._gives_one_number else Needs.ITS_ROWS
        return found

    def _found(self) -> Needs | None:
        """None: nothing could be told."""
        try:
            with (
                step_context.scope(is_trying=True),
                tf.init_scope(),
                isolation.kept_draws(),
                isolation.hidden_kernel_errors(),
                self._captured.used(),
                python_state.Kept([self._owner], ()) as self._kept,
            ):
                with tf.device("CPU:0"):  # the same on every worker
                    found = self._judged_all()
                found = found or self._judged_all()  # not every function runs on a CPU
                self.generators, self.counts = self._kept.draws(self.changes), self._kept.counts(self.changes)
                return found
        except Meets:
            return Needs.ITS_ROWS

    def _judged_all(self) -> Needs | None:
        whole, cut = self._sizes(shorter=False), self._sizes(shorter=True)
        found = self._judged_by(self._draws(cut, _ROWS), is_cut=cut != whole)
        if found is None and cut != whole:
            found = self._judged_by(self._draws(whole, _ROWS, outputs=1))  # a function may ask for the very sizes
        if found in (Needs.ITS_ROWS, Needs.ITS_MEAN):
            found = self._in_sizes(cut, found)
        if found not in (Needs.ITS_ROWS, Needs.ITS_MEAN):
            return found
        # One that takes the worst so many, or that sees long axes: with many rows of the very sizes.
        numbers = max(1, *(math.prod(each) for each in whole))
        rows = max(_ROWS, min(max(_MANY, 2 * self._captured.largest(_MOST // 2)), draws.SMALL // numbers))
        if rows > _ROWS or cut != whole:
            return self._judged_by(self._draws(whole, rows, outputs=1, labels=1)) or found
        return found

    def _judged_by(self, drawn: Iterator[list[tf.Tensor]], *, is_cut: bool = False) -> Needs | None:
        judge = functools.partial(self._judged, is_cut=is_cut)
        found = draws.judged(drawn, judge, is_last=lambda needs: needs in (Needs.ALL, Needs.ALL_GIVES_ROWS))
        self.why = self.why or found.why or ""
        return found.verdict

    def _computed(self, rows: list[tf.Tensor]) -> np.ndarray:
        with self._called(rows) as values:
            found, mask = comparison.in_float64(values), private.get_mask(values)  # truths are numbers, too
        if mask is None or np.shape(mask) != found.shape:
            return found
        return np.stack([found, comparison.in_float64(mask)], -1)  # Keras takes the mean over the rows of the mask

    @contextlib.contextmanager
    def _called(self, rows: list[tf.Tensor]) -> Iterator[object]:
        """What the function gives of rows; what it assigns is noted, and does not stay."""
        count = int(rows[0].shape[0])
        self._kept.put_back()
        noting = layer_state.noting_assignments()
        with step_context.as_one_device(count), self.draws.run(count), _Apart() as scope, noting as self._noted:
            with self._kept.locked_arrays():
                values = self._function(*keras.tree.pack_sequence_as(self._structure, rows))
            self.changes |= set(self._kept.changes())
            self._assigned = {
                key: (variable, comparison.array(before), comparison.array(scope.state_mapping[key]))
                for key, (variable, before) in scope.before.items()
            }
            yield values

    def _in_sizes(self, sizes: list[tuple[int, ...]], found: Needs) -> Needs:
        """What a function needs that seemed to need each replica's rows: a bound may be met by some of them alone.

        Of a mean, which large numbers rule, the gradients of small ones still tell.
        """
        for each in draws.SIZES[:2]:
            rows = self._sized(sizes, each)
            other = draws.judged([rows], lambda rows: self._is_other(rows, by_row=found is Needs.ITS_ROWS))
            if other.verdict:
                return Needs.ALL_GIVES_ROWS if found is Needs.ITS_ROWS else Needs.ALL
        return found

    def _sized(self, sizes: list[tuple[int, ...]], factors: tuple[float, float]) -> list[tf.Tensor]:
        """Rows of which the first third is small, and the rest large; labels are first of such sizes, then classes."""
        draw, found = np.random.default_rng(0), []
        for at, (size, tensor) in enumerate(zip(sizes, self._tensors, strict=True)):
            has_size = tensor.dtype.is_floating and (at >= self._count_true or factors == draws.SIZES[0])
            values = draws.values(draw, (_ROWS, *size), "normal" if has_size else "whole")
            rows = draws.cast(values, tensor.dtype)
            found.append(draws.sized(rows, _ROWS // 3, factors) if has_size else rows)
        return found

    def _is_other(self, rows: list[tf.Tensor], *, by_row: bool) -> bool | None:
        """Whether values or gradients of some rows depend on others; None where that cannot be told."""
        pieces = (rows, *_parts(rows, _ROWS // 3))
        whole, *parts = (self._with_gradients(each, by_row=by_row) for each in pieces)
        if not all(np.isfinite(each).all() for each in whole):
            return None
        if _are_parts(whole, parts):
            return False
        labels, outputs = rows[: self._count_true], rows[self._count_true :]
        outputs = [draws.nudged(each, comparison.CLOSE / 16) for each in outputs]
        nudged = self._with_gradients([*labels, *outputs], by_row=by_row)
        pieces = zip(*(_parts([each], _ROWS // 3) for each in nudged), strict=True)
        return True if _are_parts(whole, [[each[0] for each in piece] for piece in pieces]) else None

    def _with_gradients(self, rows: list[tf.Tensor], *, by_row: bool) -> list[np.ndarray]:
        """Arrays by rows: what the function gives, if it gives a number a row, and the gradients of its outputs."""
        sources = [each for each in rows[self._count_true :] if each.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with self._called(rows) as found:
                values = tf.cast(tf.convert_to_tensor(found), tf.float32)
            total = tf.reduce_sum(values) * (1 if by_row else len(rows[0]))
        gradients = [comparison.array(tf.convert_to_tensor(g)) for g in tape.gradient(total, sources) if g is not None]
        return [values.numpy(), *gradients] if by_row else gradients

    def _judged(self, rows: list[tf.Tensor], *, is_cut: bool) -> Needs | None:
        count = int(rows[0].shape[0])
        part = count // 3
        whole, again = self._computed(rows), self._computed(rows)
        kept, noted = self._assigned, self._noted
        self._gives_one_number = whole.ndim == 0
        if not np.isfinite(whole).all():
            return None
        try:
            (first, one), (second, other) = ((self._computed(each), self._assigned) for each in _parts(rows, part))
        except Meets:
            raise
        except Exception:
            if is_cut:
                raise
            return Needs.ALL_GIVES_ROWS if whole.shape[:1] == (count,) else Needs.ALL
        is_kept = self._are_parts_of(kept, (one, other), (part / count, 1 - part / count), noted)
        if whole.shape[:1] == (count,) and first.shape[:1] == (part,):
            if not is_kept:
                return Needs.ALL_GIVES_ROWS
            if not _close(whole, again):  # drawn anew, for each row
                return Needs.ITS_ROWS
            is_alike = first.shape[1:] == second.shape[1:]  # not of each row with each other one
            its_rows = is_alike and _close(whole, np.concatenate([first, second]))
            return Needs.ITS_ROWS if its_rows else Needs.ALL_GIVES_ROWS
        if whole.shape == first.shape == second.shape and _close(whole, again):
            mean = (first * part + second * (count - part)) / count
            return Needs.ITS_MEAN if is_kept and _close(whole, mean, first, second) else Needs.ALL
        return Needs.ALL

    def _are_parts_of(
        self, whole: dict, parts: tuple[dict, dict], shares: tuple[float, float], noted: layer_state.Noted
    ) -> bool:
        """Whether replicas make of what they assign what one device does; `noted` is of the whole."""
        for key, (variable, before, after) in whole.items():
            found = [part[key][2] if key in part else before for part in parts]
            if not comparison.agrees(variable, before, after, found, shares, noted=noted, close=comparison.CLOSE):
                return False
        return True

    def _draws(
        self, sizes: list[tuple[int, ...]], rows: int, *, labels: int | None = None, outputs: int = 2
    ) -> Iterator[list[tf.Tensor]]:
        """Labels of several kinds with probabilities and with logits, where all are small enough."""
        shapes = [(rows, *each) for each in sizes]
        if max(map(math.prod, shapes)) > draws.LARGEST:
            return
        draw = np.random.default_rng(0)
        width = self._tensors[-1].shape[-1] if self._tensors[-1].shape.rank > 1 else None
        classes = max(2, min(width or draws.UNKNOWN, draws.UNKNOWN))
        of_outputs = [functools.partial(draws.values, draw, how=how) for how in ("positive", "wide")]
        kinds = itertools.islice(self._label_kinds(draw, classes), labels)
        for label, output in ((label, output) for label in kinds for output in of_outputs[:outputs]):
            drawn = [(label if at < self._count_true else output)(shape) for at, shape in enumerate(shapes)]
            if all(_fits(v, t.dtype) for v, t in zip(drawn, self._tensors, strict=True)):
                yield [draws.cast(v, t.dtype) for v, t in zip(drawn, self._tensors, strict=True)]

    def _label_kinds(self, draw: np.random.Generator, classes: int) -> Iterator[Callable[[tuple], np.ndarray]]:
        """Ways to draw labels: two classes, all classes, numbers, and two classes with a label that stands for none."""
        for kind in {"how": "whole"}, {"how": "whole", "below": classes}, {"how": "normal"}:
            yield functools.partial(draws.values, draw, **kind)

        def special(shape: tuple, none: float) -> np.ndarray:
            return draws.with_special(draw, draws.values(draw, shape, "whole"), none, 0.3)

        own = (each for each in self._captured.numbers if each not in _NOT_CLASSES)  # there may be more by then
        for none in itertools.chain(_NOT_CLASSES, own):
            yield functools.partial(special, none=none)

    def _sizes(self, *, shorter: bool) -> list[tuple[int, ...]]:
        """Of a row of each tensor; long axes that all share are cut, where there are many numbers."""
        known = [each.shape[1:].as_list() for each in self._tensors]
        numbers = max(math.prod(size or draws.UNKNOWN for size in each) for each in known)
        if shorter and _ROWS * numbers > draws.SMALL:
            for at, sizes in enumerate(zip(*known, strict=False)):
                if len(set(sizes)) == 1:
                    for each in known:
                        each[at] = min(each[at] or draws.UNKNOWN, draws.SHORT)
        return [tuple(size or draws.UNKNOWN for size in each) for each in known]


def _parts(rows: list[tf.Tensor], part: int) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    return [each[:part] for each in rows], [each[part:] for each in rows]


def _are_parts(whole: list[np.ndarray], parts: list[list[np.ndarray]]) -> bool:
    """Whether rows of two parts are the whole's, each by the size of its own part's numbers."""
    if any(len(each) != len(whole) for each in parts):
        return False
    cut = len(parts[0][0]) if whole else 0
    return all(
        _close(all_rows[:cut], first) and _close(all_rows[cut:], second)
        for all_rows, first, second in zip(whole, *parts, strict=True)
    )


def _fits(values: np.ndarray, dtype: tf.DType) -> bool:
    """Whether a label that stands for "none" is one in that dtype."""
    return dtype.is_floating or not np.isnan(values).any()


def _close(one: np.ndarray, other: np.ndarray, *besides: np.ndarray) -> bool:
    """Whether both are numbers, and as good as equal; `besides` are numbers that they come from."""
    size = max(np.abs(each).max(initial=0.0) for each in (one, other, *besides))
    are_near = one.shape == other.shape and bool(np.all(np.abs(one - other) <= comparison.CLOSE * size))
    return are_near and math.isfinite(size)
