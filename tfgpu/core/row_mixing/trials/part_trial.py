"""A trial of a whole step: it runs on a few rows, at once and in parts, and what it would do is compared.

Compared are the gradients that reach an optimizer, the numbers of the logs and what is assigned to variables. Nothing
that the step does stays: variables, random states, metrics and optimizers are as they were.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from tfgpu.compat import tensorflow as private
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.randomness.draw_sizes import Sizes
from tfgpu.core.row_mixing.row_sums import Meets
from tfgpu.core.row_mixing.trials import captures, comparison, draws, isolation
from tfgpu.core.row_mixing.trials.drawn_inputs import CannotTry, float_marks
from tfgpu.core.row_mixing.trials.step_recorder import ROWS, Recorder
from tfgpu.core.state.python_state import GLOBAL_DRAWS
from tfgpu.core.state.trial_scope import Assigned
from tfgpu.errors import InputError

_FIRST = 3  # rows of the first part, of 7: no fraction of the one is one of the other
CLOSE_IN_16_BITS = 2e-2
_NOISY = 1e-3  # what rounding may do to two runs
_SIZES = 1024.0, 1 / 1024  # times the gradients: powers of two, so that nothing rounds

Gradient = tf.Tensor | tf.IndexedSlices


class OneCopy(Exception):
    """The step changes a variable of TensorFlow that has one copy, on every replica."""


@dataclass(frozen=True)
class Tried:
    """What a trial has found.

    Attributes:
        differs: what of the whole the parts do not make; None if they make everything.
        draws: how often the code drew numbers by `tf.random`.
        bytes_a_row: of each row, in the outputs of the layers that it calls.
        have_rows: of each of its outputs, whether it has rows of the batch.
        has_shares: a loss that is one number counted by the share of its rows.
        changes: names of what the code changes in Python, as of a count of its calls.
        generators, counts: those of them that hold a generator of random numbers; a number, a text or a container.
        makes: it makes variables in its first call.
        uses_results: it reads results of metrics that it does not return.
        own_reads: paths of metrics' variables that it reads itself.
        scalar_ways: by metric, how it counts one number (`scalar_updates`), in a function that `strategy.run` runs.
        sums: of a function that `strategy.run` runs, the outputs that are sums over replicas (`reduced_outputs`).
        sizes: of its random draws.
    """

    differs: str | None
    draws: int
    bytes_a_row: int
    have_rows: list[bool]
    has_shares: bool
    changes: list[str] = dataclasses.field(default_factory=list)
    generators: list[str] = dataclasses.field(default_factory=list)
    counts: list[str] = dataclasses.field(default_factory=list)
    makes: bool = False
    uses_results: bool = False
    own_reads: list[str] = dataclasses.field(default_factory=list)
    scalar_ways: dict[str, str] = dataclasses.field(default_factory=dict)
    sums: list[int] = dataclasses.field(default_factory=list)
    sizes: Sizes = Sizes()

    def kept(self) -> dict | None:
        """What later runs may read; None where there is more than plain values."""
        return None if self.sizes.fixed else {k: v for k, v in dataclasses.asdict(self).items() if k != "sizes"}

    @property
    def shared(self) -> list[str]:
        """Names of what replicas cannot have for themselves: by it the code may make something once for all."""
        return [name for name in self.changes if name not in GLOBAL_DRAWS] if self.makes else []


class Trial:
    """Runs code on rows, whole and in two parts, and compares what it would do.

    Args:
        code: a function.
        things: what else it works on.

    Attributes:
        log: the numbers that it gives, in words.
    """

    log = "a number in the logs"

    def __init__(self, code: Callable, *things: object):
        self._captured, self._things = captures.of(code), (code, *things)
        self._ways: dict = {}
        self._owners: dict = {}
        self._draws, self._bytes_a_row, self._have_rows, self._has_shares = 0, 0, [], False
        self._changes, self._generators, self._counts, self._own_reads = [], [], [], set()
        self._makes = self._uses_results = self._normalizes = self._has_again = False
        self._has_told = self._one_is_enough = False
        self._first: Recorder | None = None  # what the code did last on the rows of the first part
        self._close = comparison.CLOSE
        self._asks_for_sizes = False  # of gradients, once
        self._calls = 1  # of the code, one after another in each run
        self._noted = draw_sizes.Noted()

    def run(self) -> Tried:
        """Tries the code.

        Raises:
            CannotTry: it ran on no rows.
        """
        differs, shown = isolation.run(self._found), (self._draws, self._bytes_a_row, self._have_rows, self._has_shares)
        python = self._changes, self._generators, self._counts
        reads, sizes = sorted(self._own_reads), self._noted.sizes
        return Tried(differs, *shown, *python, self._makes, self._uses_results, reads, sizes=sizes)

    def _found(self) -> str | None:
        self._sandbox = isolation.Sandbox(*self._things)
        try:
            differs = self._differing()
        except CannotTry as error:
            if error.__context__ is None:  # an error holds what its frames hold
                self._sandbox.check_nothing_stays()
            raise
        self._sandbox.check_nothing_stays()
        return differs

    def _differing(self) -> str | None:
        try:
            passing = comparison.NoNumbers, CannotTry, OneCopy, Meets
            with private.comparing(self._captured.add, self._sandbox.counts_as_equal):
                found = draws.judged(self._batches(), self._judged, is_last=self._is_last, passing=passing)
        except comparison.NoNumbers as error:
            refused = CannotTry(str(error))
            refused.is_of_outputs = True
            raise refused from None
        except OneCopy as error:
            raise InputError(
                f"The variable {str(error)!r} was made outside `strategy.scope()`, and the code adds to it: all "
                "replicas would add to one copy. Make it in the scope, with an `aggregation`, or use a metric."
            ) from None
        if found.verdict is None:
            raise CannotTry(found.why or "its data cannot be drawn")
        return found.verdict or None

    def _is_last(self, verdict: str) -> bool:
        """Whether a verdict ends the trial: one that something differs, or any where one draw is enough."""
        return bool(verdict) or self._one_is_enough

    def _told(self) -> bool:
        """Whether the last batch ran, with finite numbers."""
        return self._has_told

    def _batches(self) -> Iterator:
        """Rows to run on, one batch after another."""
        raise NotImplementedError

    def _parts(self) -> tuple[tuple[int, int], ...]:
        """The first row of each part, and the one after its last."""
        return (0, _FIRST), (_FIRST, ROWS)

    def _recorded(
        self, batch, start: int, stop: int, *, seed: int = 0, scale: Callable[[Gradient], Gradient] | None = None
    ) -> Recorder:
        """What the code does on some of the rows; nothing that it does stays."""
        raise NotImplementedError

    def _judged(self, batch) -> str | None:
        self._has_told = False
        try:
            found = self._difference(batch)
        finally:
            self._sandbox.is_later = not self._sandbox.is_later  # what has no weight at first may mix rows later
        self._has_told = found is not None
        return found

    def _difference(self, batch) -> str | None:
        """What differs, "" for nothing; None where the numbers that came out are not finite."""
        parts = self._parts()
        total = parts[-1][1]
        whole = self._recorded(batch, 0, total)
        if whole.one_copy:
            self._calls += 1
            _check_one_copies(whole, self._recorded(batch, 0, total))
            self._calls -= 1
        self._makes |= whole.has_made
        self._uses_results |= whole.uses_results
        self._own_reads |= whole.own_reads
        if whole.has_made and self._calls == 1:
            self._calls = 2  # TensorFlow traces it twice then, and the second trace is the one that stays
            whole = self._recorded(batch, 0, total)
        self._draws, self._bytes_a_row, self._has_shares = whole.draws, whole.bytes_a_row, whole.has_shares
        self._changes = sorted({*self._changes, *whole.changes})
        self._generators = sorted({*self._generators, *whole.generators})
        self._counts = sorted({*self._counts, *whole.counts})
        if not comparison.are_numbers(whole):
            return None
        if whole.derives_tensors and self._normalizes:
            return "gradients of inputs through BatchNormalization"
        found = [self._recorded(batch, *part) for part in parts]
        self._first = found[0]
        # Another run shows what rounding does, where that may matter; and, the first time, whether it draws.
        is_equal = self._what_differs(whole, found, whole, close=self._close, keeps=False) is None
        if is_equal and (self._has_again or not self._is_other_again(batch, *parts[0], found[0])):
            self._has_again = True
            return self._what_differs(whole, found, whole, close=self._close) or ""
        again = self._recorded(tf.nest.map_structure(self._nudged, batch), 0, total, seed=1)
        if self._are_other(whole, again) and self._is_other_again(batch, 0, total, whole):
            raise ValueError("it draws random numbers with tf.random; use keras.random")
        self._has_again = True
        return self._what_differs(whole, found, again, close=self._close) or ""

    def _and_in_size(self, found: str | None, batch, once: Recorder | None = None) -> str | None:
        """What differs, also with larger and smaller gradients, for which a clip may wait; that is asked once.

        Args:
            found: what differs with gradients as they are.
            batch: the rows.
            once: what the code does on the rows of the first part; by default all rows are taken.
        """
        if found != "" or not self._asks_for_sizes:
            return found
        self._asks_for_sizes, rows = False, (0, self._parts()[-1][1]) if once is None else self._parts()[0]
        is_narrow = self._close > comparison.CLOSE
        sizes = (0.0, 1.0, *(_SIZES[:1] if is_narrow else _SIZES))  # float16 has no smaller numbers
        scales = [functools.partial(tf.math.scalar_mul, each) for each in sizes]
        none = self._recorded(batch, *rows, scale=scales[0])
        once = self._recorded(batch, *rows, scale=scales[1]) if once is None else once
        for times, scale in zip(sizes[2:], scales[2:], strict=True):
            run = self._recorded(batch, *rows, scale=scale)
            differs = comparison.not_linear(none, once, run, times, self._close)
            if differs is not None and not (is_narrow and not all(map(comparison.are_numbers, (none, once, run)))):
                differs = self._of_size(differs, batch, scale)
                return differs and f"{differs}, where gradients are large or small,"
        return ""

    def _of_size(self, differs: str, batch, scale: Callable[[Gradient], Gradient]) -> str:
        """What differs of code that is not linear in the gradients of its rows; "" for nothing."""
        return differs

    def _nudged(self, value):
        """A tensor of floats moved by less than the data's own precision, so that all sums round otherwise."""
        if not tf.is_tensor(value) or not value.dtype.is_floating or value.dtype.size < 4:
            return value
        moved = value * tf.cast(1 + 2.0**-20, value.dtype)
        return draws.keeping(value, moved, float_marks(self._captured.numbers))

    def _is_other_again(self, batch, start: int, stop: int, first: Recorder) -> bool:
        """Whether the code does something else on the same rows with other seeds."""
        return self._are_other(first, self._recorded(batch, start, stop, seed=1))

    def _are_other(self, whole: Recorder, again: Recorder) -> bool:
        """Whether another run of the whole gave other numbers than rounding explains."""
        return self._what_differs(whole, [again], whole, close=max(_NOISY, self._close), keeps=False) is not None

    def _gradients_together(self, parts: list) -> list[list]:
        """What replicas may make of their gradients."""
        return [[_total(values) for values in zip(*parts, strict=True)]]

    def _shares(self, parts: list[Recorder], *, is_plain: bool) -> list[float]:
        """How much each part counts in an average of what replicas assign or log.

        Args:
            parts: of all rows.
            is_plain: it is the average of a number that is returned, or of one of TensorFlow's own variables.
        """
        return [part.share for part in parts]

    def _log_together(self, values: list[np.ndarray], shares: list[float]) -> list[np.ndarray]:
        """What replicas may make of their values of a number in the logs."""
        return [sum(share * value for share, value in zip(shares, values, strict=True))]

    def _what_differs(
        self, whole: Recorder, parts: list[Recorder], again: Recorder, *, close: float, keeps: bool = True
    ) -> str | None:
        """What of the whole is not the parts', put together; `again` is the whole with other rounding.

        It keeps how a variable of the parts makes that of the whole: another batch must show the same way.
        """
        counts = {(len(each.updates), len(each.logs)) for each in (whole, *parts, again)}
        if len(counts) > 1:
            return "the number of updates"
        for at, gradients in enumerate(whole.updates):
            ways = self._gradients_together([part.updates[at] for part in parts])
            if not any(comparison.are_close(gradients, each, again.updates[at], close) for each in ways):
                return "the gradients"
        if not self._are_outputs(whole, parts, again, close):
            return "what it returns"
        shares = self._shares(parts, is_plain=True)
        for at, value in enumerate(whole.logs):
            ways = self._log_together([part.logs[at] for part in parts], shares)
            if not any(comparison.are_close([value], [each], [again.logs[at]], close) for each in ways):
                return self.log
        for key, variable in whole.assigned.items():
            ways = self._ways_that_fit(key, whole, parts, again, close)
            owner = variable.owner or self._owners.get(key, key)  # the variables of a metric go together
            if len(parts) > 1:
                ways = self._ways.get(owner, ways) & ways
                if keeps:
                    self._ways[owner] = ways
            if not ways:
                return f"the variable {variable.path!r}"
        return None

    def _ways_that_fit(self, key, whole: Recorder, parts: list[Recorder], again: Recorder, close: float) -> set[str]:
        """In which ways the parts' values of a variable make the whole's."""
        variable = whole.assigned[key]
        unchanged = dataclasses.replace(variable, after=variable.before)
        found = [part.assigned.get(key, unchanged).after for part in parts]
        noisy = again.assigned.get(key, unchanged).after

        def is_whole(value: np.ndarray) -> bool:
            return comparison.are_close([variable.after], [value], [noisy], close)

        # An optimizer's update uses each replica's own value.
        ways = {"same": found[0]} if key in whole.of_optimizers else self._ways_of(variable, found, parts)
        fitting = {way for way, value in ways.items() if is_whole(value)}
        return fitting if all(map(is_whole, found)) else fitting - {"same"}  # only the first part has the whole's

    def _ways_of(self, variable: Assigned, found: list, parts: list[Recorder]) -> dict[str, np.ndarray]:
        """What replicas may make of their values of a variable, by name."""
        if variable.is_inside:
            return {"same": found[0]}
        return comparison.ways_together(variable, found, self._shares(parts, is_plain=variable.is_plain))

    def _are_outputs(self, whole: Recorder, parts: list[Recorder], again: Recorder, close: float) -> bool:
        """Whether the parts' predictions are the whole's: rows one after another, and else the same of each."""
        if any(len(each.outputs) != len(whole.outputs) for each in (*parts, again)):
            return False
        for at, value in enumerate(whole.outputs):
            found = [part.outputs[at] for part in parts]
            has_rows = comparison.grows_with_rows(value, found, [each.stop - each.start for each in parts])
            if len(parts) > 1:
                self._have_rows = [*self._have_rows[:at], has_rows, *self._have_rows[at + 1 :]]
            together = [np.concatenate(found)] if has_rows else found
            if not all(comparison.are_close([value], [each], [again.outputs[at]], close) for each in together):
                return False
        return True


def _check_one_copies(whole: Recorder, more: Recorder) -> None:
    """Refuses that all replicas add to one variable; to assign the same value once more changes nothing.

    Raises:
        OneCopy: they would.
    """
    for key in whole.one_copy:
        first, second = whole.assigned[key], more.assigned.get(key)
        if second is None or not np.array_equal(first.after, second.after, equal_nan=first.after.dtype.kind == "f"):
            raise OneCopy(first.path)


def _total(gradients: list):
    present = [each for each in gradients if each is not None]
    return sum(present) if present else None
