"""From a source to batches: split, order, fetch, batch, augment, prefetch."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.data import augment as augmentation
from tfgpu.data import names, position, shards, sources, splits
from tfgpu.data.decoding import Reading, check_size
from tfgpu.data.examples import Examples, to_model
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
        global_batch: examples in a batch over all replicas together.
        steps_per_epoch: batches in an epoch; the last one may be smaller.
        skipped: how many corrupt examples were left out.
        augment: the training stages with all their options; `"auto"` resolved.
    """

    name: str
    input_shape: tuple[int | None, ...]
    classes: int
    class_names: tuple[str, ...]
    train_examples: int
    validation_examples: int
    test_examples: int
    global_batch: int
    steps_per_epoch: int
    skipped: int
    augment: tuple[tuple[str, dict], ...]


@dataclass(frozen=True)
class Data:
    """The three parts of a data set, ready for `model.fit` or for `strategy.experimental_distribute_dataset`.

    Attributes:
        train: one iteration is one epoch of `(x, y)` batches. Each start of an iteration takes the next
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
    _epoch: tf.Variable = field(repr=False)

    def seek(self, epoch: int) -> None:
        """Makes the next iteration of `train` epoch number `epoch` (from 0), as a resumed run needs.

        The order and the augmentation of an epoch depend on its number and the seed alone. A training loop
        that seeks at the start of each epoch is exact even when something looked into `train` before.

        Raises:
            InputError: `epoch` is not a whole number from 0.
        """
        if isinstance(epoch, bool) or not isinstance(epoch, (int, np.integer)) or epoch < 0:
            raise InputError(f"`epoch` must be a whole number from 0. Received: {epoch!r}.")
        self._epoch.assign(int(epoch))

    def peek(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the first batch of the next epoch, and leaves the epoch where it is."""
        epoch = int(self._epoch.numpy())
        batch = next(iter(self.train))
        self.seek(epoch)
        return batch


