"""`predict_step` on each replica's rows, as a step that knows them, and what becomes of its outputs.

Layers of the user's own that mix rows get all rows, as in `fit`, and so does a `predict_step` that does. Keras puts the
replicas' outputs one after another. So what a replica made of a row that stands in is dropped, and an output without
rows of the batch, which all replicas have, comes from the first of them alone.
"""

from collections.abc import Callable

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.core import batch_rows, batch_sharding, replica_attributes, replication, step_context, worker_rows
from tfgpu.core.randomness import draw_sizes, row_draws, tensor_origin
from tfgpu.core.row_mixing import gathering, own_layers, whole_batch
from tfgpu.core.row_mixing.trials import step_trial
from tfgpu.core.row_mixing.trials.step_trial import Predictions
from tfgpu.core.sparse import index_origin, lookups
from tfgpu.core.sparse.index_origin import Origin
from tfgpu.errors import InputError


def is_in_xla(model: keras.Model) -> bool:
    """Whether XLA compiles each replica's predictions as a whole, where replicas cannot meet.

    A model with a `predict_step` or layers of the user's own may have to, so it predicts without XLA.
    """
    return bool(model.jit_compile) and not step_trial.has_own_predictions(model) and not own_layers.has_own(model)


def on_replica(model: keras.Model, step: Callable, data: object, tried: Predictions) -> object:
    """What one replica predicts for its rows.

    Args:
        model: whose step it is.
        step: takes rows in the structure of the data.
        data: the replica's rows, or a `ReplicaBatch` of them.
        tried: what is known of the step.

    Returns:
        The step's outputs, each with this replica's own rows only.

    Raises:
        InputError: an output without rows depends on rows in a way that is not known.
    """
    rows, local, place = batch_sharding.rows_and_range(data)
    facts = batch_rows.begin_step(local, place)
    context = step_context.scope(step=facts, draws_as_xla=row_draws.are_as_xla(model))
    sizes = draw_sizes.known(draw_sizes.kept(model, "predict_step"))
    with replica_attributes.of_model(model), context, sizes, own_layers.noting_plain_outputs() as plain:
        found = whole_batch.run(step, data) if tried.need_whole_batch else step(rows)
        leaves = keras.tree.flatten(found)
        known = tried.have_rows or ()
        have_rows = known if len(known) == len(leaves) else [None] * len(leaves)
        held, kept = tf.get_static_value(batch_sharding.num_rows(rows)), []
        for leaf, has_rows in zip(leaves, have_rows, strict=True):
            if has_rows is None and any(leaf is each for each in plain):
                has_rows = False
            elif has_rows is None and tried.need_whole_batch:
                has_rows = _may_have_rows(leaf, tf.get_static_value(facts.rows.total))
            elif has_rows is None:
                has_rows = not isinstance(leaf, tf.Tensor) or _has_rows(leaf, held, len(kept), jit=False)
            if has_rows and tried.need_whole_batch:
                leaf = gathering.own_rows(leaf, True)
            kept.append(_kept(leaf, has_rows))
    slots.of(model).scalar_predictions = [hasattr(leaf, "shape") and leaf.shape.rank == 0 for leaf in leaves]
    return keras.tree.pack_sequence_as(found, kept)


def of_xla(found: object, rows: object) -> object:
    """What one replica predicts in a function that XLA compiles: an output without rows is refused.

    Args:
        found: the step's outputs.
        rows: that the step got.

    Raises:
        InputError: an output has no rows.
    """
    replica = replication.replica_context()
    held = tf.get_static_value(batch_sharding.num_rows(rows))
    if replica.num_replicas_in_sync > 1:
        for at, leaf in enumerate(keras.tree.flatten(found)):
            if isinstance(leaf, tf.Tensor):
                _has_rows(leaf, held, at, jit=True)
    return found


def of_one_batch(model: keras.Model, found: object) -> object:
    """The predictions for one batch, in which Keras has put the replicas' values together: scalars are scalars."""
    scalars, leaves = slots.get(model, "scalar_predictions", ()), keras.tree.flatten(found)
    if len(scalars) != len(leaves) or model.distribute_strategy.num_replicas_in_sync == 1:
        return found
    leaves = [leaf.reshape(()) if is_scalar else leaf for leaf, is_scalar in zip(leaves, scalars, strict=True)]
    return keras.tree.pack_sequence_as(found, leaves)


def _may_have_rows(leaf: object, batch: int | None) -> bool:
    """Whether a tensor's first axis may be that of a batch of so many rows."""
    if not hasattr(leaf, "shape") or not leaf.shape.rank:
        return False
    rows = leaf.shape[0]
    return rows is None or (batch is not None and rows % max(int(batch), 1) == 0)


def _has_rows(value: tf.Tensor, rows: int | None, at: int, *, jit: bool) -> bool:
    """Whether an output, of a step that each replica runs on its rows, has the rows of the batch.

    Args:
        value: of any shape.
        rows: how many the step got, one that stands in included; None if that is not known before the step runs.
        at: the output's position, for an error.
        jit: XLA compiles the step, which then cannot say how many rows an output has.
    """
    first = value.shape[0] if value.shape.rank else None
    if index_origin.origin_of(value) is Origin.ALIKE:
        found = _has_rows_if_alike(value, first, rows, jit=jit)
    else:
        is_multiple = first is None or (rows and first % rows == 0)
        found = True if value.shape.rank and is_multiple else None
    if found is not None:
        return found
    raise InputError(
        f"Output {at} of `predict`, of shape {tuple(value.shape)}, has no rows of the batch, so replicas cannot "
        "combine it. Return one number per row, compute it from the predictions, or predict on one device. An output "
        "that holds only weights works without `run_eagerly` and `jit_compile`."
    )


def _has_rows_if_alike(value: tf.Tensor, first: int | None, rows: int | None, *, jit: bool) -> bool | None:
    """Whether an output that depends on no replica's rows has the rows of the batch; None if that is not known."""
    if first is None and tensor_origin.origin_of(value) == tensor_origin.DATA:
        return True
    if jit or not value.shape.rank:
        return None
    return lookups.is_repeated(value, rows) if first is not None and first == rows else False


def _kept(leaf: object, has_rows: bool) -> object:
    """What this replica adds to an output of all: its own rows; without rows, the first replica's value."""
    if has_rows:
        if step_context.surely_has_rows():
            return leaf
        return worker_rows.sliced(leaf, 0, tf.where(step_context.has_rows(), worker_rows.rows_in(leaf), 0))
    context, facts = replication.replica_context(), step_context.rows()
    if context.num_replicas_in_sync == 1:
        return leaf
    leaf = tf.convert_to_tensor(leaf) if not hasattr(leaf, "shape") else leaf
    leaf = leaf if leaf.shape.rank else tf.reshape(leaf, [1])
    is_first = tf.logical_and(facts.local > 0, facts.offset == 0)
    return worker_rows.sliced(leaf, 0, tf.where(is_first, worker_rows.rows_in(leaf), 0))
