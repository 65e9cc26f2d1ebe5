"""Cuts a dataset of the user's own as early as its stages allow: each worker then makes its rows of each batch.

A stage that handles each element by itself can run after the cut, on this worker's elements only. What decides the
order or the number of elements (a shuffle, a filter), or has state (random numbers, Python), runs on every worker, and
so does all that comes before it:

    files.shuffle(n)    .map(decode, ...).batch(b)       .map(rescale).prefetch(2)
    every worker      | one worker's elements            one worker's rows

Before `batch` the cut takes elements out of windows of a batch's size; after it, rows out of batches. `repeat`, `take`
and `skip` beyond the cut do the same before it, where they cost less; so does `zip`, and thus `enumerate`, of elements.
"""

import logging

import tensorflow as tf

from tfgpu.compat import datasets, slots
from tfgpu.compat import tensorflow as private
from tfgpu.compat.datasets import Batch, Map
from tfgpu.core import step_blocks, worker_rows
from tfgpu.core.feed import rewriting, row_functions
from tfgpu.core.feed.notes import Note, Obstacle
from tfgpu.core.feed.rewriting import Branches, Cut
from tfgpu.core.feed.row_functions import Kind
from tfgpu.core.worker_rows import Ranges, WorkerRows

_log = logging.getLogger(__name__)
_READING = frozenset(
    "Assert Case HashTableV2 If LookupTableFindV2 LookupTableSizeV2 ReadVariableOp ResourceGather "
    "StatefulPartitionedCall VarHandleOp VariableShape While".split()
)
"""Operations that TensorFlow calls stateful, but that only read, or call others."""


def rows_of(dataset: tf.data.Dataset, ranges: Ranges) -> WorkerRows | None:
    """How to make one worker's rows of a dataset; None if nothing of it can be left to the other workers."""
    kept = vars(slots.of(dataset)).setdefault("early_cuts", {})
    if ranges not in kept:
        kept[ranges] = None if datasets.is_in_debug_mode() else _rows_of(dataset, ranges)
    return kept[ranges]


def _rows_of(dataset: tf.data.Dataset, ranges: Ranges) -> WorkerRows | None:
    cut, obstacle = find(dataset)
    if obstacle is not None and ranges.shards[0] == 0:  # the chief
        note, run = Note(dataset, cut, obstacle), step_blocks.current()
        if run is None or run.kind != "train" or run.block is not None:  # validation begins after the first epoch
            note.tell()
        else:
            note.tell_with_cost(run)
    if cut is None:
        return None

    def make(ranges: Ranges, shown: int | None = None) -> tf.data.Dataset:
        return rewriting.build(cut, ranges, shown).with_options(dataset.options())

    made = make(ranges)
    if not _is_alike(made.element_spec[0], dataset.element_spec):
        _log.debug("Not cut early: %s is not like %s.", made.element_spec[0], dataset.element_spec)
        return None
    showing = make if rewriting.can_show(cut) else None
    first = slots.get(dataset, "first_batch") if cut.own is None else cut.own.first  # of arrays
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
    best, passed, is_batched = None, [], True  # whether elements are batches at this place
    while True:
        if is_batched and (own := worker_rows.of(dataset)) is not None:
            return Cut(dataset, tuple(passed), own=own), None
        if (found := datasets.stage_of(dataset)) is None:
            break
        stage, source = found
        obstacle, have_rows = _obstacle(stage, is_batched=is_batched)
        if obstacle is not None:
            return best, obstacle
        if isinstance(stage, Map):
            best = Cut(source, (stage, *passed), have_rows)
            if have_rows is not None and not all(have_rows):
                return best, None
        is_batched = is_batched and not isinstance(stage, Batch)
        passed.insert(0, stage)
        dataset = source
    branches = None if is_batched else _branches_of(dataset)
    if branches is not None:
        base, stage = branches
        return Cut(base, (stage, *passed)), Obstacle.ORDER
    return best, Obstacle.LENGTH if datasets.name_of(dataset) == "padded_batch" else Obstacle.ORDER


def _obstacle(stage: object, *, is_batched: bool) -> tuple[Obstacle | None, tuple[bool, ...] | None]:
    """Why a cut cannot pass a stage, if so; of a `map` over batches, which tensors it takes row by row."""
    if isinstance(stage, Batch):
        return None if is_batched else Obstacle.ORDER, None
    if not isinstance(stage, Map):
        return None, None
    if not _is_one_to_one(stage):
        return Obstacle.STATE, None
    if not is_batched:
        return None if _is_plain(stage.element_spec) else Obstacle.STRUCTURE, None
    have_rows = _rows_taken(stage)
    return Obstacle.ROWS if have_rows is None else None, have_rows


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
            best = rewriting.counted(at, passed), tuple(each for each in passed if isinstance(each, Map))
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
