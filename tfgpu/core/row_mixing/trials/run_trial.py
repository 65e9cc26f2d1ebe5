"""Whether a function that `strategy.run` runs by hand gives on replicas what it gives on one device.

Layers, losses and metrics within are tried by themselves, and get all rows where they need them. What the function does
besides (a sum over rows that divides another, a gradient that it clips) is tried once, before its first call: on eight
rows, of its own first arguments where they have numbers yet, all at once and in two parts. Where the parts do not add
up to the whole a warning names it: a function as a whole cannot be given all rows. Before its first call on replicas
that hold, or may hold, different numbers of rows, it is tried in two parts of different lengths, too.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.compat import tensorflow as private
from tfgpu.core import batch_sharding, extensions, replica_attributes, replication, step_context, worker_rows
from tfgpu.core.randomness import draw_sizes
from tfgpu.core.row_mixing import choices, reduced_outputs, row_sums, scalar_updates, settings, verdicts
from tfgpu.core.row_mixing.trials import captures, comparison, draws
from tfgpu.core.row_mixing.trials.drawn_inputs import CannotTry, drawn_batches
from tfgpu.core.row_mixing.trials.part_trial import CLOSE_IN_16_BITS, Trial, Tried
from tfgpu.core.row_mixing.trials.step_recorder import Recorder
from tfgpu.core.state.trial_scope import BETWEEN
from tfgpu.core.step_context import RowRange
from tfgpu.core.trial_cache import code_digest, store
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_ROWS, _PARTS, _UNEVEN = 8, ((0, 4), (4, 8)), ((0, 3), (3, 8))
_MEETINGS = 12  # of replicas, that a function may have
_LIBRARIES = ("tfgpu", "keras", "tensorflow")


def try_functions_of_run() -> None:
    """Tries each function before its first `strategy.run`.

    Under stock TensorFlow, code that divides by something of its own rows is silently another one on replicas.
    """

    extensions.run_observers.register(_observe)


def _observe(strategy: tf.distribute.Strategy, fn: Callable, args: tuple, kwargs: dict) -> None:
    if not _is_tried(strategy, fn, args, kwargs):
        return
    known = vars(slots.of(strategy))
    tried, even = known.setdefault("tried_functions", set()), known.setdefault("even_functions", {})
    key = _key(strategy, fn)
    if key not in tried:
        key = _judge(strategy, fn, args, kwargs)
    known.setdefault("function_keys", {})[_code(fn)] = key
    if key in even and not batch_sharding.are_even(strategy, (args, kwargs)):
        _judge_uneven(strategy, fn, args, kwargs, even.pop(key), key)


def _is_tried(strategy: tf.distribute.Strategy, fn: Callable, args: tuple, kwargs: dict) -> bool:
    """Whether this is a call of a function of the user's, on rows, outside `fit` and from no replica."""
    context = step_context.current()
    if context.is_trying or context.run is not None or replication.replica_context() is not None:
        return False
    body = private.body_of(fn)
    if (getattr(body, "__module__", None) or "").split(".")[0] in _LIBRARIES or _code(fn) is None:
        return False
    has_rows = any(isinstance(each, distribute.PerReplica) for each in tf.nest.flatten((args, kwargs)))
    return has_rows and replication.is_replicated(strategy) and strategy.num_replicas_in_sync > 1


def _code(fn: Callable) -> object:
    """What tells one function from another: a lambda is another object in each call."""
    return getattr(private.body_of(fn), "__code__", None)


def _key(strategy: tf.distribute.Strategy, fn: Callable) -> tuple:
    """What tells two functions apart: their code, and the settings that it uses but does not change itself."""
    numbers, changing = _kept(strategy, "numbers", fn, {}), _kept(strategy, "changing", fn, set())
    return _code(fn), settings.key(private.body_of(fn), numbers, changing)


def _kept(strategy: tf.distribute.Strategy, name: str, fn: Callable, value: object) -> object:
    return vars(slots.of(strategy)).setdefault(name, {}).setdefault(_code(fn), value)


