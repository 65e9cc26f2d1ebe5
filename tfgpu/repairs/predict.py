"""`predict` under replicas: each predicts its own rows, and none an empty batch."""

import tensorflow as tf
from keras.src.backend.tensorflow import trainer as keras_trainer

from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, step_context
from tfgpu.repairs import layers


def split_batches_to_predict() -> None:
    """`predict_on_batch` splits its batch over the replicas; stock Keras predicts the whole batch on each of them.

    A replica without rows predicts one that stands in, and gives nothing: oneDNN has no empty convolution.
    """

    @wrap(keras_trainer.TensorFlowTrainer, "predict_on_batch")
    def predict_on_batch(stock, self, x):
        if not step_context.is_spread(self.distribute_strategy):
            return stock(self, x)
        return stock(self, batch_sharding.deal(self.distribute_strategy, x, with_places=not self.jit_compile))

    _stand_in_to_predict(keras_trainer.TensorFlowTrainer)

    @wrap(keras_trainer.TensorFlowTrainer, "make_predict_function")
    def make_predict_function(stock, self, force=False):
        for cls in type(self).__mro__:  # a model may have a step of its own
            if "predict_step" in vars(cls) and issubclass(cls, keras_trainer.TensorFlowTrainer):
                _stand_in_to_predict(cls)
        return stock(self, force)


def _stand_in_to_predict(cls: type) -> None:
    """Gives the class's `predict_step` a row that stands in where a replica has none, and drops what comes of it."""
    if vars(cls).get("_predicts_stand_ins"):
        return
    cls._predicts_stand_ins = True

    @wrap(cls, "predict_step")
    def predict_step(stock, self, data):
        if type(data) is tuple and len(data) == 1 and isinstance(data[0], batch_sharding.Piece):
            local, data = data[0].local, (data[0].data,)  # of `predict_on_batch`
        elif isinstance(data, batch_sharding.Piece):
            local, data = data.local, data.data
        elif step_context.context() is None or self.jit_compile:
            return stock(self, data)
        else:
            local, data = batch_sharding.rows_of(data), tf.nest.map_structure(layers.with_a_row, data)
        found = stock(self, data)
        if tf.get_static_value(local):
            return found
        kept = [v[: tf.where(local > 0, tf.shape(v)[0], 0)] if v.shape.rank else v for v in tf.nest.flatten(found)]
        return tf.nest.pack_sequence_as(found, kept)
