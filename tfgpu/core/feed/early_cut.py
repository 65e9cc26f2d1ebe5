"""Cuts a dataset of the user's own as early as its stages allow: each worker then makes its rows of each batch.

A stage that handles each element by itself can run after the cut, on this worker's elements only. What decides the
order or the number of elements (a shuffle, a filter), or has state (random numbers, Python), runs on every worker, and
so does all that comes before it:

    files.shuffle(n)    .map(decode, ...).batch(b)       .map(rescale).prefetch(2)
    every worker      | one worker's elements            one worker's rows

Before `batch` the cut takes elements out of windows of a batch's size; after it, rows out of batches. `repeat`, `take`
and `skip` beyond the cut do the same before it, where they cost less; so does `zip`, and thus `enumerate`, of elements.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import datasets, slots
from tfgpu.compat import tensorflow as private
from tfgpu.compat.datasets import Batch, Counted, Map, Stage, Zip
from tfgpu.core import worker_rows
from tfgpu.core.feed import notes, row_functions
from tfgpu.core.feed.notes import Obstacle
from tfgpu.core.feed.row_functions import Kind
from tfgpu.core.worker_rows import Ranges, WorkerRows

_log = logging.getLogger(__name__)
_READING = frozenset(
    "Assert Case HashTableV2 If LookupTableFindV2 LookupTableSizeV2 ReadVariableOp ResourceGather "
    "StatefulPartitionedCall VarHandleOp VariableShape While".split()
)
"""Operations that TensorFlow calls stateful, but that only read, or call others."""


@dataclass(frozen=True)
class Cut:
    """Where a dataset can be cut.

    Attributes:
        base: what every worker makes.
        stages: what follows, in order.
        have_rows: of a base of batches, which of its tensors have the batch's rows; None for a base of elements.
    """

    base: tf.data.Dataset
    stages: tuple["Stage | Branches", ...]
    have_rows: tuple[bool, ...] | None = None


@dataclass(frozen=True)
class Branches:
    """The maps of datasets that `Dataset.zip` puts together, as one that runs after it.

    Attributes:
        zipped: what they were.
        maps: of each, in order.
    """

    zipped: Zip
    maps: tuple[tuple[Map, ...], ...]

    @property
    def parallel_calls(self) -> int | None:
        """`num_parallel_calls` of the map that runs all: the largest, or tf.data's own choice."""
        calls = [stage.parallel_calls for each in self.maps for stage in each if stage.parallel_calls is not None]
        return (min if tf.data.AUTOTUNE in calls else max)(calls, default=None)


def rows_of(dataset: tf.data.Dataset, ranges: Ranges) -> WorkerRows | None:
    """How to make one worker's rows of a dataset; None if nothing of it can be left to the other workers."""
    kept = vars(slots.of(dataset)).setdefault("early_cuts", {})
    if ranges not in kept:
        kept[ranges] = None if datasets.is_in_debug_mode() else _rows_of(dataset, ranges)
    return kept[ranges]


def _rows_of(dataset: tf.data.Dataset, ranges: Ranges) -> WorkerRows | None:
    cut, obstacle = find(dataset)
    if obstacle is not None and ranges.shards[0] == 0:  # the chief
        notes.tell(dataset if cut is None else cut.base, obstacle)
    if cut is None:
        return None

    def make(ranges: Ranges, shown: int | None = None) -> tf.data.Dataset:
        return build(cut, ranges, shown).with_options(dataset.options())

    made = make(ranges)
    if not _is_alike(made.element_spec[0], dataset.element_spec):
        _log.debug("Not cut early: %s is not like %s.", made.element_spec[0], dataset.element_spec)
        return None
    showing = make if _can_show(cut) else None
    first = slots.get(dataset, "first_batch")  # of arrays
    return WorkerRows(lambda given: made if given == ranges else make(given), first, showing)


def _is_alike(spec: object, whole: object) -> bool:
    """Whether two specs are the same but for the number of rows."""
    try:
        tf.nest.assert_same_structure(spec, whole)
    except (ValueError, TypeError):
        return False
    pairs = zip(tf.nest.flatten(spec), tf.nest.flatten(whole), strict=True)
    return all(type(one) is type(other) and _but_for_rows(one) == _but_for_rows(other) for one, other in pairs)


