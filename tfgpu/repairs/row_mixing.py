"""Losses, metrics and layers that look at several rows of a batch."""

import keras
import tensorflow as tf

from tfgpu.core import nested_graphs
from tfgpu.core.row_mixing import (
    all_rows,
    coupled_losses,
    own_layers,
    own_metrics,
    ragged_rows,
    reduced_outputs,
    whole_batch,
)
from tfgpu.core.row_mixing.trials import run_trial, step_recorder
from tfgpu.repairs import Repair, probes, probing


@probes("Dice, Tversky and Circle mix the rows of one replica only")
def dice_differs() -> bool:
    """Whether a loss that mixes rows is computed on each replica separately."""
    return probing.differs(rows=2, loss="dice")


@probes("a hand-written loss or metric that is not a mean over rows sees one replica's rows")
def own_dice_differs() -> bool:
    """Whether a custom loss that is not a mean over rows is computed on each replica separately."""
    return probing.differs(rows=2, loss=lambda y, p: 1 - tf.reduce_sum(y * p) / tf.reduce_sum(y + p))


def show_whole_batch() -> None:
    """Steps of the user's own are tried, and see the whole batch if they mix rows."""
    step_recorder.isolate_trials()
    run_trial.try_functions_of_run()
    reduced_outputs.warn_of_means()
    nested_graphs.vectorize_apart()
    whole_batch.show_whole_batch()


@probes("a train_step that mixes rows, or works on gradients, sees one replica's")
def own_step_differs() -> bool:
    """Whether a step of the user's own, whose loss is no mean over rows, learns other weights on two replicas."""

    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, inputs):
            return self.dense(inputs)

        def compute_loss(self, x=None, y=None, y_pred=None, *args, **kwargs):
            return keras.ops.sum(keras.ops.square(y - y_pred)) / (1.0 + keras.ops.sum(keras.ops.square(y)))

    return probing.differs(rows=2, model_class=Model)


@probes("a hand-written layer that looks at several rows sees one replica's rows")
def own_layer_differs() -> bool:
    """Whether a layer that looks at several rows is computed on each replica alone."""

    class Centered(keras.layers.Layer):
        def call(self, x):
            return x - tf.reduce_mean(x, 0)

    return probing.differs(rows=2, layer=Centered)


@probes("a hand-written metric whose state is no sum over rows is summed over replicas")
def own_metric_differs() -> bool:
    """Whether a metric that keeps a maximum is the sum of the replicas' maxima."""

    class Most(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.most = self.add_variable((), "zeros")

        def update_state(self, y_true, y_pred, sample_weight=None):
            self.most.assign(keras.ops.maximum(self.most, keras.ops.max(y_true)))

        def result(self):
            return self.most + 0.0

    strategy = probing.mirrored()
    with strategy.scope():
        metric = Most()
    strategy.run(lambda: metric.update_state(tf.ones(1), tf.ones(1)))
    return float(metric.result()) != 1.0


@probes("ragged rows become dense with each replica's longest row, in TextVectorization too")
def own_padding_differs() -> bool:
    """Whether a replica pads ragged rows to its own longest row."""
    strategy, lengths = probing.mirrored(), iter((1, 2))
    distribute = strategy.experimental_distribute_values_from_function
    rows = distribute(lambda context: tf.ragged.constant([[1] * next(lengths)]))
    widths = strategy.run(lambda rows: tf.shape(rows.to_tensor())[1], args=(rows,))
    return [int(each) for each in strategy.experimental_local_results(widths)] != [2, 2]


REPAIRS = (
    Repair("coupled-losses", dice_differs, coupled_losses.mix_rows_of_all_replicas),
    Repair("own-losses", own_dice_differs, all_rows.give_own_losses_all_rows),
    Repair("whole-batches", own_step_differs, show_whole_batch),
    Repair("own-layers", own_layer_differs, own_layers.give_own_layers_all_rows),
    Repair("own-metrics", own_metric_differs, own_metrics.give_own_metrics_all_rows),
    Repair("ragged-padding", own_padding_differs, ragged_rows.pad_to_longest_row),
)
