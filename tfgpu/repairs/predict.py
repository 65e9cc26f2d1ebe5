"""`predict` under replicas: each predicts its own rows, and none predicts an empty batch."""

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import TensorFlowTrainer
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, replication
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def split_batches_to_predict() -> None:
    """Makes `predict_on_batch` split its batch over the replicas; stock Keras predicts the whole batch on each.

    A replica without rows predicts a stand-in row and drops the result: oneDNN has no empty convolution.
    """

    @wrap("TensorFlowTrainer.predict_on_batch")
    def predict_on_batch(stock, self, x):
        if not replication.is_replicated(self.distribute_strategy):
            return stock(self, x)
        return stock(self, batch_sharding.shard(self.distribute_strategy, x, gives_row_ranges=not self.jit_compile))

    _stand_in_to_predict(TensorFlowTrainer)

    @wrap("TensorFlowTrainer.make_predict_function")
    def make_predict_function(stock, self, force=False):
        for cls in type(self).__mro__:  # the model may define its own step
            if "predict_step" in vars(cls) and issubclass(cls, TensorFlowTrainer):
                _stand_in_to_predict(cls)
        return stock(self, force)


def _stand_in_to_predict(cls: type) -> None:
    """Gives the class's `predict_step` a stand-in row if a replica has none, and drops its result."""
    if slots.get(cls, "predicts_stand_ins"):
        return
    slots.of(cls).predicts_stand_ins = True

    @wrap(cls, "predict_step")
    def predict_step(stock, self, data):
        if type(data) is tuple and len(data) == 1 and isinstance(data[0], batch_sharding.ReplicaBatch):
            local, data = data[0].local, (data[0].data,)  # of `predict_on_batch`
        elif isinstance(data, batch_sharding.ReplicaBatch):
            local, data = data.local, data.data
        elif replication.replica_context() is None or self.jit_compile:
            return stock(self, data)
        else:
            local, data = batch_sharding.num_rows(data), tf.nest.map_structure(batch_sharding.with_stand_in_row, data)
        found = stock(self, data)
        if tf.get_static_value(local):
            return found
        kept = [v[: tf.where(local > 0, tf.shape(v)[0], 0)] if v.shape.rank else v for v in tf.nest.flatten(found)]
        return tf.nest.pack_sequence_as(found, kept)


def predict_on_batch_repeats() -> bool:
    """Whether three rows give six predictions."""
    with probing.mirrored().scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    return len(model.predict_on_batch(probing.X)) != 3


REPAIRS = (
    Repair(
        name="predict-on-batch",
        fault="predict_on_batch predicts the whole batch on every replica",
        issue="",
        probe=predict_on_batch_repeats,
        apply=split_batches_to_predict,
    ),
)
