"""From a source to batches: split, balance, order, and what happens to each batch."""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.data import balance as balancing
from tfgpu.data import cache as caching
from tfgpu.data import position, shards, sources, splits
from tfgpu.data import service as remote
from tfgpu.data.augmentation import augment as augmentation
from tfgpu.data.augmentation import stages as augmentations
from tfgpu.data.decoding import Reading, check_length, check_size
from tfgpu.data.examples import Examples
from tfgpu.data.feed import Feed, batches
from tfgpu.errors import InputError, unknown

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Info:
    """What a run should know and record about its data.

    Attributes:
        name: the source's name.
        input_shape: one example's shape, such as (8, 8, 1).
        classes, class_names: how many classes, and one name each.
        train_examples, validation_examples, test_examples: how many in each part.
        epoch_examples: how many an epoch of training reads; other than `train_examples` where classes are
            balanced by drawing.
        global_batch: examples in a batch over all replicas together.
        steps_per_epoch: batches in an epoch; the last one may be smaller.
        skipped: how many corrupt examples were left out.
        augment: the training stages with all their options; `"auto"` resolved.
        labels: `"class"`, the class's number; `"one_hot"`, float32 [classes] (as mixed examples and smoothed labels
            need, in all parts alike), for which the loss is `CategoricalCrossentropy`; or `"tokens"`, a class at each
            place of a sequence.
        label_smoothing: the share of a training label that is spread over all classes.
        balance: how the classes were balanced, or None.
        cache: where decoded examples are kept: `memory`, `disk` or `none`; the data is the same.
    """

    name: str
    input_shape: tuple[int | None, ...]
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
    balance: str | None
    label_smoothing: float
    cache: str = field(compare=False)


@dataclass(frozen=True)
class Data(position.Epochs):
    """The three parts of a data set, ready for `model.fit` or for `strategy.experimental_distribute_dataset`.

    Attributes:
        train: one iteration is one epoch of `(x, y)` batches, or `(x, y, sample_weight)` where classes are
            balanced by weights. Each start of an iteration takes the next
            epoch, so only looking at it uses an epoch up: use `peek()`, or `seek` afterwards.
        validation, test: fixed order, no augmentation; None where the part is empty.
        info: the facts.

    Example:
        >>> data = pipeline("digits", global_batch=64)
        >>> data.info.input_shape, data.info.classes
        ((8, 8, 1), 10)
    """

    train: tf.data.Dataset
    validation: tf.data.Dataset | None
    test: tf.data.Dataset | None
    info: Info
    _counter: position.Counter = field(repr=False)