def _judge(strategy: tf.distribute.Strategy, fn: Callable, args: tuple, kwargs: dict) -> tuple:
    """Tries a function, keeps what was found, and says so where it would be something else on replicas.

    Returns:
        The function's key, in which what it changes itself has no part.

    Raises:
        InputError: `unproven="refuse"`, and it would, or could not be tried; or it is marked with `on_all_rows`.
    """
    name, tried = f"`{getattr(fn, '__name__', type(fn).__name__)}`", slots.of(strategy).tried_functions
    key, choice, why, differs = _key(strategy, fn), choices.of(fn), "", None
    if choice == choices.ON_ALL_ROWS:
        raise InputError(
            f"`tfgpu.on_all_rows` does not apply to {name}, which `strategy.run` runs on each replica's rows. Use "
            "`tfgpu.gather(x)` in it where it needs all rows."
        )
    try:
        if choice is None:
            tried_now = _RunTrial(strategy, fn, (args, kwargs)).found()
            differs = tried_now.differs
            _kept(strategy, "changing", fn, set()).update(tried_now.changes)
            key = _key(strategy, fn)
            kept = {} if tried_now.makes else {key: tried_now.changes}
            slots.of(strategy).changes_in_python = slots.get(strategy, "changes_in_python", {}) | kept
            known = slots.get(strategy, "scalar_ways", {})
            slots.of(strategy).scalar_ways = known | {key: tried_now.scalar_ways}
            slots.of(strategy).sums = slots.get(strategy, "sums", {}) | {key: tried_now.sums}
            draw_sizes.keep(strategy, key, tried_now.sizes)
            is_eager = tf.executing_eagerly()
            replica_attributes.tell(name, tried_now, strategy, tried_now.shared, is_eager=is_eager)
            if not differs:
                slots.of(strategy).even_functions[key] = name
            if tried_now.has_shares and not differs:
                _tell_division(name, captures.names_of(fn, strategy.num_replicas_in_sync))
    except (CannotTry, row_sums.Meets) as error:
        why = str(error)
        _note(strategy, name, verdicts.BY_ROWS, why, verdicts.UNPROVEN)
        _tell_untried(strategy, name, why)
        tried.add(key)
        return key
    tried.add(key)
    source = verdicts.TRIED if choice is None else verdicts.MARKED
    if not differs:
        _note(strategy, name, verdicts.BY_ROWS, why, source)
        return key
    _note(strategy, name, verdicts.NOT_AS_ONE, f"{differs} would differ", source)
    _tell(strategy, name, differs)
    return key


def _judge_uneven(
    strategy: tf.distribute.Strategy, fn: Callable, args: tuple, kwargs: dict, name: str, key: tuple
) -> None:
    """Tries a function in uneven parts that gives in even ones what one device gives, and says so if it does not.

    Raises:
        InputError: `unproven="refuse"`, and it does not.
    """
    try:
        found = _RunTrial(strategy, fn, (args, kwargs), _UNEVEN).found()
    except (CannotTry, row_sums.Meets):
        return
    known = slots.of(strategy).scalar_ways.get(key, {})
    shown = {name: way for name, way in found.scalar_ways.items() if way != scalar_updates.UNKNOWN}
    known.update({name: way for name, way in shown.items() if known.get(name) == scalar_updates.UNKNOWN})
    other = (f"the metric {name!r}" for name, way in shown.items() if way != known.get(name))
    differs = found.differs or next(other, None)
    if differs:
        why = f"{differs} would differ where replicas hold different numbers of rows"
        _note(strategy, name, verdicts.NOT_AS_ONE, why, verdicts.TRIED)
        _say(
            strategy,
            f"{name} of `strategy.run` counts each replica alike, however many rows it holds: {differs} would differ "
            "from one device's in a batch that replicas cannot divide evenly, as the last one of an epoch may be.",
            "Divide sums over rows by the global number of rows (`tf.nn.compute_average_loss(..., "
            "global_batch_size=...)`), return a Keras loss as it is, or batch with `drop_remainder=True`.",
        )


