"""From a recipe to the parts of a run: strategy, data, model and callbacks, checked before any file is written."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfgpu import environment, precision, rendezvous, strategies
from tfgpu.cluster import Cluster
from tfgpu.data import Data, load
from tfgpu.errors import InputError
from tfgpu.recipes import compiling, heads, recipe
from tfgpu.recipes.recipe import Recipe
from tfgpu.rendezvous.facts import of_settings


@dataclass(frozen=True)
class Job:
    """All parts of a run, built and checked."""

    recipe: Recipe
    cluster: Cluster
    strategy: tf.distribute.Strategy
    data: Data
    model: keras.Model
    heads: tuple[heads.Head, ...]
    callbacks: tuple[keras.callbacks.Callback, ...]
    finetuned: Any = None  # what a run with a pretrained model also needs (`finetune.Finetuned`)


@contextlib.contextmanager
def prepare(what: Recipe) -> Iterator[None]:
    """Configures devices and seeds; inside the block, precision and attention are as the recipe says."""
    if what.virtual_devices and what.virtual_devices != len(environment.devices("CPU")):
        environment.set_logical_devices(what.virtual_devices)
    environment.set_seed(what.seed, deterministic=what.deterministic)
    with precision.use(what.precision), contextlib.ExitStack() as held:
        if what.flash_attention:
            keras.config.enable_flash_attention()
            held.callback(keras.config.disable_flash_attention)
        yield


def build(what: Recipe, cluster: Cluster, *, source=None) -> Job:
    """Creates the strategy, opens the data, and builds and compiles the model, in this order.

    Args:
        what: the recipe.
        cluster: the facts of the cluster.
        source: replaces the recipe's source.

    Raises:
        InputError: something in the recipe is invalid.
    """
    # The strategy comes first: workers must connect before anything else initializes TensorFlow's devices.
    if what.strategy in ("auto", "multi_worker"):
        join(what, cluster)
    strategy = strategy_of(what, cluster)
    check_batch(what, strategy.num_replicas_in_sync)
    data = open_data(what, cluster, source=source)
    _check_parts(data, what)
    ends = heads.heads_of(data.info, classes=what.classes)
    _check_weights(data, ends)
    compiling.check_monitors(what, heads=ends, has_validation=data.validation is not None)
    schedule = compiling.schedule(what, steps_per_epoch=data.info.steps_per_epoch)
    with strategy.scope():
        model = heads.build(what.model, data.info, ends, what.builder_options)
        compiling.compile_model(model, what, learning_rate=schedule.learning_rate, heads=ends)
    callbacks = (*schedule.callbacks, *compiling.callbacks(what))
    return Job(what, cluster, strategy, data, model, ends, callbacks)


def join(what: Recipe, cluster: Cluster) -> None:
    """Waits for the other workers, if there are any, and compares their recipes."""
    if cluster.is_multi_worker:
        rendezvous.join(cluster, facts={**of_settings(what.model_dump()), "script": "tfgpu train"})


def check_batch(what: Recipe, replicas: int) -> None:
    """Raises `InputError` if a batch has fewer rows than there are replicas."""
    if what.global_batch < replicas:
        raise InputError(
            f"`global_batch` must be at least the number of replicas. Received: global_batch={what.global_batch}, "
            f"replicas={replicas}. Use {replicas} or more, or fewer devices."
        )


def strategy_of(what: Recipe, cluster: Cluster) -> tf.distribute.Strategy:
    """Creates a recipe's strategy.

    Raises:
        InputError: there are no such devices.
    """
    chosen = what.devices
    if what.virtual_devices and chosen is None and what.strategy != "one_device":
        chosen = tuple(f"CPU:{number}" for number in range(what.virtual_devices))
    return strategies.strategy(what.strategy, chosen, cluster=cluster)


def open_data(what: Recipe, cluster: Cluster, *, source=None) -> Data:
    """Opens the recipe's data, or another source with the recipe's settings.

    Raises:
        InputError: something about it is invalid.
    """
    return load(
        what.data if source is None else source,
        global_batch=what.global_batch,
        augment="auto" if what.augment == ("auto",) else what.augment,
        seed=what.seed,
        split_seed=what.split_seed,
        validation=what.validation,
        test=what.test,
        image_size=what.image_size,
        length=what.length,
        label_smoothing=what.label_smoothing,
        skip_corrupt=what.skip_corrupt,
        **{name: getattr(what, name) for name in recipe.INPUT},
        task=what.task,
        cluster=cluster,
    )


def _check_parts(data: Data, what: Recipe) -> None:
    for name, part in (("validation", data.validation), ("test", data.test)):
        if part is None and getattr(what, name):
            raise InputError(
                f"{what.data} has too few examples for {name}. Received: {name}={getattr(what, name)}. Increase it."
            )
    if what.classes is not None and data.info.targets is not None and not _has_masks_in_files(data.info.targets):
        raise InputError(f"`classes` needs one class per example. Received: classes={what.classes} for {what.data}.")
    if what.classes not in (None, data.info.classes) and data.info.targets is None:
        raise InputError(
            f"`classes` must be the number of classes in {what.data}. Received: classes={what.classes}, found "
            f"{data.info.classes}. Use --classes {data.info.classes}, or remove it."
        )


def _has_masks_in_files(targets: Any) -> bool:
    found = targets.values() if isinstance(targets, Mapping) else [targets]
    return any(target.kind == "places" and not target.classes for target in found)


def _check_weights(data: Data, ends: Sequence[heads.Head]) -> None:
    """Rejects a weight per example for masks: Keras would multiply it with rows of pixels."""
    found = [end.name for end in ends if end.kind == "places" and len(end.shape) > 2]
    if found and isinstance(data.train.element_spec, tuple) and len(data.train.element_spec) > 2:
        raise InputError(f"Keras cannot weight the target {found[0]!r} by example. Remove the sample weights.")