def _but_for_rows(spec: object) -> object:
    return (spec.dtype, spec.shape[1:]) if isinstance(spec, tf.TensorSpec | tf.RaggedTensorSpec) else spec


def find(dataset: tf.data.Dataset) -> tuple[Cut | None, Obstacle | None]:
    """The earliest cut of a dataset that leaves a `map` to the workers, if any, and the stage that it cannot pass."""
    best, passed, batch = None, [], None
    while (found := datasets.stage_of(dataset)) is not None:
        stage, source = found
        obstacle = None
        if isinstance(stage, Batch):
            obstacle = Obstacle.ORDER if batch is not None else None
            batch = stage
        elif isinstance(stage, Map) and not _is_one_to_one(stage):
            obstacle = Obstacle.STATE
        elif isinstance(stage, Map) and batch is not None:
            obstacle = None if _is_plain(stage.element_spec) else Obstacle.STRUCTURE
            best = best if obstacle else Cut(source, (stage, *passed))
        elif isinstance(stage, Map):
            have_rows = _rows_taken(stage)
            obstacle = Obstacle.ROWS if have_rows is None else None
            best = best if obstacle else Cut(source, (stage, *passed), have_rows)
            if have_rows is not None and not all(have_rows):
                return best, None
        if obstacle is not None:
            return best, obstacle
        passed.insert(0, stage)
        dataset = source
    branches = _branches_of(dataset) if batch is not None else None
    if branches is not None:
        base, stage = branches
        return Cut(base, (stage, *passed)), Obstacle.ORDER
    return best, Obstacle.ORDER


def _branches_of(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, Branches] | None:
    """A `zip` of datasets without their last maps, and those maps; None if it has none."""
    zipped = datasets.zip_of(dataset)
    found = [] if zipped is None else [_without_maps(each) for each in tf.nest.flatten(zipped.datasets)]
    if not any(maps for _, maps in found):
        return None
    base = tf.data.Dataset.zip(zipped.packed([before for before, _ in found]))
    return (base, Branches(zipped, tuple(maps for _, maps in found))) if _is_plain(base.element_spec) else None


def _without_maps(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, tuple[Map, ...]]:
    """The dataset before its last maps, with the stages among them that choose by place, and those maps."""
    best, passed, at = (dataset, ()), [], dataset
    while (found := datasets.stage_of(at)) is not None:
        stage, at = found
        if isinstance(stage, Batch) or (isinstance(stage, Map) and not _is_one_to_one(stage)):
            break
        passed.insert(0, stage)
        if isinstance(stage, Map):
            best = _counted(at, passed), tuple(each for each in passed if isinstance(each, Map))
    return best


def _is_one_to_one(stage: Map) -> bool:
    """Whether a function gives the same for the same element, whatever others it was called with."""
    if not datasets.is_callable_anew(stage.function):
        return False
    found = private.operations_of(stage.function.graph)
    return all(kind in _READING or not private.is_stateful(kind) for kind in found)


def _is_plain(spec: object) -> bool:
    return all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(spec))


def _rows_taken(stage: Map) -> tuple[bool, ...] | None:
    """Which of its tensors a function takes, and gives, row by row; None if it does not."""
    if not _is_plain((stage.element_spec, stage.output_spec)):
        return None
    specs = tf.nest.flatten(stage.element_spec)
    choices = [tuple(spec.shape.rank != 0 for spec in specs)]
    choices += [tuple(spec is each for spec in specs) for each in specs if each.shape.rank and len(specs) > 1]
    for have_rows in choices:
        given = [
            (tf.TensorSpec([None, *spec.shape[1:]], spec.dtype), Kind.ROWS) if has_rows else (spec, Kind.FREE)
            for spec, has_rows in zip(specs, have_rows, strict=True)
            if spec.shape.rank is not None
        ]
        if len(given) == len(specs) and any(have_rows):
            if row_functions.gives_rows(datasets.imported(stage.function), given):
                return have_rows
    return None


