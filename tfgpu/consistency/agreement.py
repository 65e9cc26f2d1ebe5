"""When `fit` begins, all workers compare what must be equal, and name what is not.

Each sends hashes of its facts, which have one shape whatever the facts are. Only where hashes differ do they send the
facts themselves. All workers see the same, so all raise the same error, and none waits for another.
"""

import hashlib
import json
import logging
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfgpu.compat import distribute, slots
from tfgpu.consistency import facts, settings, watch
from tfgpu.core import batch_sharding, extensions, replication, step_blocks
from tfgpu.core.feed import sharded_dataset
from tfgpu.core.state import broadcast
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)
_SAME_DATA = (
    "The workers make rows of the same batches, so the data must be the same on all: set the same seed on every "
    "worker, and number labels in a fixed order (`sorted(set(...))`). If each worker has data of its own, set "
    "`experimental_distribute.auto_shard_policy` in the dataset's options to OFF."
)
_SAME_CALL = "Use the same arguments on every worker."
_FIXES = {
    "arguments of `fit`": _SAME_CALL,
    "arguments of `compile`": _SAME_CALL,
    "callbacks": "Give `fit` the same callbacks on each worker; those that only write may differ.",
    "model": "Build the same model on every worker.",
    "blocks of steps": "Give `fit` the same callbacks and settings on each worker.",
    "first batch": _SAME_DATA,
}
Facts = dict[str, str]


def _begin(run: step_blocks.Run) -> None:
    strategy = run.model.distribute_strategy
    checks = settings.of(strategy)
    is_compared = run.kind == "train" and checks is not None and checks.every != 0
    if is_compared and replication.spans_processes(strategy) and distribute.num_workers(strategy) > 1:
        run.on_meeting.append(lambda strategy: _meet(strategy, run))
        run.looks_at_first_batch = True
        run.before_steps.append(lambda block: _before_steps(strategy, run, block))


def _meet(strategy: tf.distribute.Strategy, run: step_blocks.Run) -> None:
    """Compares how `fit` was called. Every worker must call it.

    Raises:
        InputError: raised on all workers if something differs.
    """
    if slots.get(run, "has_met"):  # data that is distributed again
        return
    slots.of(run).has_met = True
    mine = {
        "arguments of `fit`": facts.of_arguments(run),
        "arguments of `compile`": facts.of_compile(run.model),
        "callbacks": facts.of_callbacks(run, acting=True),
        "model": facts.of_model(run.model),  # before its optimizer makes variables, which is a collective each
        "": facts.of_callbacks(run, acting=False),
    }
    for item, found in differing(strategy, mine).items():
        if item:
            raise refuse(strategy, item, found)
        told = [f"{name} has {', '.join(each) or 'none'}" for name, each in zip(names(strategy), found, strict=True)]
        _log.info(
            "Callbacks differ between workers: %s. This is fine if they only write files. If one changes the training, "
            "replicas will differ, and `fit` will report it.",
            "; ".join(told),
        )


def _before_steps(strategy: tf.distribute.Strategy, run: step_blocks.Run, block: object) -> None:
    """Compares the models, their values and the first batch. Every worker must call it.

    Raises:
        InputError: raised on all workers if something differs.
        ReplicasDiffer: the values of variables differ.
    """
    batch = _peek(block)
    run.looks_at_first_batch = False
    mine = {
        "model": facts.of_model(run.model),
        "blocks of steps": facts.of_blocks(run, block),
        "first batch": {} if batch is None else facts.of_batch(batch),
    }
    for item, found in differing(strategy, mine).items():
        if item == "first batch" and (changed := _changed_inputs(found)):
            _log.warning(
                "The workers' first batches have the same labels but different %s. If random augmentation causes this, "
                "use the same seed on all workers to get one device's result. If the rows differ: %s",
                ", ".join(changed),
                _SAME_DATA,
            )
            continue
        raise refuse(strategy, item, found)
    found = watch.watch_of(run.model)
    if found is not None:
        found.compare()


def differing(strategy: tf.distribute.Strategy, mine: dict[str, Facts]) -> dict[str, list[Facts]]:
    """The items that are not the same on all workers, with each worker's facts. Every worker must call it.

    Args:
        strategy: of several workers.
        mine: this worker's facts by item; all workers have the same items.
    """
    texts = {item: json.dumps(found).encode() for item, found in mine.items()}
    hashes = [hashlib.sha256(text).digest()[:8] for text in texts.values()]
    table = broadcast.of_all_workers(strategy, np.frombuffer(b"".join(hashes), "int64"))
    differ = (table != table[:1]).any(0)
    return {item: _of_all(strategy, texts[item]) for item, is_other in zip(texts, differ, strict=True) if is_other}


