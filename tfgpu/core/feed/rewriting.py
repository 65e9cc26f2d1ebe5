"""Builds the dataset of one worker's rows from the stages before and after a cut (`early_cut`)."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.compat.datasets import Batch, Counted, Map, Stage, Zip
from tfgpu.core import worker_rows
from tfgpu.core.worker_rows import Ranges, WorkerRows


@dataclass(frozen=True)
class Cut:
    """Where a dataset can be cut.

    Attributes:
        base: what every worker makes.
        stages: what follows, in order.
        have_rows: of a base of batches, which of its tensors have the batch's rows; None for a base of elements.
        own: how to make one worker's rows of the base, if that is registered.
    """

    base: tf.data.Dataset
    stages: tuple["Stage | Branches", ...]
    have_rows: tuple[bool, ...] | None = None
    own: WorkerRows | None = None


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


def build(cut: Cut, ranges: Ranges, shown: int | None = None) -> tf.data.Dataset:
    """The dataset of one worker's rows, and each batch's number of rows.

    Args:
        cut: from `find`.
        ranges: the worker's.
        shown: number of a batch that is given whole before it comes, in elements of as many rows as the worker makes of
            a full batch, the last one filled up; None: of none.
    """
    if cut.own is not None:
        return _followed(counted(cut.own.make(ranges), cut.stages), cut.stages, by_rows=True)
    if cut.have_rows is not None:
        batches, taking = counted(cut.base, cut.stages), _Taking(cut.have_rows, ranges)
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
        windows = counted(cut.base, elements).window(batch.rows, drop_remainder=batch.drop_remainder)
        own = _followed(_elements_of_windows(counted(windows, before), batch.rows, ranges, shown), elements)
        return batch.apply(own, ranges.rows(batch.rows)).map(_with_one_total)

    found = made(shown)
    if shown is None or not after:
        found = counted(found, after)
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


def can_show(cut: Cut) -> bool:
    """Whether `build` can show a batch."""
    if cut.own is not None or cut.have_rows is not None:
        return cut.own is None
    at, batch = _batch_in(cut.stages)
    after = _parted(batch, cut.stages[at + 1 :])[1]
    return not after or (len(after) == 1 and after[0].number != 0)


@tf.autograph.experimental.do_not_convert
def _with_one_total(rows, totals):
    return rows, totals[0]


def counted(dataset: tf.data.Dataset, stages: Sequence[Stage]) -> tf.data.Dataset:
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
