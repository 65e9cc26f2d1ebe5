"""From a source to batches: splits, order, augmentation."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.data import cache as caching
from tfgpu.data import epoch, position, sources, splits
from tfgpu.data import service as remote
from tfgpu.data.augmentation import augment as augmentation
from tfgpu.data.augmentation import stages as augmentations
from tfgpu.data.augmentation import targets as moving
from tfgpu.data.decoding import Reading, check_size
from tfgpu.data.examples import Examples
from tfgpu.data.feed import Feed, batches
from tfgpu.data.structure.arrays import Target, Task, check_task, targets_of
from tfgpu.errors import InputError, is_number, whole_number

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Info:
    """What a run should know and record about its data.

    Attributes:
        name: the source's name.
        input_shape: one example's shape, such as (8, 8, 1); a dict of shapes for named inputs.
        classes, class_names: the number of classes, and one name per class; 0 and none for numbers and named targets.
        train_examples, validation_examples, test_examples: the number in each split.
        epoch_examples: the number that a training epoch reads; a mixture's may differ from `train_examples`.
        global_batch: examples in a batch over all replicas together.
        steps_per_epoch: batches in an epoch; the last one may be smaller.
        skipped: the number of corrupt examples that were skipped.
        augment: the training stages with all their options; `"auto"` is resolved.
        labels: `"class"`, the class index; `"one_hot"`, float32 [classes] in all splits, which mixing stages and label
            smoothing need, with the loss `CategoricalCrossentropy`; `"tokens"`, a class at each position of a sequence;
            `"numbers"` to predict, float32; or `"named"`, a dict of targets.
        targets: what the model learns of numbers, a `Target`, or of named targets, one by each name; else None.
        label_smoothing: the share of a training label that is spread over all classes.
        cache: where decoded examples are kept: `memory`, `disk` or `none`; the data is the same.
    """

    name: str
    input_shape: Any
    classes: int
    class_names: tuple[str, ...]
    train_examples: int
    validation_examples: int
    test_examples: int
    epoch_examples: int
    global_batch: int
    steps_per_epoch: int
    skipped: int
    augment: tuple[tuple[str, dict[str, Any]], ...]
    labels: str
    label_smoothing: float
    cache: str = field(compare=False)
    targets: Target | Mapping[str, Target] | None = None


@dataclass(frozen=True)
class Data(position.Epochs):
    """The three splits of a dataset, ready for `model.fit` or `strategy.experimental_distribute_dataset`.

    Attributes:
        train: one iteration is one epoch of `(x, y)` batches, or `(x, y, sample_weight)` if the source has weights.
            Each new iteration starts the next epoch, even if only to look at a batch: use `peek()` for that, or `seek`
            afterward.
        validation, test: fixed order, no augmentation; None if the split is empty.
        info: the facts.

    Example:
        >>> data = load("digits", global_batch=64)
        >>> data.info.input_shape, data.info.classes
        ((8, 8, 1), 10)
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    test: tf.data.Dataset | None
    info: Info
    _counter: position.Counter = field(repr=False)