def build(cut: Cut, ranges: Ranges, shown: int | None = None) -> tf.data.Dataset:
    """The dataset of one worker's rows, and each batch's number of rows.

    Args:
        cut: from `find`.
        ranges: the worker's.
        shown: number of a batch that is given whole before it comes, in elements of as many rows as the worker makes of
            a full batch, the last one filled up; None: of none.
    """
    if cut.have_rows is not None:
        batches, taking = _counted(cut.base, cut.stages), _Taking(cut.have_rows, ranges)
        if shown is None:
            first, *others = cut.stages  # a map
            made = batches.map(taking.and_then(first), **_parallel(first))
            return _followed(made, others, by_rows=True)
        made = batches.enumerate().flat_map(functools.partial(taking.shown_and_own, shown))
        return _followed(made, cut.stages, by_rows=True)
    at, batch = _batch_in(cut.stages)
    elements, rows = cut.stages[:at], cut.stages[at + 1 :]
    before, after = _parted(batch, rows)

    def made(shown: int | None) -> tf.data.Dataset:
        windows = _counted(cut.base, elements).window(batch.rows, drop_remainder=batch.drop_remainder)
        own = _followed(_elements_of_windows(_counted(windows, before), batch.rows, ranges, shown), elements)
        return batch.apply(own, ranges.rows(batch.rows)).map(_with_one_total)

    found = made(shown)
    if shown is None or not after:
        found = _counted(found, after)
    elif (count := after[0].number) not in (0, 1):
        found = found.concatenate(made(None).repeat(max(count - 1, -1)))
    return _followed(found, rows, by_rows=True)


def _batch_in(stages: Sequence[Stage]) -> tuple[int, Batch]:
    return next((at, stage) for at, stage in enumerate(stages) if isinstance(stage, Batch))


def _parted(batch: Batch, stages: Sequence[Stage]) -> tuple[list[Stage], list[Stage]]:
    """Of the stages after a batch that choose by place, those of windows, and those of made batches.

    Where a pass ends with a smaller batch, only whole passes can be repeated.
    """
    chosen = [stage for stage in stages if isinstance(stage, Counted) and stage.kind != "prefetch"]
    repeats = [at for at, stage in enumerate(chosen) if stage.kind == "repeat"]
    at = repeats[0] if repeats and not batch.drop_remainder else len(chosen)
    return chosen[:at], chosen[at:]


def _can_show(cut: Cut) -> bool:
    """Whether `build` can show a batch."""
    if cut.have_rows is not None:
        return True
    at, batch = _batch_in(cut.stages)
    after = _parted(batch, cut.stages[at + 1 :])[1]
    return not after or (len(after) == 1 and after[0].number != 0)


@tf.autograph.experimental.do_not_convert
def _with_one_total(rows, totals):
    return rows, totals[0]


def _counted(dataset: tf.data.Dataset, stages: Sequence[Stage]) -> tf.data.Dataset:
    """The stages that choose elements by their place."""
    for stage in stages:
        if isinstance(stage, Counted) and stage.kind != "prefetch":
            dataset = stage.apply(dataset)
    return dataset


def _followed(dataset: tf.data.Dataset, stages: Sequence[Stage], by_rows: bool = False) -> tf.data.Dataset:
    """The stages that change elements, or batches by rows, on pairs of one and the number of rows of its batch."""
    for stage in stages:
        if isinstance(stage, Counted) and stage.kind == "prefetch":
            dataset = stage.apply(dataset)
        elif isinstance(stage, Map):
            dataset = dataset.map(_beside_total(stage, by_rows), **_parallel(stage))
        elif isinstance(stage, Branches):
            dataset = dataset.map(_of_branches(stage), **_parallel(stage))
    return dataset


def _of_branches(stage: Branches) -> Callable:
    maps = [[(each, datasets.imported(each.function)) for each in branch] for branch in stage.maps]

    @tf.autograph.experimental.do_not_convert
    def call(element, total):
        parts = stage.zipped.parts(element)
        for at, branch in enumerate(maps):
            for each, called in branch:
                parts[at] = each.call(parts[at], called)
        return stage.zipped.packed(parts), total

    return call