def pipeline(
    source: Any,
    *,
    global_batch: int,
    augment: str | Iterable[Any] = (),
    seed: int = 0,
    split_seed: int = 0,
    validation: float = 0.1,
    test: float = 0.2,
    shuffle: bool = True,
    image_size: int | tuple[int, int] | None = None,
    length: int | None = None,
    label_smoothing: float = 0.0,
    skip_corrupt: bool = False,
    balance: str | None = None,
    cache: str = "auto",
    cache_directory: str | Path | None = None,
    memory_bytes: int = 1 << 30,
    deterministic: bool = True,
    parallel_calls: int | None = None,
    threads: int | None = None,
    prefetch: int | None = None,
    prefetch_to_device: str | None = None,
    sharding: str = "data",
    service: str | None = None,
    cluster: Cluster | None = None,
) -> Data:
    """Opens a source and makes its train, validation and test batches.

    Examples are read by their place, many at once, so the whole epoch is shuffled whatever its size. Those that
    fit in `memory_bytes` are decoded once and stay in memory; others are decoded once to a file, or each time
    that they are needed, in the same order and with the same result. Streams and tables that do not fit are read
    through once, into a temporary file.

    Args:
        source: `"digits"`, `"tfds:NAME"`, a folder of images by class, `.tfrecord` files, `.csv` or `.parquet` files
            (`"iris.csv#species"` names the label's column), `"text:PATH"` or `"corpus:PATH"` (see
            `tfgpu.data.text.texts`), `"module:function"`, arrays `(x, y)`, a
            `tf.data.Dataset` of `(x, y)` examples, a function that yields them, a Hugging Face data set, or a dict
            of such parts.
        global_batch: examples in a batch over all replicas together; a strategy gives each replica its part.
        augment: training stages, `"flip"` or `("rotate", {"degrees": 10})` (see `tfgpu.data.augmentation.augment`), or
            `"auto"`: a careful choice by data set, recorded in `info.augment`; `"none"` or `()` changes nothing.
        seed: decides the order and the augmentation of every epoch.
        split_seed: decides which examples are in which part.
        validation, test: fractions (default 0.1 and 0.2) of the examples to set aside, by class; copies of an
            example stay on one side. A part that the source has itself is used as it is, and its fraction is
            not needed. 0 means none.
        shuffle: False keeps the source's order in training.
        image_size: side, or (height, width), in pixels to resize images of files to.
        length: bytes of a text, which is cut or padded to it, or of a piece of a corpus. Default 256; only for those.
        label_smoothing: the share of each training label that is spread evenly over all classes, 0 to below 1
            (Szegedy and others, 2015). Labels are then float32 [classes] in all parts; only training's are smoothed.
        skip_corrupt: leave corrupt files and records out (counted in `info.skipped`) rather than stop.
        balance: what to do about classes that are not equally frequent in training: `"oversample"`,
            `"undersample"` or `"weights"` (see `tfgpu.data.balance`).
        cache: where to keep the decoded examples of files: `"memory"`, `"disk"`, `"none"`, or `"auto"`: memory
            if they fit, else the disk if there is a `cache_directory`, else none. `info.cache` says which.
        cache_directory: a folder for decoded examples. A later run, or another process, uses what it finds there
            while the source's files are unchanged.
        memory_bytes: the most bytes of decoded examples to keep in memory.
        deterministic: False lets examples that are ready overtake those that are not: quicker where some take
            much longer, but no run repeats another. For one process, without `enable_op_determinism`.
        parallel_calls, threads, prefetch: how many examples are decoded (batches augmented) at once, in how many
            threads of their own, and how many batches are made ahead. Left out, tf.data finds the numbers.
        prefetch_to_device: copies batches ahead to a device, `"GPU:0"`, or `"auto"`: the first GPU if there
            is one. Only for training without a strategy, which does so by itself.
        sharding: who reads which training examples where there are several workers. `"data"`: each makes the global
            batches and keeps its part, so that the result does not depend on the workers. `"file"`: each reads files
            of its own (see `tfgpu.data.shards`); then the batches depend on the number of workers, are evened out to
            at most `global_batch`, and the data set does not say its length. `"auto"`: by file where the data is read
            from the disk and its files come out even.
        service: the address of a tf.data service, as `tfgpu data serve` prints it: its workers decode and augment the
            training examples, and must find the source's files under the same paths. The batches and their order are
            the same. For examples that are decoded as they are needed. Each training process fetches whole batches.
        cluster: this process's place; only the chief logs. Default: all processes log, and `sharding` looks into the
            environment.

    Returns:
        The parts and facts. `train` is finite: one iteration is one epoch.

    Raises:
        InputError: a name, file, shape, label, fraction, batch or setting that cannot work; one line with the
            fix.
        MachineError: `cache="disk"`, and the disk has no room.

    Example:
        >>> data = pipeline("digits", global_batch=32, augment="auto", seed=1)
        >>> data.info.train_examples, data.info.steps_per_epoch
        (1258, 40)
    """
    stages = augment if augment == "auto" else augmentations.parse_stages(augment)
    _check_numbers(global_batch, seed, split_seed, cluster)
    splits.check_fraction("validation", validation)
    splits.check_fraction("test", test)
    if sharding not in shards.CHOICES:
        raise unknown("sharding", sharding, shards.CHOICES)
    balancing.check(balance, shuffle=shuffle)
    caching.check(cache, cache_directory)
    feed = Feed(deterministic, parallel_calls, threads, prefetch, prefetch_to_device)
    _check_alone(feed, cluster)
    service = None if service is None else remote.address(service)
    quiet = cluster is not None and not cluster.is_chief
    reading = Reading(
        check_size(image_size), skip_corrupt, cache, cache_directory, memory_bytes, length=check_length(length)
    )
    examples = source if isinstance(source, Examples) else sources.open_source(source, reading)
    _check_smoothing(label_smoothing, examples)
    as_they_are = examples.array is not None and examples.copies is None  # Files that were decoded know their copies.
    if cache not in ("auto", examples.cache) or (cache_directory is not None and as_they_are):
        raise InputError(
            f"{examples.name}: its examples are kept in {examples.cache} as they are; a cache is for those of files. "
            f"Received: cache={cache!r}, cache_directory={cache_directory!r}. Leave them out."
        )
    if service is not None:
        remote.check(examples)
    if examples.skipped and not quiet:
        _log.warning("%s: left out %d corrupt: %s", examples.name, len(examples.skipped), ", ".join(examples.skipped))
    parts = _parts(examples, validation, test, split_seed, quiet)
    if stages == "auto":
        stages = augmentations.parse_stages(augmentation.automatic(examples.name, examples.shape))
    augmentation.check(stages, name=examples.name, shape=examples.shape, labels_rank=examples.labels.ndim)
    share = _share(examples, parts["train"], sharding, global_batch, cluster, quiet)
    count, order = _order(examples, share, balance, seed, shuffle)
    most = count if share.by == "data" else len(parts["train"])
    if global_batch > most:
        raise InputError(
            f"`global_batch` is larger than the training part. Received: global_batch={global_batch}, "
            f"{most} training examples in {examples.name}. Use {most} or less."
        )
    soft = augmentations.mixes(stages) or label_smoothing > 0
    change = _change(examples, parts["train"], stages, soft, label_smoothing, balance, seed, share.first)
    counter = position.Counter()
    if service is None:
        train = batches(examples, counter.epochs(), order, count, share.batch, change, feed)
    else:
        train = remote.batches(examples, counter, order, count, share.batch, change, feed, service)
    return Data(
        train=shards.own(train, share),
        validation=_fixed(examples, parts["validation"], global_batch, soft, feed),
        test=_fixed(examples, parts["test"], global_batch, soft, feed),
        info=_info(examples, parts, share, count, global_batch, stages, soft, label_smoothing, balance),
        _counter=counter,
    )


