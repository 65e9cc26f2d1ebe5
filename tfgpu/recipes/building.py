"""From a recipe to the parts of a run: strategy, data, model and callbacks, checked before any file is written."""

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from tfgpu import environment, models, precision, rendezvous, strategies
from tfgpu.cluster import Cluster
from tfgpu.data import Data, pipeline
from tfgpu.errors import InputError
from tfgpu.recipes import compiling, endings, recipe
from tfgpu.recipes.recipe import Recipe
from tfgpu.rendezvous.facts import of_settings
from tfgpu.training import Trainer


@dataclass(frozen=True)
class Job:
    """All parts of a run, built and checked."""

    recipe: Recipe
    cluster: Cluster
    strategy: tf.distribute.Strategy
    data: Data
    model: keras.Model
    schedule_callbacks: tuple[keras.callbacks.Callback, ...]
    ending_callbacks: tuple[keras.callbacks.Callback, ...]
    trainer: Any


def prepare(what: Recipe) -> precision.Precision:
    """Configures devices and seeds, and sets the precision; returns a context manager that restores the precision."""
    if what.virtual_devices and what.virtual_devices != len(environment.devices("CPU")):
        environment.set_logical_devices(what.virtual_devices)
    environment.set_seed(what.seed, deterministic=what.deterministic)
    return precision.use(what.precision)


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
    if cluster.is_multi_worker and what.strategy in ("auto", "multi_worker"):
        rendezvous.join(cluster, facts={**of_settings(what.model_dump()), "script": "tfgpu train"})
    strategy = strategy_of(what, cluster)
    replicas = strategy.num_replicas_in_sync
    if what.global_batch < replicas:
        raise InputError(
            "`global_batch` must be at least the number of replicas. "
            f"Received: global_batch={what.global_batch}, replicas={replicas}. "
            f"Use {replicas} or more, or fewer devices."
        )
    data = open_data(what, cluster, source=source)
    _check_parts(data, what)
    compiling.check_monitors(what, labels=data.info.labels)
    schedule = compiling.schedule(what, steps_per_epoch=data.info.steps_per_epoch)
    with strategy.scope():
        model = models.build(
            what.model,
            input_shape=data.info.input_shape,
            classes=data.info.classes,
            options=what.builder_options,
        )
        _check_outputs(model, what, data)
        compiling.compile_model(model, what, learning_rate=schedule.learning_rate, labels=data.info.labels)
    trainer = Trainer(model) if what.path == "loop" else model
    return Job(what, cluster, strategy, data, model, schedule.callbacks, endings.callbacks(what, data), trainer)


_LEARNED = {"numbers": "numbers to predict", "named": "named targets"}


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
    return pipeline(
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
        balance=None if what.balance == "none" else what.balance,
        **{name: getattr(what, name) for name in recipe.INPUT},
        cluster=cluster,
    )


def _check_parts(data: Data, what: Recipe) -> None:
    if data.info.labels in ("numbers", "named"):
        raise InputError(
            f"A recipe trains a classifier, and {what.data} has {_LEARNED[data.info.labels]}. Train on it in Python: "
            "model.fit(tfgpu.data.pipeline(...).train). Classes are whole numbers from 0, or strings."
        )
    for name, part in (("validation", data.validation), ("test", data.test)):
        if part is None:
            raise InputError(
                f"{what.data} has too few examples for {name}. Received: {name}={getattr(what, name)}. Increase it."
            )
    if what.classes not in (None, data.info.classes):
        raise InputError(
            f"`classes` must be the number of classes in {what.data}. Received: classes={what.classes}, found "
            f"{data.info.classes}. Use --classes {data.info.classes}, or remove it."
        )


def _check_outputs(model: keras.Model, what: Recipe, data: Data) -> None:
    """Rejects a user's model with a wrong number of outputs, which would fail late or train nonsense."""
    shape = getattr(model, "output_shape", None) if model.built else None
    classes = data.info.classes
    if isinstance(shape, tuple) and shape and shape[-1] != classes:
        raise InputError(
            f"The model {what.model!r} must have one output per class. Received: {shape[-1]} outputs, "
            f"{classes} classes in {what.data}. Use the function's argument `classes`."
        )