def _note(strategy: tf.distribute.Strategy, name: str, becomes: str, why: str, source: str) -> None:
    verdicts.note(verdicts.Piece(f"function {name[1:-1]}", becomes, why, source), strategy)


def _tell(strategy: tf.distribute.Strategy, name: str, differs: str) -> None:
    said = (
        f"{name} of `strategy.run` mixes rows of the batch, or uses gradients: {differs} would differ from one "
        "device, because each replica runs it on its own rows."
    )
    advice = (
        "Use `tfgpu.gather(x)` where it needs all rows, move that code into your own loss, metric or layer, or train "
        "with `fit`. `apply_gradients` sums gradients over replicas: do not sum them before."
    )
    _say(strategy, said, advice)


def _say(strategy: tf.distribute.Strategy, said: str, advice: str) -> None:
    if slots.get(strategy, "unproven") == "refuse":
        raise InputError(f"{said} The strategy's `unproven` is 'refuse'. {advice}")
    _log.warning("%s %s If this is intended, mark the function with `@tfgpu.by_rows`.", said, advice)


def _tell_untried(strategy: tf.distribute.Strategy, name: str, why: str) -> None:
    said = f"{name} of `strategy.run` could not be tried ({why}), so it is unknown whether it matches one device."
    if slots.get(strategy, "unproven") == "refuse":
        raise InputError(f"{said} Mark the function with `@tfgpu.by_rows` if it does.")
    _log.warning("%s Each replica runs it on its own rows. Mark it with `@tfgpu.by_rows` if that is right.", said)


def _tell_division(name: str, divisors: list[str]) -> None:
    """Stock TensorFlow leaves it to the function to divide a loss that is one number; here it counts by its share."""
    if divisors:
        _log.warning(
            "Your own loss in %s returns one number, which is weighted by its replica's share of the batch, so the sum "
            "over replicas is one device's. If the function also divides it by the number of replicas (%s), remove "
            "that.",
            name,
            ", ".join(f"`{each}`" for each in divisors),
        )


