"""Activity regularizers of Keras up to 3.13, whose losses are sums over the rows of a batch; later ones are means."""

import keras
import tensorflow as tf

from tfgpu.compat import layers
from tfgpu.compat.patch import replace
from tfgpu.core import step_context
from tfgpu.repairs.repair import Repair


def keep_activity_losses_as_sums() -> None:
    """Makes each replica's sum over its rows count in full: a step treats what a layer adds as a mean over rows.

    Keras changed the sum to a mean in 3.14: https://github.com/keras-team/keras/pull/22021
    """

    def change(regularizer):
        if step_context.step() is None:
            return regularizer

        def sum_over_rows(activity):
            loss = regularizer(activity)
            return tf.math.divide_no_nan(loss, tf.cast(step_context.share(), loss.dtype))

        return sum_over_rows

    value = layers.changed_activity_regularizer(change)
    replace("Layer.activity_regularizer", value, by=__name__, is_new=True)


def activity_loss_is_a_sum() -> bool:
    """Whether two rows add twice what one row adds."""
    layer = keras.layers.ActivityRegularization(l2=1.0)
    layer(tf.ones((2, 1)))
    return float(layer.losses[0]) == 2.0


REPAIRS = (
    Repair(
        name="activity-sums",
        fault="an activity regularizer's loss, which is a sum over rows, is averaged over replicas",
        issue="https://github.com/keras-team/keras/issues/22018",
        probe=activity_loss_is_a_sum,
        apply=keep_activity_losses_as_sums,
        until="3.13",
    ),
)