def refuse(strategy: tf.distribute.Strategy, item: str, found: Sequence[Facts]) -> InputError:
    """The error that names the first fact that differs, and each worker's."""
    paths = dict.fromkeys(path for each in found for path in each)
    path = next(path for path in paths if len({each.get(path) for each in found}) > 1)
    workers = names(strategy)
    if item == "callbacks" and "." not in path:
        told = [f"{name} {'has' if path in each else 'does not have'} {path}" for name, each in _pairs(workers, found)]
    else:
        told = [f"{each.get(path, 'none')} on {name}" for name, each in _pairs(workers, found)]
        told[0] = f"`{path}` is {told[0]}" if item != "first batch" else f"the {path} are {told[0]}"
    return InputError(f"The workers differ in their {item}: {', '.join(told)}. {_FIXES[item]}")


def names(strategy: tf.distribute.Strategy) -> list[str]:
    """The names of a strategy's workers, in order."""
    count = distribute.num_workers(strategy)
    chief = int("chief" in strategy.cluster_resolver.cluster_spec().jobs)
    return ["chief"] * chief + [f"worker {at}" for at in range(count - chief)]


def _pairs(workers: list[str], found: Sequence[Facts]) -> list[tuple[str, Facts]]:
    """At most the first worker's facts and those of three that have others."""
    pairs = list(zip(workers, found, strict=True))
    others = [pair for pair in pairs if pair[1] != pairs[0][1]]
    return [pairs[0], *others[:3]]


def _of_all(strategy: tf.distribute.Strategy, text: bytes) -> list[Facts]:
    (sizes,) = broadcast.of_all_workers(strategy, np.array([len(text)], "int64")).T
    padded = np.frombuffer(text.ljust(int(sizes.max())), "uint8")
    return [json.loads(row.tobytes()) for row in broadcast.of_all_workers(strategy, padded)]


def _changed_inputs(found: Sequence[Facts]) -> list[str]:
    """The inputs that differ, if nothing else does, and they have the same shapes."""
    if len({tuple(each) for each in found}) > 1:
        return []
    changed = [path for path in found[0] if len({each[path] for each in found}) > 1]
    are_alike = all(len({each[path].rpartition(" ")[0] for each in found}) == 1 for path in changed)
    has_labels = any(path.startswith("labels") for path in found[0])
    return changed if are_alike and has_labels and all(path.startswith("inputs") for path in changed) else []


def _peek(block: object) -> object:
    """Reads the first batch before the first step, and hands it on to that step.

    The data is read once: a generator, or a shuffle without a seed, would give something else the second time.

    Args:
        block: the block of steps that comes next.

    Returns:
        The whole batch, in host memory; None if the data has ended, or is not whole on this worker. Where a worker
        makes only its rows of the batches, it makes all rows of the first besides.
    """
    if not isinstance(block, step_blocks.Block):
        return None
    if sharded_dataset.has_rows(block.iterator):
        return block.iterator.first_batch()
    iterator, gives_row_ranges = sharded_dataset.source_of(block.iterator)
    if gives_row_ranges is None or not isinstance(iterator, tf.data.Iterator):
        return None
    with batch_sharding.on_host():
        found = iterator.get_next_as_optional()
        if not found.has_value():
            return None
        batch = found.get_value()
        block.first = _iterator_of(batch, iterator.element_spec)
    return batch


def _iterator_of(batch: object, spec: object) -> tf.data.Iterator:
    """An iterator of one batch, with the spec of the data, so that the step need not be traced again for it."""

    @tf.autograph.experimental.do_not_convert
    def give(_):
        tensors = tf.nest.flatten(batch, expand_composites=True)
        shapes = tf.nest.flatten(spec, expand_composites=True)
        given = [
            None if tensor is None else tf.raw_ops.PlaceholderWithDefault(input=tensor, shape=each.shape)
            for tensor, each in zip(tensors, shapes, strict=True)
        ]
        return tf.nest.pack_sequence_as(spec, given, expand_composites=True)

    return iter(tf.data.Dataset.from_tensors(0).map(give))


extensions.run_starts.register(_begin, order=1)