def pipeline(
    source,
    *,
    global_batch: int,
    augment: str | Iterable = (),
    seed: int = 0,
    split_seed: int = 0,
    validation: float = 0.1,
    test: float = 0.2,
    shuffle: bool = True,
    image_size: int | tuple[int, int] | None = None,
    skip_corrupt: bool = False,
    memory_bytes: int = 1 << 30,
    sharding: str = "data",
    cluster: Cluster | None = None,
) -> Data:
    """Opens a source and makes its train, validation and test batches.

    Examples that fit in `memory_bytes` are decoded once and stay in memory; others are read and decoded as
    they are needed, in the same order and with the same result. Streams and tables that do not fit are read through
    once, into a temporary file.

    Args:
        source: `"digits"`, `"tfds:NAME"`, a folder of images by class, `.tfrecord` files, `.csv` or `.parquet` files
            (`"iris.csv#species"` names the label's column), `"module:function"`, arrays `(x, y)`, a
            `tf.data.Dataset` of `(x, y)` examples, a function that yields them, a Hugging Face data set, or a dict
            of such parts.
        global_batch: examples in a batch over all replicas together; a strategy gives each replica its part.
        augment: training stages, `"flip"` or `("rotate", {"degrees": 10})` (see `tfgpu.data.augment`), or
            `"auto"`: a careful choice by data set, recorded in `info.augment`.
        seed: decides the order and the augmentation of every epoch.
        split_seed: decides which examples are in which part.
        validation, test: fractions (default 0.1 and 0.2) of the examples to set aside, by class; copies of an
            example stay on one side. A part that the source has itself is used as it is, and its fraction is
            not needed. 0 means none.
        shuffle: False keeps the source's order in training.
        image_size: side, or (height, width), in pixels to resize images of files to.
        skip_corrupt: leave corrupt files and records out (counted in `info.skipped`) rather than stop.
        memory_bytes: the most bytes of decoded examples to keep in memory.
        sharding: who reads which training examples where there are several workers. `"data"`: each makes the global
            batches and keeps its part, so that the result does not depend on the workers. `"file"`: each reads files
            of its own (see `tfgpu.data.shards`); then the batches depend on the number of workers, are evened out to
            at most `global_batch`, and the data set does not say its length. `"auto"`: by file where the data is read
            from the disk and its files come out even.
        cluster: this process's place; only the chief logs. Default: all processes log, and `sharding` looks into the
            environment.

    Returns:
        The parts and facts. `train` is finite: one iteration is one epoch.

    Raises:
        InputError: a name, file, shape, label, fraction or batch that cannot work; one line with the fix.

    Example:
        >>> data = pipeline("digits", global_batch=32, augment="auto", seed=1)
        >>> data.info.train_examples, data.info.steps_per_epoch
        (1258, 40)
    """
    stages = augment if augment == "auto" else names.parse_stages(augment)
    _check_numbers(global_batch, seed, split_seed, cluster)
    splits.check_fraction("validation", validation)
    splits.check_fraction("test", test)
    if sharding not in shards.CHOICES:
        raise unknown("sharding", sharding, shards.CHOICES)
    quiet = cluster is not None and not cluster.is_chief
    reading = Reading(image_size=check_size(image_size), skip_corrupt=skip_corrupt, memory_bytes=memory_bytes)
    examples = sources.open_source(source, reading)
    if examples.skipped and not quiet:
        _log.warning("%s: left out %d corrupt: %s", examples.name, len(examples.skipped), ", ".join(examples.skipped))
    parts = _parts(examples, validation, test, split_seed, quiet)
    if global_batch > len(parts["train"]):
        raise InputError(
            f"`global_batch` is larger than the training part. Received: global_batch={global_batch}, "
            f"{len(parts['train'])} training examples in {examples.name}. Use {len(parts['train'])} or less."
        )
    if stages == "auto":
        stages = names.parse_stages(augmentation.automatic(examples.name, examples.shape))
    _check_augmentable(examples, stages)
    epoch = position.counter()
    share = _share(examples, parts["train"], sharding, global_batch, cluster, quiet)
    return Data(
        train=_train(examples, share, epoch, seed, shuffle, stages),
        validation=_fixed(examples, parts["validation"], global_batch),
        test=_fixed(examples, parts["test"], global_batch),
        info=_info(examples, parts, global_batch, share.steps, stages),
        _epoch=epoch,
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
    copies = _copies(examples)
    groups = None if copies is None else splits.first_of(copies[pool])
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
        _warn_of_copies(examples, parts, given)
        _log.info("%s brings its own %s part; its fraction is not used.", examples.name, " and ".join(given))
    return parts


def _copies(examples: Examples) -> np.ndarray | None:
    return examples.copies if examples.array is None else splits.copies(examples.array)


def _warn_of_copies(examples: Examples, parts: dict[str, np.ndarray], given: list[str]) -> None:
    original = _copies(examples)
    if original is None:
        return
    for name in given:
        shared = int(np.isin(original[parts[name]], original[parts["train"]]).sum())
        if shared:
            _log.warning("%s: %d examples of its own %s part also train.", examples.name, shared, name)


def _check_augmentable(examples: Examples, stages) -> None:
    if stages and (len(examples.shape) != 3 or None in examples.shape):
        raise InputError(
            f"Augmentation needs images of one size. Received: examples of shape {examples.shape} in "
            f"{examples.name}. Leave `augment` empty."
        )


def _batches(examples: Examples, keys: tf.data.Dataset, count: int, global_batch: int, change) -> tf.data.Dataset:
    """Turns one `(epoch, indices of the whole epoch)` element into that epoch's batches.

    Examples in memory are fetched by rows of indices: cutting a batch out of single examples, or a dataset
    nested in `flat_map`, costs two to three times as much an epoch (measured; it shows beside a step of 100
    us).
    """
    with tf.device("CPU:0"):
        labels = tf.constant(examples.labels)
        array = None if examples.array is None else tf.constant(examples.array)
        array = examples.stored() if examples.stored else array
    steps = -(-count // global_batch)

    def rows(epoch, indices):
        padded = tf.pad(indices, [[0, steps * global_batch - count]])
        starts = tf.range(0, count, global_batch, dtype=tf.int64)
        return tf.repeat(epoch, steps), starts, tf.reshape(padded, [steps, global_batch])

    def gather(epoch, start, row):
        index = row[: count - start]  # the last row may be padded
        x = tf.ensure_shape(to_model(tf.gather(array, index)), [None, *array.shape[1:]])
        return change(epoch, start, x, tf.gather(labels, index))

    def singles(epoch, indices):
        return tf.repeat(epoch, count), tf.range(count, dtype=tf.int64), indices

    def load(epoch, place, index):
        return epoch, place, examples.load(index), tf.gather(labels, index)

    if array is not None:
        return keys.map(rows).unbatch().map(gather, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    loaded = keys.map(singles).unbatch().map(load, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
    return loaded.batch(global_batch).map(lambda e, p, x, y: change(e[0], p[0], to_model(x), y))


def _train(examples, share: shards.Share, epoch, seed, shuffle, stages) -> tf.data.Dataset:
    with tf.device("CPU:0"):
        indices = tf.constant(share.indices)

    def begin(_):
        number = epoch.assign_add(1) - 1
        return number, position.order(indices, seed=seed, epoch=number) if shuffle else indices

    def change(number, start, x, y):
        if not stages:
            return x, y
        numbers = position.Numbers(seed=seed, epoch=number, start=share.first + start, count=tf.shape(x)[0])
        return augmentation.apply(x, stages, numbers), y

    # One element, made when an iteration starts: the number of its epoch, and that epoch's order.
    keys = tf.data.Dataset.range(1).map(begin)
    batches = _batches(examples, keys, len(indices), share.batch, change)
    return shards.own(_finish(batches, len(indices), share.batch), share)


def _fixed(examples, indices, global_batch) -> tf.data.Dataset | None:
    if not len(indices):
        return None
    keys = tf.data.Dataset.from_tensors((np.int64(0), indices))
    batches = _batches(examples, keys, len(indices), global_batch, lambda e, start, x, y: (x, y))
    return _finish(batches, len(indices), global_batch)


def _finish(batches: tf.data.Dataset, count: int, global_batch: int) -> tf.data.Dataset:
    options = tf.data.Options()
    options.deterministic = True
    # Starting an iteration costs a quarter less without the graph rewrites, and a step no more (measured).
    options.experimental_optimization.apply_default_optimizations = False
    # Each worker makes the same global batches and keeps its part: files would be cut unevenly.
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    sized = batches.apply(tf.data.experimental.assert_cardinality(-(-count // global_batch)))
    return sized.prefetch(tf.data.AUTOTUNE).with_options(options)


def _info(examples: Examples, parts, global_batch: int, steps: int, stages) -> Info:
    return Info(
        name=examples.name,
        input_shape=tuple(examples.shape),
        classes=len(examples.class_names),
        class_names=examples.class_names,
        train_examples=len(parts["train"]),
        validation_examples=len(parts["validation"]),
        test_examples=len(parts["test"]),
        global_batch=int(global_batch),
        steps_per_epoch=steps,
        skipped=len(examples.skipped),
        augment=stages,
    )