def load(
    source: Any,
    *,
    global_batch: int,
    augment: str | Iterable[Any] = (),
    seed: int = 0,
    split_seed: int = 0,
    validation: float = 0.0,
    test: float = 0.0,
    shuffle: bool = True,
    image_size: int | tuple[int, int] | None = None,
    length: int | None = None,
    label_smoothing: float = 0.0,
    skip_corrupt: bool = False,
    cache: str = "auto",
    cache_directory: str | Path | None = None,
    memory_bytes: int = 1 << 30,
    parallel_calls: int | None = None,
    prefetch: int | None = None,
    service: str | None = None,
    cluster: Cluster | None = None,
    task: Task = None,
) -> Data:
    """Opens a source and makes its train, validation and test batches.

    Examples are read in parallel with random access, so a whole epoch is shuffled whatever its size. Those that fit in
    `memory_bytes` are decoded once and stay in memory; others are decoded once to a file, or on demand, in the same
    order and with the same result. Streams and tables that do not fit are spooled to a temporary file.

    Args:
        source: `"digits"`, `"tfds:NAME"`, a folder of images by class, `.tfrecord`, `.npz`, `.csv` or `.parquet` files
            (`"iris.csv#species"` names the label's column), `"images:TABLE.csv#COLUMN"`, `"coco:FILE.json"`,
            `"masks:FOLDER"`, `"corpus:PATH"` (plain text for a language model), `"module:function"`, a URL such as
            `"s3://BUCKET/FOLDER/"` or a `Remote`, arrays `(x, y)` or `(x, y, sample_weight)`, a `tf.data.Dataset` of
            `(x, y)` examples, a function that yields them, a Hugging Face dataset, a dict of these four, one per split,
            or a `mixture`.
        global_batch: examples in a batch over all replicas together.
        augment: training stages, such as `"flip"` or `("rotate", {"degrees": 10})` (see
            `tfgpu.data.augmentation.augment`), or `"auto"`: a conservative choice by dataset, recorded in
            `info.augment`; `"none"` or `()` changes nothing.
        seed: determines the order and the augmentation of every epoch.
        split_seed: determines which examples are in which split.
        validation, test: fractions of the examples to set aside, stratified by class; exact copies stay in one split.
            Default: none. A split that the source provides is used as it is, and its fraction is ignored.
        shuffle: False keeps the source's order in training.
        image_size: side, or (height, width), in pixels to resize image files to.
        length: bytes per sequence of a corpus. Default 256.
        label_smoothing: the share of each training label that is spread evenly over all classes, 0 to below 1
            (Szegedy et al., 2015). Labels are then float32 [classes] in all splits; only training labels are smoothed.
        skip_corrupt: skip corrupt files and records (counted in `info.skipped`) instead of stopping.
        cache: where to keep the decoded examples of files: `"memory"`, `"disk"`, `"none"`, or `"auto"`: memory if they
            fit, else the disk if `cache_directory` is given, else none. `info.cache` has the result.
        cache_directory: a folder for decoded examples. Later runs and other processes reuse them until the source's
            files change.
        memory_bytes: the most bytes of decoded examples to keep in memory.
        parallel_calls, prefetch: how many examples are decoded (batches augmented) in parallel, and how many batches
            are prefetched. Default: tf.data tunes them.
        service: the address of a tf.data service, as printed by `tfgpu data serve`. Its workers decode and augment the
            training examples; they need the source's files under the same paths. Batches and their order stay the
            same. For examples that are decoded on demand. Each training process asks for its rows.
        task: `"classification"`: labels are classes; `"regression"`: numbers to predict, float32. Default: classes,
            unless labels are floats that are not all whole, or several numbers per row. For named targets a dict of
            these.
        cluster: this process's role; only the chief logs. Default: all processes log.

    Returns:
        The splits and facts. `train` is finite: one iteration is one epoch.

    Raises:
        InputError: an invalid name, file, shape, label, fraction, batch or setting.
        MachineError: `cache="disk"`, and the disk has no room.

    Example:
        >>> data = load("digits", global_batch=32, augment="auto", seed=1, validation=0.1, test=0.2)
        >>> data.info.train_examples, data.info.steps_per_epoch
        (1258, 40)
    """
    stages = augment if augment == "auto" else augmentations.parse_stages(augment)
    whole_number("global_batch", global_batch)
    for name, value in (("seed", seed), ("split_seed", split_seed)):
        whole_number(name, value, minimum=0, maximum=2**63 - 1)
    if cluster is not None and global_batch < cluster.size:
        raise InputError(
            f"`global_batch` must be at least the number of workers. Received: global_batch={global_batch}, "
            f"workers={cluster.size}. Use {cluster.size} or more."
        )
    splits.check_fractions(validation, test)
    check_task(task)
    caching.check(cache, cache_directory)
    feed = Feed(parallel_calls, prefetch)
    service = None if service is None else remote.address(service)
    quiet = cluster is not None and not cluster.is_chief
    size = check_size(image_size)
    length = None if length is None else whole_number("length", length, minimum=2)
    reading = Reading(size, skip_corrupt, cache, cache_directory, memory_bytes, length=length, task=task)
    examples = _open(source, reading, label_smoothing, service, quiet)
    parts = _parts(examples, validation, test, split_seed, quiet)
    settings = epoch.Settings(int(global_batch), _stages(stages, examples), seed, shuffle, label_smoothing)
    return _data(examples, parts, settings, feed, service)


def _data(examples, parts, settings: epoch.Settings, feed: Feed, service: str | None) -> Data:
    count, order = epoch.order(examples, parts["train"], settings)
    if settings.global_batch > count:
        raise InputError(
            f"`global_batch` is larger than the training split. Received: global_batch={settings.global_batch}, "
            f"{count} training examples in {examples.name}. Use {count} or less."
        )
    counter = position.Counter()
    change = epoch.Change(settings, len(examples.class_names), epoch.gatherer(examples))
    spec = epoch.EpochSpec(examples, order, count, settings.global_batch, change)
    if service is None:
        train = batches(spec, counter.positions(), feed, next_epoch=lambda: counter.next)
    else:
        train = remote.batches(spec, counter, feed, service)
    validation, test = (_fixed(examples, parts[name], settings, feed) for name in ("validation", "test"))
    return Data(train, validation, test, _info(examples, parts, count, settings), counter)


def _fixed(examples: Examples, indices, settings: epoch.Settings, feed: Feed) -> tf.data.Dataset | None:
    """Batches a validation or test split in a fixed order; None if it is empty."""
    if not len(indices):
        return None
    indices = position.on_cpu(indices)
    change = epoch.Change(settings, len(examples.class_names), epoch.gatherer(examples), trains=False)
    spec = epoch.EpochSpec(examples, lambda _: indices, len(indices), settings.global_batch, change)
    return batches(spec, tf.data.Dataset.from_tensors(np.int64(0)), feed)


