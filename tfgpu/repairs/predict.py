"""`predict` under replicas: each predicts its own rows, none an empty batch, and what has no rows comes once."""

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import TensorFlowTrainer
from tfgpu.compat.patch import wrap
from tfgpu.core import batch_sharding, replication
from tfgpu.core.sparse import index_origin, lookups
from tfgpu.core.sparse.index_origin import Origin
from tfgpu.errors import InputError
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
        elif replication.replica_context() is None:
            return stock(self, data)
        elif self.jit_compile:
            return _without_repeats(stock(self, data), data, tf.constant(1), jit=True)
        else:
            local, data = batch_sharding.num_rows(data), tf.nest.map_structure(batch_sharding.with_stand_in_row, data)
        return _without_repeats(stock(self, data), data, local)


def _without_repeats(found, data, local: tf.Tensor, *, jit: bool = False):
    """This replica's rows of what a step predicts; what has no rows of the batch comes from the first replica alone.

    Raises:
        InputError: an output without rows depends on the rows, so each replica has another.
    """
    replica = replication.replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return found
    held, kept = tf.get_static_value(batch_sharding.num_rows(data)), []
    for at, value in enumerate(tf.nest.flatten(found)):
        if not isinstance(value, tf.Tensor) or _has_rows(value, held, at, jit=jit):
            gives_some = local > 0
        else:
            gives_some = tf.equal(replication.replica_number(replica), 0)
        is_sure = tf.get_static_value(gives_some)
        kept.append(value if is_sure else value[: tf.where(gives_some, tf.shape(value)[0], 0)])
    return tf.nest.pack_sequence_as(found, kept)


def _has_rows(value: tf.Tensor, rows: int | None, at: int, *, jit: bool) -> bool:
    """Whether an output has the rows of the batch.

    Args:
        value: of any shape.
        rows: how many the step got, one that stands in included; None if that is not known before the step runs.
        at: the output's position, for an error.
        jit: XLA compiles the step, which then cannot say how many rows an output has.
    """
    first = value.shape[0] if value.shape.rank else None
    origin = index_origin.origin_of(value)
    if origin is Origin.ALIKE and value.shape.rank and not jit and (rows is None or first != rows):
        return False
    if origin is Origin.ALIKE and first is not None and first == rows:
        repeated = lookups.is_repeated(value, rows)
        if repeated is not None and not jit:
            return repeated
    elif value.shape.rank and origin is not Origin.ALIKE and (first is None or (rows and first % rows == 0)):
        return True
    raise InputError(
        f"Output {at} of `predict`, of shape {tuple(value.shape)}, has no rows of the batch, so replicas cannot put it "
        "together. Return a number for each row, compute it from the predictions, or predict on one device. Weights "
        "alone may be an output without `run_eagerly` and `jit_compile`."
    )


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
