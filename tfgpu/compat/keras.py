"""Keras's private classes, modules and scopes, under one name on every supported version.

Code uses Keras's public names where they exist; names here are private, or differ between versions.
Attributes of objects are in `variables.py`, `optimizers.py`, `layers.py` and `training.py`.
"""

import copy
import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tfgpu.compat import targets, versions

versions.check()  # before a missing private name raises

import keras
import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend.common import global_state, masking
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope
from keras.src.callbacks.callback_list import CallbackList
from keras.src.layers.normalization.batch_normalization import BatchNormalization
from keras.src.layers.normalization.spectral_normalization import SpectralNormalization
from keras.src.layers.rnn.rnn import RNN
from keras.src.losses.losses import LossFunctionWrapper
from keras.src.metrics.reduction_metrics import MeanMetricWrapper
from keras.src.models.functional import Functional
from keras.src.models.sequential import Sequential
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random import seed_generator
from keras.src.random.seed_generator import SeedGenerator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter
from keras.src.trainers.data_adapters.generator_data_adapter import GeneratorDataAdapter
from keras.src.trainers.data_adapters.py_dataset_adapter import OrderedEnqueuer, PyDatasetAdapter
from keras.src.trainers.data_adapters.tf_dataset_adapter import TFDatasetAdapter
from keras.src.trainers.epoch_iterator import EpochIterator
from keras.src.utils import file_utils
from keras.src.utils.tracking import Tracker

# fmt: off
__all__ = [
    "ArrayDataAdapter", "BaseOptimizer", "BatchNormalization", "CallbackList", "EpochIterator", "Functional",
    "GeneratorDataAdapter", "LossFunctionWrapper", "LossScaleOptimizer", "MeanMetricWrapper", "MultiOptimizer",
    "OrderedEnqueuer", "PyDatasetAdapter", "RNN", "SeedGenerator", "Sequential", "SpectralNormalization",
    "TFDatasetAdapter", "Tracker", "file_utils", "get_stateless_scope", "in_stateless_scope", "in_symbolic_scope",
    "tree",
]
# fmt: on

Trainer = targets.owner("Trainer")
"""The base class of every model on any backend (`BaseTrainer` from Keras 3.16)."""
TensorFlowTrainer = targets.owner("TensorFlowTrainer")
"""The base class of every model on TensorFlow."""
TFEpochIterator = targets.owner("TFEpochIterator")
TFOptimizer = targets.owner("TFOptimizer")
Variable = backend.Variable
"""TensorFlow's `keras.Variable`, as a class to derive from."""
StatelessScope = backend.StatelessScope
name_scope = backend.name_scope
nn = targets.owner("nn")
"""TensorFlow's implementation of `keras.ops.nn`."""

try:
    from keras.src.optimizers.multi_optimizer import MultiOptimizer
except ImportError:  # before Keras 3.15

    class MultiOptimizer:  # type: ignore[no-redef]
        """Stands in for a class that this Keras does not have; it has no instances."""


def get_mask(value: object) -> object | None:
    """The Keras mask of a tensor, or None."""
    return masking.get_keras_mask(value)


def set_mask(value: object, mask: object | None) -> None:
    """Sets a tensor's Keras mask."""
    masking.set_keras_mask(value, mask)


def carry_mask(value: object, found: object, change: Callable[[object], object]) -> object:
    """Gives `found` what `change` makes of another tensor's Keras mask, if that has one; returns `found`."""
    mask = masking.get_keras_mask(value)
    if mask is not None:
        masking.set_keras_mask(found, change(mask))
    return found


def logits_of(value: object) -> tf.Tensor | None:
    """The input of the softmax or sigmoid that returned this tensor, if Keras has recorded it."""
    return getattr(value, "_keras_logits", None)


