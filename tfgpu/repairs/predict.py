"""`predict` under replicas: each predicts its own rows, none an empty batch, and what has no rows comes once."""

import contextlib
import functools
from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu.compat import layers, slots, training
from tfgpu.compat.keras import TensorFlowTrainer
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, replication, step_context
from tfgpu.core.feed import sharded_dataset
from tfgpu.core.row_mixing import predictions
from tfgpu.core.row_mixing.trials import step_trial
from tfgpu.core.row_mixing.trials.step_trial import Predictions
from tfgpu.repairs import Repair, probes, probing


def split_batches_to_predict() -> None:
    """Makes `predict_on_batch` split its batch over the replicas; stock Keras predicts the whole batch on each.

    Each replica's `predict_step` is a step that knows which rows it holds: what mixes rows is one device's
    (`core.row_mixing.predictions`). A replica without rows predicts a stand-in row and drops the result: oneDNN has no
    empty convolution.
    """

    @wrap("TensorFlowTrainer.predict_on_batch")
    def predict_on_batch(stock, self, x):
        if not replication.is_replicated(self.distribute_strategy):
            return stock(self, x)
        shards = batch_sharding.shard(self.distribute_strategy, x, gives_row_ranges=not predictions.is_in_xla(self))
        found = stock(self, shards)
        return predictions.of_one_batch(self, found)

    @wrap("TensorFlowTrainer.predict")
    def predict(stock, self, *args, **kwargs):
        replication.check_scope(training.strategy_of(self))
        # XLA cannot drop a stand-in row.
        with step_context.scope(gives_row_ranges=not predictions.is_in_xla(self)):
            return stock(self, *args, **kwargs)

    wrap("TensorFlowTrainer.predict_step")(_by_rows)
    slots.of(TensorFlowTrainer).predicts_by_rows = True

    @wrap("TensorFlowTrainer.make_predict_function")
    def make_predict_function(stock, self, force=False):
        if not replication.is_replicated(self.distribute_strategy):
            return stock(self, force)
        for cls in type(self).__mro__:  # the model may define its own step
            is_own = "predict_step" in vars(cls) and issubclass(cls, TensorFlowTrainer)
            if is_own and not slots.get(cls, "predicts_by_rows"):
                slots.of(cls).predicts_by_rows = True
                wrap(cls, "predict_step")(_by_rows)
        before, jit = self.predict_function, self.jit_compile
        self.jit_compile = predictions.is_in_xla(self)
        try:
            found = stock(self, force)
        finally:
            self.jit_compile = jit
        if self.predict_function is not before:
            self.predict_function = _tried_first(self, self.predict_function)
        return found


def _tried_first(model: keras.Model, function: Callable) -> Callable:
    """A predict function that tries a step of the user's own on its first data."""
    slots.of(model).predictions = None

    @functools.wraps(function)
    def predict_function(data):
        if slots.get(model, "predictions") is None:
            slots.of(model).predictions = _tried(model, data[0])
        return function(data)

    return predict_function


def _tried(model: keras.Model, data) -> Predictions:
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1 or replication.local_training_of(strategy) is not None:
        return Predictions()
    on_batch = _of_predict_on_batch(data)
    spec = sharded_dataset.spec_of(data if on_batch is None else on_batch)
    spec = spec if on_batch is None else (spec,)
    _build(model, spec)
    return step_trial.predictions(model, spec)


def _build(model: keras.Model, spec) -> None:
    """Makes the variables of a model that was not called yet, before the replicas run: each would make them.

    A model that cannot be called on symbols, or takes texts, ragged or sparse tensors, is left as it is.
    """
    if all(layer.built for layer in layers.layers_within(model)):
        return
    inputs, *_ = keras.utils.unpack_x_y_sample_weight(spec)
    if not all(isinstance(leaf, tf.TensorSpec) and leaf.dtype != tf.string for leaf in tf.nest.flatten(inputs)):
        return
    with contextlib.suppress(Exception), model.distribute_strategy.scope():
        model(keras.tree.map_structure(lambda leaf: keras.KerasTensor(leaf.shape, leaf.dtype.name), inputs))


def _of_predict_on_batch(data) -> batch_sharding.ReplicaBatch | None:
    """The rows within the tuple that `predict_on_batch` makes; None for other data."""
    is_of_one = type(data) is tuple and len(data) == 1 and isinstance(data[0], batch_sharding.ReplicaBatch)
    return data[0] if is_of_one else None


def _by_rows(stock, model: keras.Model, data):
    is_known = step_context.step() is not None  # `super().predict_step`
    if is_known or replication.replica_context() is None:
        return stock(model, data)
    if predictions.is_in_xla(model):
        return predictions.of_xla(stock(model, data), data)
    step = functools.partial(stock, model)
    if (rows := _of_predict_on_batch(data)) is not None:
        data, step = rows, functools.partial(_on_one, step)
    return predictions.on_replica(model, step, data, slots.get(model, "predictions") or Predictions())


def _on_one(step: Callable, rows):
    return step((rows,))


@probes("predict_on_batch predicts the whole batch on every replica")
def predict_on_batch_repeats() -> bool:
    """Whether three rows give six predictions."""
    with probing.mirrored().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return len(model.predict_on_batch(probing.X)) != 3


REPAIRS = (Repair("predict-on-batch", predict_on_batch_repeats, split_batches_to_predict),)