def _parallel(stage: Map | Branches) -> dict:
    """Arguments of `Dataset.map`. An element that overtakes another would get into its batch."""
    return {} if stage.parallel_calls is None else {"num_parallel_calls": stage.parallel_calls, "deterministic": True}


def _beside_total(stage: Map, by_rows: bool) -> Callable:
    called, stage_call = datasets.imported(stage.function), stage.call_on_rows if by_rows else stage.call

    @tf.autograph.experimental.do_not_convert
    def call(element, total):
        return stage_call(element, called), total

    return call


def _elements_of_windows(windows: tf.data.Dataset, most: int, ranges: Ranges, shown: int | None) -> tf.data.Dataset:
    """The worker's elements of each window, each with the window's length; windows have `most` elements or fewer."""

    @tf.autograph.experimental.do_not_convert
    def elements(number, window):
        elements = tf.data.Dataset.zip(window) if tf.nest.is_nested(window) else window
        total = tf.cast(tf.nest.flatten(window)[0].cardinality(), tf.int32)
        pieces = [
            elements.skip(tf.cast(at, tf.int64)).take(tf.cast(held, tf.int64)) for at, held in ranges.pieces(total)
        ]
        if shown is not None:
            pieces.insert(0, _whole(elements, total, number == shown, ranges.rows(most)))
        found = pieces[0]
        for piece in pieces[1:]:
            found = found.concatenate(piece)
        return tf.data.Dataset.zip((found, tf.data.Dataset.from_tensors(total).repeat()))

    return windows.enumerate().flat_map(elements)


def _whole(elements: tf.data.Dataset, total: tf.Tensor, is_shown: tf.Tensor, rows: int) -> tf.data.Dataset:
    """All elements of a window, if it is shown, filled up to a multiple of `rows`."""
    count = tf.where(is_shown, -(-total // rows) * rows, 0)
    return elements.concatenate(elements.take(1).repeat()).take(tf.cast(count, tf.int64))


@dataclass(frozen=True)
class _Taking:
    """Takes a worker's rows out of batches.

    Attributes:
        have_rows: which tensors of a batch have its rows; the others are passed on.
        ranges: the worker's.
    """

    have_rows: Sequence[bool]
    ranges: Ranges

    def _total(self, batch) -> int | tf.Tensor:
        pairs = zip(tf.nest.flatten(batch), self.have_rows, strict=True)
        return worker_rows.common_rows([value for value, has_rows in pairs if has_rows])

    def _taken(self, batch, take: Callable) -> object:
        pairs = zip(tf.nest.flatten(batch), self.have_rows, strict=True)
        return tf.nest.pack_sequence_as(batch, [take(value) if has_rows else value for value, has_rows in pairs])

    def and_then(self, stage: Map) -> Callable:
        """A function of a whole batch: what the stage makes of the worker's rows, and the batch's number of rows."""
        called, is_tuple = datasets.imported(stage.function), type(stage.element_spec) is tuple

        @tf.autograph.experimental.do_not_convert
        def own(*batch):
            batch = batch if is_tuple else batch[0]
            total = self._total(batch)
            rows = self._taken(batch, lambda value: self.ranges.take_from(value, total))
            return stage.call_on_rows(rows, called), total

        return own

    def shown_and_own(self, shown: int, number: tf.Tensor, batch) -> tf.data.Dataset:
        """The worker's rows of batch number `number`; before them all its rows, in parts, if it is shown."""
        total = self._total(batch)
        rows = self.ranges.rows(total)
        starts = tf.range(0, tf.where(number == shown, total, 0), rows)

        @tf.autograph.experimental.do_not_convert
        def part(start):
            part = tf.range(rows) + start
            part = tf.cast(tf.where(part < total, part, 0), tf.int64)
            places = tf.where(start < 0, self.ranges.indices(total), part)
            return self._taken(batch, lambda value: tf.gather(value, places)), total

        return tf.data.Dataset.from_tensor_slices(tf.concat([starts, [-1]], 0)).map(part)
