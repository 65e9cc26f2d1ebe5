"""Compiling a model under its own strategy, and building it without a batch of its data.

Stock Keras draws a real batch (one that training then misses) to build the model, and averages it over replicas:
https://github.com/keras-team/keras/issues/20861.
"""

import contextlib
import logging

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer
from keras.src.trainers.trainer import Trainer

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, step_context
from tfgpu.errors import InputError

_log = logging.getLogger(__name__)


def compile_in_scope() -> None:
    """Compiles a model under the strategy that it was made under, so that the optimizer belongs to it too.

    Raises:
        InputError: by `compile`, where the model or the optimizer was made outside the strategy's scope.
    """

    @wrap(Trainer, "compile")
    def compile_model(stock, self, *args, **kwargs):
        own, here = self._distribute_strategy, tf.distribute.get_strategy()
        if own is None and step_context.is_spread(here):
            raise InputError("The model was made outside `strategy.scope()`. Make it inside, where you compile it.")
        with _scope_of(self):
            stock(self, *args, **kwargs)
        inner = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if step_context.is_spread(own) and inner is not None:
            step_context.check_has_copies(inner._iterations)
        elif own is not None and getattr(inner, "_distribute_strategy", own) is not own:
            raise InputError("The optimizer was made outside `strategy.scope()`. Make it inside, as the model was.")


def build_from_spec() -> None:
    """Builds a model from the data's `element_spec`, where stock Keras draws a batch and averages it over replicas."""

    @wrap(keras_trainer.TensorFlowTrainer, "_maybe_symbolic_build")
    def maybe_symbolic_build(stock, self, iterator=None, data_batch=None):
        if self._distribute_strategy is not None and _is_built(self):
            return None
        if iterator is not None and self._distribute_strategy is not None:
            data_batch = _batch_of(iterator)
        try:
            with _scope_of(self):
                return stock(self, None, data_batch)
        except Exception as error:  # whatever a model of the user's raises
            if iterator is None or type(self).train_step is keras_trainer.TensorFlowTrainer.train_step:
                raise
            # The data may be laid out for a train step of the model's own, which builds what is left in its first run.
            _log.debug("The model was not built from the data's spec: %s", error)


def build_now(model, iterator) -> None:
    """Makes the variables that the first step on this data would make: layers', metrics', the loss's."""
    if not _is_built(model):
        with _scope_of(model):
            model._symbolic_build(data_batch=_batch_of(iterator))


def _batch_of(iterator):
    """What one replica gets, as specs."""
    spec = iterator._distributed_dataset.element_spec
    return tf.nest.map_structure(_one_replica, spec.data if isinstance(spec, batch_sharding.Piece) else spec)


def _scope_of(model):
    """The scope of the model's own strategy, where it is not the current one."""
    own = model._distribute_strategy
    return contextlib.nullcontext() if own is None or own is tf.distribute.get_strategy() else own.scope()


def _is_built(model) -> bool:
    """Whether there is nothing left of the model that data would have to build."""
    parts = [*model._flatten_layers(), model._compile_metrics, model._compile_loss, getattr(model, "optimizer", None)]
    return all(part is None or part.built for part in parts)


def _one_replica(spec):
    if isinstance(spec, (tf.OptionalSpec, tf.NoneTensorSpec)):
        return None
    return spec._value_specs[0] if hasattr(spec, "_value_specs") else spec