def _check_numbers(global_batch, seed, split_seed, cluster) -> None:
    if isinstance(global_batch, bool) or not isinstance(global_batch, (int, np.integer)) or global_batch < 1:
        raise InputError(f"`global_batch` must be a whole number from 1. Received: {global_batch!r}. Try 64.")
    for name, value in (("seed", seed), ("split_seed", split_seed)):
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 0 <= value < 2**63:
            raise InputError(f"`{name}` must be a whole number from 0 to 2**63 - 1. Received: {value!r}. Try 0.")
    if cluster is not None and global_batch < cluster.size:
        raise InputError(
            f"`global_batch` must be at least the number of workers. Received: global_batch={global_batch}, "
            f"workers={cluster.size}. Use {cluster.size} or more."
        )


def _check_smoothing(share: float, examples: Examples) -> None:
    if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
        raise InputError(f"`label_smoothing` must be a number from 0 to below 1. Received: {share!r}. Try 0.1.")
    if share and examples.labels.ndim != 1:
        raise InputError(
            f"`label_smoothing` needs one class an example. Received: {share} for labels of shape "
            f"{examples.labels.shape} in {examples.name}. Leave it out."
        )


def _check_alone(feed: Feed, cluster: Cluster | None) -> None:
    workers = (cluster or Cluster.from_environment()).size
    if workers > 1 and not feed.deterministic:
        raise InputError(
            f"Workers keep their parts of the same batches, so these must come in one order. Received: "
            f"deterministic=False with {workers} workers. Leave it out."
        )


def _share(examples, indices, sharding: str, global_batch: int, cluster: Cluster | None, quiet: bool) -> shards.Share:
    cluster = Cluster.from_environment() if cluster is None and sharding != "data" else cluster or Cluster()
    share = shards.share(examples, indices, sharding=sharding, global_batch=global_batch, cluster=cluster)
    if share.reason and not quiet:
        _log.info("%s: training examples are shared out by %s: %s.", examples.name, share.by, share.reason)
    return share