def _open(source: Any, reading: Reading, smoothing: float, service: str | None, quiet: bool) -> Examples:
    """Opens the source and checks that the settings suit its examples."""
    examples = source if isinstance(source, Examples) else sources.open_source(source, reading)
    if not is_number(smoothing) or not 0 <= smoothing < 1:
        raise InputError(f"`label_smoothing` must be at least 0 and below 1. Received: {smoothing!r}. Try 0.1.")
    if smoothing and (examples.labels.ndim != 1 or not examples.has_classes):
        raise InputError(
            f"`label_smoothing` needs one class per example. Received: {smoothing} for labels of shape "
            f"{examples.labels.shape} in {examples.name}. Remove it."
        )
    if reading.task == "regression" and examples.has_classes:
        raise InputError(f"task='regression' needs numbers as labels. Received: {examples.name}, which has classes.")
    is_kept = examples.array is not None and examples.copies is None  # decoded files have `copies`
    if reading.cache not in ("auto", examples.cache) or (reading.cache_directory is not None and is_kept):
        raise InputError(
            f"{examples.name} needs no cache: its examples are already in {examples.cache}. Received: "
            f"cache={reading.cache!r}, cache_directory={reading.cache_directory!r}. Remove these settings."
        )
    if service is not None and examples.load is None:
        raise InputError(
            f"{examples.name} has its decoded examples in {examples.cache}, so a service has nothing to decode. "
            "Remove `service`, or use cache='none'."
        )
    if not quiet:
        examples.tell_skipped(_log)
    return examples


def _stages(stages, examples: Examples) -> tuple[tuple[str, dict[str, Any]], ...]:
    given, is_named = examples.structure, isinstance(examples.shape, dict)
    if stages == "auto":
        automatic = () if is_named else augmentation.automatic(examples.name, examples.shape)
        stages = augmentations.parse_stages(automatic)
    if stages and is_named:
        raise InputError(
            f"`augment` needs one image per example. Received: {examples.name} with named inputs. Remove it."
        )
    if augmentations.mixes(stages) and given is not None:
        raise InputError(
            f"MixUp and CutMix need one class per example and no sample weights, unlike {examples.name}. Remove them "
            "from `augment`."
        )
    augmentation.check(stages, name=examples.name, shape=examples.shape, labels_rank=examples.labels.ndim)
    if stages and given is not None:
        moving.check(given.targets, examples.shape, examples.name)
    return stages


def _parts(examples: Examples, validation: float, test: float, seed: int, quiet: bool) -> dict[str, np.ndarray]:
    """Uses the source's own splits, and takes the missing ones from its training split."""
    own = {name: np.asarray(indices, np.int64) for name, indices in examples.own.items() if len(indices)}
    pool = own["train"]
    labels = examples.labels[pool] if examples.labels.ndim == 1 else np.zeros(len(pool), np.int64)
    # Copies share a number; None if not all examples have been decoded.
    is_known = examples.copies is not None or examples.array is None
    originals = examples.copies if is_known else splits.copies(examples.array)
    groups = None if originals is None else splits.first_of(originals[pool])
    shares = {"validation": validation, "test": test}
    shares = {name: 0.0 if name in own else share for name, share in shares.items()}
    cut = splits.split(labels, **shares, seed=seed, groups=groups)
    parts = {name: own[name] if name != "train" and name in own else pool[cut[name]] for name in splits.PARTS}
    given = sorted(set(own) - {"train"})
    if given and not quiet:
        for name in given if originals is not None else ():
            shared = int(np.isin(originals[parts[name]], originals[parts["train"]]).sum())
            if shared:
                _log.warning("%s: %d examples of its own %s split are also in training.", examples.name, shared, name)
        _log.info("%s has its own %s split; its fraction is not used.", examples.name, " and ".join(given))
    return parts


def _info(examples: Examples, parts, count: int, settings: epoch.Settings) -> Info:
    labels = "one_hot" if settings.soft else "class" if examples.labels.ndim == 1 else "tokens"
    if not examples.has_classes:
        labels = "named" if isinstance(examples.structure.targets, dict) else "numbers"
    return Info(
        name=examples.name,
        input_shape=examples.shape if isinstance(examples.shape, dict) else tuple(examples.shape),
        classes=len(examples.class_names),
        class_names=examples.class_names,
        train_examples=len(parts["train"]),
        validation_examples=len(parts["validation"]),
        test_examples=len(parts["test"]),
        epoch_examples=count,
        global_batch=settings.global_batch,
        steps_per_epoch=-(-count // settings.global_batch),
        skipped=len(examples.skipped),
        augment=settings.stages,
        labels=labels,
        label_smoothing=settings.smoothing,
        cache=examples.cache,
        targets=targets_of(examples.structure, examples.shape),
    )