class _RunTrial(Trial):
    """Runs a function on rows, whole and in two parts, as one device and as replicas."""

    log = "what it returns"

    def __init__(self, strategy: tf.distribute.Strategy, fn: Callable, arguments: tuple, parts: tuple = _PARTS):
        function = getattr(fn, "python_function", fn)
        super().__init__(function)
        self._each_part = parts
        self._has_again = self._one_is_enough = parts != _PARTS  # the trial in even parts has seen the rest
        self._strategy, self._function, self._structure = strategy, function, arguments
        self._leaves = tf.nest.flatten(arguments)
        self._at = [at for at, leaf in enumerate(self._leaves) if isinstance(leaf, distribute.PerReplica)]
        self._met: tuple | None = None
        self._asks_for_sizes = not self._has_again
        self._sums: set[int] = set()
        self._fitting: dict[str, set[str]] = {}  # of each metric that gets one number, the ways that all batches show
        self._divides = strategy.num_replicas_in_sync in self._captured.numbers

    def found(self) -> Tried:
        """What the trial finds, in this run or in an earlier one.

        Raises:
            CannotTry: it ran on none of the rows.
            Meets: it combines the replicas' rows itself.
        """
        others = [None if at in self._at else leaf for at, leaf in enumerate(self._leaves)]
        arguments = tf.nest.pack_sequence_as(self._structure, others)
        others = code_digest.rows_of(arguments)
        things = self._function, self._each_part, self._strategy, self._specs(), self._own_rows(), others

        def kept(found: Tried) -> dict | None:  # metrics may have other names in later runs
            return None if found.scalar_ways else found.kept()

        return store.found("function", things, self.run, kept, Tried, weights=True)

    def run(self) -> Tried:
        found = super().run()
        ways = {} if found.differs else scalar_updates.chosen(self._fitting)
        return found if found.differs else dataclasses.replace(found, scalar_ways=ways, sums=sorted(self._sums))

    def _found(self) -> str | None:
        differs = super()._found()
        if differs is None and scalar_updates.UNKNOWN in scalar_updates.chosen(self._fitting).values():
            self._show_rare()
        return differs

    def _show_rare(self) -> None:
        """Runs once more as if all were equal: the right answers among many classes, say, are 0 else."""
        batch = next(drawn_batches(self._specs(), self._captured.numbers, _ROWS, self._told))
        with contextlib.suppress(Exception), private.equalities_hold():  # the user's code, on rows that are not its own
            whole, *parts = (self._recorded(batch, *rows) for rows in ((0, _ROWS), *self._each_part))
            fitting = self._fitting_ways(whole, parts, self._close)
            self._fitting.update({name: ways for name, ways in fitting.items() if ways})

    def _difference(self, batch: list) -> str | None:
        return self._and_in_size(super()._difference(batch), batch)

    def _of_size(self, differs: str, batch: list, scale: Callable) -> str:
        """Replicas that have met may have the gradients of all rows, and do with them what they like."""
        if not (self._met and self._met[1].were_held):
            return differs
        whole, *parts = (self._recorded(batch, *rows, scale=scale) for rows in ((0, _ROWS), *self._each_part))
        return self._what_differs(whole, parts, whole, close=self._close, keeps=False) or ""

    def _what_differs(self, whole: Recorder, parts: list[Recorder], again: Recorder, *, close: float, keeps=True):
        found = super()._what_differs(whole, parts, again, close=close, keeps=keeps)
        if found is not None or len(parts) == 1:
            return found
        fitting = self._fitting_ways(whole, parts, close)
        if keeps:
            self._fitting.update(fitting)
            self._sums |= reduced_outputs.are_sums(whole.logs, [part.logs for part in parts], close)
        return next((f"the metric {name!r}" for name, ways in fitting.items() if not ways), None)

    def _fitting_ways(self, whole: Recorder, parts: list[Recorder], close: float) -> dict[str, set[str]]:
        """Of each metric that gets one number, the ways that these parts show, too."""
        shares, numbers = [part.share for part in parts], [part.scalars for part in parts]
        fitting = scalar_updates.ways(whole.scalars, numbers, shares, max(close, comparison.CLOSE))
        return {name: ways & self._fitting.get(name, ways) for name, ways in fitting.items()}

    def _batches(self) -> Iterator[list]:
        # Workers have rows of their own, and must find the same.
        if not replication.spans_processes(self._strategy) and (own := self._own_rows()) is not None:
            yield own
        yield from drawn_batches(self._specs(), self._captured.numbers, _ROWS, self._told)

    def _held(self) -> list[tuple]:
        return [self._strategy.experimental_local_results(self._leaves[at]) for at in self._at]

    def _specs(self) -> list[tf.TypeSpec]:
        return [tf.type_spec_from_value(rows[0]) for rows in self._held()]

    def _own_rows(self) -> list[tf.Tensor] | None:
        """The first rows of the function's arguments, where they have numbers yet, and enough of them."""
        held = self._held()
        if not all(tf.is_tensor(each) and hasattr(each, "numpy") for rows in held for each in rows):
            return None
        whole = [tf.concat(rows, 0) if rows[0].shape.rank else rows[0] for rows in held]
        if not all(not each.shape.rank or each.shape[0] >= _ROWS for each in whole):
            return None
        return [each[:_ROWS] if each.shape.rank else each for each in whole]

    def _parts(self) -> tuple[tuple[int, int], ...]:
        return self._each_part

    def _shares(self, parts: list[Recorder], *, is_plain: bool) -> list[float]:
        """Replicas of a loop by hand count alike in TensorFlow's averages."""
        return [1 / len(parts)] * len(parts) if is_plain else super()._shares(parts, is_plain=is_plain)

    def _recorded(
        self, batch: list, start: int, stop: int, *, seed: int = 0, scale: Callable | None = None
    ) -> Recorder:
        if stop - start == _ROWS:
            return self._run_on(batch, start, stop, row_sums.Meetings(1), seed, scale)
        if self._met is None or self._met[0] is not batch or self._met[2] is not scale:
            self._met = batch, row_sums.Meetings(len(self._each_part)), scale
        meetings, mine = self._met[1], self._each_part.index((start, stop))
        others = [at for at in range(len(self._each_part)) if at != mine]
        for _ in range(_MEETINGS):
            for at in (mine, *others):
                meetings.begin(at)
                with contextlib.suppress(row_sums.Waits):
                    found = self._run_on(batch, *self._each_part[at], meetings, seed, scale)
                    if at == mine:
                        return found
        raise row_sums.Meets("its replicas communicate too often, or not all in the same order")

    def _run_on(
        self, batch: list, start: int, stop: int, meetings: row_sums.Meetings, seed: int, scale: Callable | None
    ) -> Recorder:
        rows = [worker_rows.sliced(each, start, stop - start) if each.shape.rank else each for each in batch]
        leaves = [_shared(leaf, is_later=self._sandbox.is_later) for leaf in self._leaves]
        for at, value in zip(self._at, rows, strict=True):
            leaves[at] = value
        args, kwargs = tf.nest.pack_sequence_as(self._structure, leaves)
        found = Recorder((stop - start) / _ROWS, start, stop, _ROWS, self._each_part, meetings=meetings, scale=scale)
        numbers = (tf.constant(n, tf.int32) for n in (stop - start, start, _ROWS))
        count = 1 if stop - start == _ROWS else len(self._each_part)
        with (
            self._sandbox.around(found, seed) as scope,
            step_context.scope(is_trying=True, recorder=found, trial_rows=RowRange(*numbers), given_rows=None),
            self._noted.run(stop - start),
            distribute.as_replicas(self._strategy, count),
            private.functions_run_eagerly(),
            tf.device("CPU:0"),
            scope.noting(),
        ):
            for _ in range(self._calls):
                outputs = self._function(*args, **kwargs)
                tensors = [each for each in tf.nest.flatten(outputs) if tf.is_tensor(each)]
                tensors = [each for each in tensors if tf.as_dtype(each.dtype).is_floating]
                found.logs += [comparison.in_float64(each) for each in tensors]
        for key in found.scalar_states:  # judged by what the metric was given
            found.assigned.pop(key, None)
        if found.is_narrow:
            self._close = max(self._close, CLOSE_IN_16_BITS)
        return found

    def _gradients_together(self, parts: list) -> list[list]:
        """The sum over the parts; and half of it, of a function that divides by the number of replicas."""
        found = super()._gradients_together(parts)
        halves = [None if each is None else each / len(parts) for each in found[0]]
        divides = self._divides and not (self._met and self._met[1].were_held)
        return [*found, halves] if divides and len(parts) > 1 else found

    def _log_together(self, values: list[np.ndarray], shares: list[float]) -> list[np.ndarray]:
        """What the caller may make of the replicas' outputs: a sum, a mean, or their rows together."""
        ways = [sum(values), sum(share * value for share, value in zip(shares, values, strict=True))]
        if values[0].ndim:
            ways.append(np.concatenate(values))
        return ways


def _shared(argument: object, *, is_later: bool) -> object:
    """An argument of all replicas, such as a loss's weight: one without a number yet gets some.

    After many steps one that is 0 is another number.
    """
    is_tensor = isinstance(argument, tf.Tensor)
    if is_tensor and not hasattr(argument, "numpy"):
        return _drawn(argument)
    is_number = isinstance(argument, float) or (is_tensor and argument.dtype.is_floating and argument.shape.rank == 0)
    return argument + BETWEEN if is_later and is_number and float(argument) == 0 else argument


def _drawn(argument: tf.Tensor) -> tf.Tensor:
    """Numbers in the place of an argument of a traced function."""
    shape, dtype = argument.shape, argument.dtype
    if not shape.is_fully_defined() or not (dtype.is_floating or dtype.is_integer or dtype.is_bool):
        return argument
    if not dtype.is_floating:
        return tf.cast(tf.ones(shape), dtype)
    return draws.cast(draws.values(np.random.default_rng(0), tuple(shape), "positive"), dtype)