def with_logits(value: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    """The tensor, with the logits attached that Keras's cross-entropies use."""
    value._keras_logits = logits
    return value


def get_attribute(name: str) -> object:
    """A value of Keras's global state in this thread, such as `"current_call_ctx"`; None if unset."""
    return global_state.get_global_attribute(name)


def set_attribute(name: str, value: object) -> None:
    """Sets a value of Keras's global state in this thread."""
    global_state.set_global_attribute(name, value)


def call_context() -> object | None:
    """Keras's record of the outermost layer call in this thread, or None."""
    return global_state.get_global_attribute("current_call_ctx")


def make_global_seed_generator() -> SeedGenerator:
    """Keras's global seed generator, created if needed."""
    return seed_generator.global_seed_generator()


def global_seed_generator() -> SeedGenerator | None:
    """Keras's global seed generator, or None if it does not exist yet."""
    return global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)


@contextmanager
def replaced_attributes(values: dict[str, object]) -> Iterator[None]:
    """Sets values of Keras's global state in this thread for the block."""
    before = {name: global_state.get_global_attribute(name) for name in values}
    for name, value in values.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def operation_with_training(operation, training: bool | None = True):
    """A function that calls an operation as a functional model does in training: with `training`, if accepted."""
    module = importlib.import_module("keras.src.models.functional")
    if hasattr(module, "operation_fn"):  # up to Keras 3.15
        return module.operation_fn(operation, training=training)

    def call(*args, **kwargs):
        name = "training"
        if getattr(operation, "_call_has_training_arg", False) and training is not None and kwargs.get(name) is None:
            kwargs[name] = training
        return operation(*args, **kwargs)

    return call


def draw_seed(seed: object):
    """The two seed numbers of a `keras.random` draw, as TensorFlow takes them."""
    return targets.owner("random")._cast_seed(seed_generator.draw_seed(seed))


def noise_shape(inputs, shape):
    """The shape of a dropout mask: `shape` with its None filled in from the inputs."""
    return targets.owner("random")._get_concrete_noise_shape(inputs, shape)


def as_sliceable(arrays):
    """The arrays of an `ArrayDataAdapter` as objects that can be indexed by rows, in `fit`'s structure."""
    from keras.src.trainers.data_adapters import array_slicing

    return tree.lists_to_tuples(array_slicing.convert_to_sliceable(arrays, target_backend="tensorflow"))


def sparse_rows(value, places) -> tf.SparseTensor | None:
    """Rows of a sparse array that `as_sliceable` has wrapped; None for other arrays."""
    from keras.src.trainers.data_adapters import array_slicing

    if not isinstance(value, array_slicing.TensorflowSparseWrapper):
        return None
    return array_slicing.slice_tensorflow_sparse_wrapper(value, places)


def is_layer_with_graph(model: keras.layers.Layer) -> bool:
    """Whether a model has a graph of calls: it is functional, or a Sequential that is built."""
    return isinstance(model, Functional) or (isinstance(model, Sequential) and model._functional is not None)


GLOBAL_SEED_GENERATOR = seed_generator.GLOBAL_SEED_GENERATOR
"""The name of the global seed generator in Keras's global state."""


def copied_thread_state() -> dict[str, object]:
    """Keras's global state of this thread for another one: policies and seeds, the layer being called, no scopes."""
    scopes = "stateless_scope", "symbolic_scope", "autocast_scope", "name_scope_stack", "remat_scope_stack"
    held = {name: value for name, value in thread_state().items() if name not in scopes}
    copied = "current_call_ctx", "object_name_uids"
    return held | {name: copy.copy(held[name]) for name in copied if held.get(name) is not None}


def thread_state() -> dict[str, object]:
    """Keras's global state of this thread, as a mutable object."""
    return vars(global_state.GLOBAL_STATE_TRACKER)


def is_training() -> bool | None:
    """What the outermost layer that is being called in this thread was told of `training`; None outside a call."""
    context = call_context()
    return None if context is None else context.get_value("training")


def has_enabled_flash_attention() -> bool:
    """Whether this thread has called `keras.config.enable_flash_attention()`, which leaves a value of None behind."""
    kept = vars(global_state.GLOBAL_STATE_TRACKER)
    return "flash_attention" in kept and kept["flash_attention"] is None
