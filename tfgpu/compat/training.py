"""What a model, its data adapters and its epoch iterator hold during `fit`."""

import inspect
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import keras
import tensorflow as tf
from keras.src.backend import compute_output_spec

from tfgpu.compat import slots
from tfgpu.compat.keras import (
    ArrayDataAdapter,
    CallbackList,
    EpochIterator,
    LossFunctionWrapper,
    MeanMetricWrapper,
    PyDatasetAdapter,
)


def strategy_of(model: keras.Model) -> tf.distribute.Strategy | None:
    """The strategy in whose scope a model was made, or None outside any scope.

    `model.distribute_strategy` returns the current strategy instead of None.
    """
    return model._distribute_strategy


def set_strategy(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Assigns a model to a strategy, as if it were made in its scope."""
    model._distribute_strategy = strategy


def compiled_parts(model: keras.Model) -> list:
    """A model's layers, its compiled metrics and loss, and its optimizer; None for missing ones."""
    return [*model._flatten_layers(), model._compile_metrics, model._compile_loss, getattr(model, "optimizer", None)]


def compiled_losses_and_metrics(model: keras.Model) -> list:
    """What holds the losses and metrics that `compile` was given; None for missing ones."""
    return [model._compile_loss, model._compile_metrics]


def given_metrics(model: keras.Model) -> list:
    """The `metrics` and `weighted_metrics` that `compile` was given."""
    found = model._compile_metrics
    return [] if found is None else [found._user_metrics, found._user_weighted_metrics]


def build_symbolically(model: keras.Model, batch: object) -> None:
    """Creates all variables that a step on a batch of this structure would create.

    Args:
        batch: tensors or specs, in the structure that `fit` passes to `train_step`.
    """
    model._symbolic_build(data_batch=batch)


def build_on_specs(model: keras.Model, batch: object) -> None:
    """Creates a model's variables from ragged or sparse rows, of which Keras's own build makes dense ones.

    Args:
        batch: tensors or specs, in the structure that `fit` passes to `train_step`.
    """
    specs = tf.nest.map_structure(
        lambda v: v if v is None or isinstance(v, tf.TypeSpec) else tf.type_spec_from_value(v), batch
    )
    x, y, weights = keras.utils.unpack_x_y_sample_weight(_symbolic(specs))
    if any(isinstance(each, tf.RaggedTensorSpec) for each in tf.nest.flatten(specs)):
        function = tf.function(lambda rows: model(rows, training=False))
        with keras.StatelessScope():  # makes variables after the function
            found = function.get_concrete_function(keras.utils.unpack_x_y_sample_weight(specs)[0]).structured_outputs
    else:
        found = compute_output_spec(model, x, training=False)
    for part, compute in ((model._compile_metrics, model.compute_metrics), (model._compile_loss, model._compute_loss)):
        if part is not None and not part.built:
            compute_output_spec(compute, x, y, _symbolic(found), sample_weight=weights)


def _symbolic(structure: object) -> object:
    def symbolic(value):
        if value is None:
            return None
        is_sparse = isinstance(value, (tf.SparseTensor, tf.SparseTensorSpec))
        return keras.KerasTensor(value.shape, keras.backend.standardize_dtype(value.dtype), sparse=is_sparse)

    return tf.nest.map_structure(symbolic, structure)


def without_optimizer(model: keras.Model) -> AbstractContextManager[None]:
    """Inside the block a compiled model has no optimizer."""
    return slots.replaced(model, optimizer=None)


_BY_SHAPE = ("accuracy", "acc", "crossentropy", "ce")  # Keras chooses these by the shapes of labels and outputs


def without_parts_chosen_by_shape(model: keras.Model) -> AbstractContextManager[None]:
    """Inside the block a compiled model lacks its losses or metrics, if Keras chooses one by the labels' shape."""
    names = {
        "_compile_loss": [model._compile_loss and model._compile_loss._user_loss],
        "_compile_metrics": given_metrics(model),
    }
    chosen = [
        name
        for name, given in names.items()
        if any(isinstance(each, str) and each.lower() in _BY_SHAPE for each in tf.nest.flatten(given))
    ]
    return slots.replaced(model, **dict.fromkeys(chosen))


def without_optionals(model: keras.Model, step):
    """Wraps a step to take what an iterator of `tf.experimental.Optional` yields."""
    convert = getattr(model, "_autoconvert_optionals", None)
    return step if convert is None else convert(step)


def resume_from(model: keras.Model, epoch: int | None) -> None:
    """Makes the next `fit` begin at an epoch; None means its own `initial_epoch`."""
    model._initial_epoch = epoch


def dataset_of(iterator: EpochIterator) -> object:
    """The (possibly distributed) dataset that an epoch iterator reads."""
    return iterator._distributed_dataset


def set_dataset(iterator: EpochIterator, dataset: object) -> None:
    """Replaces the dataset that an epoch iterator reads."""
    iterator._distributed_dataset = dataset


def set_iterator_strategy(iterator: EpochIterator, strategy: tf.distribute.Strategy) -> None:
    """Sets the strategy for which an epoch iterator reads."""
    iterator._distribute_strategy = strategy


def batches_known(iterator: EpochIterator) -> int | None:
    """The number of batches per epoch; None if unknown."""
    return iterator._num_batches


def forget_batches(iterator: EpochIterator) -> None:
    """Makes the number of batches per epoch unknown, until the first epoch has ended."""
    kind, held = type(iterator), weakref.proxy(iterator)  # a cycle would keep its data until garbage is collected

    def reset():
        kind.reset(held)
        held._num_batches = None

    iterator.reset, iterator._num_batches = reset, None


def batches_seen(iterator: EpochIterator) -> int:
    """The number of batches that an epoch iterator has yielded so far, in all epochs."""
    return iterator._steps_seen


def rows_of(adapter: ArrayDataAdapter) -> int:
    """The number of rows of the arrays passed to `fit`."""
    return adapter._num_samples


def batch_size_of(adapter: ArrayDataAdapter) -> int:
    """The batch size passed to `fit`."""
    return adapter._batch_size


def arrays_of(adapter: ArrayDataAdapter) -> object:
    """The arrays passed to `fit`."""
    return adapter._inputs


def shuffles(adapter: ArrayDataAdapter) -> bool | str:
    """The argument `shuffle` of `fit`."""
    return adapter._shuffle


def standardized(adapter: PyDatasetAdapter, batch: object) -> object:
    """A batch of a `PyDataset` as `fit` takes it: a tuple or a dict, with the weights of `class_weight`."""
    return adapter._standardize_batch(batch)


def concatenate(batches: list):
    """Concatenates the results of several batches along their first axis, ragged and sparse tensors included."""
    from keras.src.backend.tensorflow import trainer

    return trainer.concat(batches)


def trainer_source() -> str:
    """The source of Keras's TensorFlow trainer."""
    from keras.src.backend.tensorflow import trainer

    return inspect.getsource(trainer)


def wait_for_callbacks(callbacks: CallbackList) -> None:
    """Waits until callbacks that run in their own thread have finished."""
    if hasattr(callbacks, "_flush_futures"):
        callbacks._flush_futures()


def metric_function(metric: MeanMetricWrapper) -> tuple[Callable, dict]:
    """The function of labels and outputs whose mean a metric computes, and its further arguments."""
    return metric._fn, metric._fn_kwargs


def loss_arguments(loss: LossFunctionWrapper) -> dict:
    """What a loss hands to its function besides labels and outputs."""
    return loss._fn_kwargs


def set_metric_function(metric: MeanMetricWrapper, function: Callable) -> None:
    """Gives a metric another function of labels and outputs."""
    metric._fn = function


def without_strategy(model: keras.Model) -> AbstractContextManager[None]:
    """Inside the block, a model looks to Keras as if it were made under no strategy."""
    return slots.replaced(model, _distribute_strategy=None)


def one_device_compiles(model: keras.Model) -> bool:
    """Whether XLA compiles a model's step on this machine under no strategy, where `jit_compile` is "auto"."""
    with without_strategy(model):
        return model._resolve_auto_jit_compile()


def metric_values(metric: MeanMetricWrapper, values: tf.Tensor) -> AbstractContextManager[None]:
    """Inside the block, the function of a metric returns these values."""
    return slots.replaced(metric, _fn=lambda *_, **__: values)