def _parts(examples: Examples, validation: float, test: float, seed: int, quiet: bool) -> dict[str, np.ndarray]:
    """Uses the source's own parts, and cuts those that it lacks out of its training part."""
    own = {name: np.asarray(indices, np.int64) for name, indices in examples.own.items() if len(indices)}
    pool = own["train"]
    labels = examples.labels[pool] if examples.labels.ndim == 1 else np.zeros(len(pool), np.int64)
    originals = _originals(examples)
    groups = None if originals is None else splits.first_of(originals[pool])
    cut = splits.split(
        labels,
        validation=0.0 if "validation" in own else validation,
        test=0.0 if "test" in own else test,
        seed=seed,
        groups=groups,
    )
    parts = {name: own[name] if name != "train" and name in own else pool[cut[name]] for name in splits.PARTS}
    given = sorted(set(own) - {"train"})
    if given and not quiet:
        _warn_of_copies(examples, originals, parts, given)
        _log.info("%s brings its own %s part; its fraction is not used.", examples.name, " and ".join(given))
    return parts


def _originals(examples: Examples) -> np.ndarray | None:
    """Numbers the examples so that copies share a number; None where not all have been decoded."""
    if examples.copies is not None or examples.array is None:
        return examples.copies
    return splits.copies(examples.array)


def _warn_of_copies(examples: Examples, originals, parts: dict[str, np.ndarray], given: list[str]) -> None:
    if originals is None:
        return
    for name in given:
        shared = int(np.isin(originals[parts[name]], originals[parts["train"]]).sum())
        if shared:
            _log.warning("%s: %d examples of its own %s part also train.", examples.name, shared, name)


def _order(examples: Examples, share: shards.Share, balance, seed: int, shuffle: bool) -> tuple[int, Callable]:
    """Says how many examples this data set's epoch has, and makes the function from its number to their order."""
    indices = share.indices
    if balance is not None and examples.labels.ndim != 1:
        raise InputError(
            f"`balance` needs one class an example. Received: labels of shape {examples.labels.shape} in "
            f"{examples.name}. Leave it out."
        )
    if balance in ("oversample", "undersample"):
        if share.by == "file":
            raise InputError(
                f"balance={balance!r} would give workers that read files of their own different numbers of steps. "
                "Use sharding='data', or balance='weights'."
            )
        return balancing.resample(indices, examples.labels[indices], choice=balance, seed=seed)
    with tf.device("CPU:0"):
        indices = tf.constant(indices)
    return len(indices), lambda epoch: position.order(indices, seed=seed, epoch=epoch) if shuffle else indices


def _change(
    examples: Examples, indices, stages, soft: bool, smoothing: float, balance, seed: int, first: int
) -> Callable:
    """Makes the function that augments and weighs a batch of training examples, and smooths its labels."""
    classes = len(examples.class_names)
    weights = balancing.weights(examples.labels[indices], classes) if balance == "weights" else None

    def change(epoch, places, x, y):
        y = tf.one_hot(y, classes) if soft else y
        if stages:
            numbers = position.Numbers(seed=seed, epoch=epoch, start=first + places, count=tf.shape(x)[0])
            x, y = augmentation.apply(x, y, stages, numbers)
        smooth = y * (1.0 - smoothing) + smoothing / classes if smoothing else y
        if weights is None:
            return x, smooth
        return x, smooth, tf.linalg.matvec(y, weights) if soft else tf.gather(weights, y)

    return change


def _fixed(examples: Examples, indices, global_batch: int, soft: bool, feed: Feed) -> tf.data.Dataset | None:
    if not len(indices):
        return None
    classes = len(examples.class_names)
    with tf.device("CPU:0"):
        indices = tf.constant(indices)

    def change(epoch, places, x, y):
        return x, tf.one_hot(y, classes) if soft else y

    epochs = tf.data.Dataset.from_tensors(np.int64(0))
    return batches(examples, epochs, lambda epoch: indices, len(indices), global_batch, change, feed)


def _info(
    examples: Examples, parts, share, count: int, global_batch: int, stages, soft: bool, smoothing: float, balance
) -> Info:
    return Info(
        name=examples.name,
        input_shape=tuple(examples.shape),
        classes=len(examples.class_names),
        class_names=examples.class_names,
        train_examples=len(parts["train"]),
        validation_examples=len(parts["validation"]),
        test_examples=len(parts["test"]),
        epoch_examples=count if share.by == "data" else len(parts["train"]),
        global_batch=int(global_batch),
        steps_per_epoch=-(-count // global_batch) if share.by == "data" else share.steps,
        skipped=len(examples.skipped),
        augment=stages,
        labels="one_hot" if soft else "class" if examples.labels.ndim == 1 else "tokens",
        balance=balance,
        label_smoothing=smoothing,
        cache=examples.cache,
    )
