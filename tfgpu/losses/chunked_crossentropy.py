"""`losses.ChunkedCrossentropy`: the cross-entropy over a large vocabulary, without the logits of all tokens."""

import keras
import tensorflow as tf

from tfgpu.compat import keras as keras_private
from tfgpu.core import logits, step_context
from tfgpu.core.row_mixing.choices import by_rows
from tfgpu.errors import InputError, whole_number
from tfgpu.losses import heads, row_chunks


@by_rows
@keras.saving.register_keras_serializable(package="tfgpu")
class ChunkedCrossentropy(keras.losses.Loss):
    """The cross-entropy between labels and logits, computed by chunks of tokens.

    Replaces `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`, and gives the same values. The model stays
    as it is; its last layer is a `Dense` without activation, or a `ReversibleEmbedding` (Keras's or KerasHub's) that is
    called with `reverse=True`. `fit` and `evaluate` never hold the logits of all tokens, [batch, length, vocabulary]:
    they compute those of one chunk of tokens, take the losses and drop them; the backward pass computes them again.
    Accuracy (`"accuracy"`), `keras.metrics.SparseCategoricalCrossentropy(from_logits=True)` and
    `tfgpu.training.perplexity.Perplexity` of the same outputs are computed in the same pass. Other metrics, `predict`
    and eager steps (`run_eagerly=True`) compute all logits.

    Args:
        chunk: tokens in a chunk; None takes as many as give 64 MiB of logits, and at least 256.
        label_smoothing: the share of each label that is spread evenly over all classes, from 0 to 1.
        ignore_class: a label whose tokens do not count, such as -1; None counts all.
        reduction, name, dtype: as for Keras's losses. `dtype` is that of the softmax, float32 in mixed precision, too.

    Raises:
        InputError: a setting is out of range; or, in a step, the outputs do not come straight from such a layer.

    Example:
        >>> tokens = keras.Input((8,), dtype="int32")
        >>> x = keras.layers.Embedding(50, 4)(tokens)
        >>> model = keras.Model(tokens, keras.layers.Dense(50)(x))
        >>> model.compile("adam", ChunkedCrossentropy(), metrics=["accuracy"])
        >>> text = tf.ones([2, 8], tf.int32)
        >>> logs = model.fit(text, text, verbose=0)

    Sources: Hsu et al., "Liger Kernel", 2024 (https://arxiv.org/abs/2410.10989); Wijmans et al., "Cut Your Losses in
    Large-Vocabulary Language Models", 2024 (https://arxiv.org/abs/2411.09009).
    """

    def __init__(
        self,
        chunk: int | None = None,
        *,
        label_smoothing: float = 0.0,
        ignore_class: int | None = None,
        reduction: str = "sum_over_batch_size",
        name: str = "chunked_crossentropy",
        dtype=None,
    ):
        super().__init__(name=name, reduction=reduction, dtype=dtype)
        if chunk is not None:
            whole_number("chunk", chunk)
        if not 0 <= label_smoothing <= 1:
            raise InputError(f"`label_smoothing` must be from 0 to 1. Received: {label_smoothing!r}.")
        self.chunk, self.label_smoothing, self.ignore_class = chunk, label_smoothing, ignore_class
        heads.install()
        row_chunks.give_to_metrics()

    def call(self, y_true, y_pred):
        """The loss of each token.

        Args:
            y_true: whole numbers [...] or [..., 1], the classes.
            y_pred: [..., classes], logits.
        """
        y_pred, target = tf.convert_to_tensor(y_pred), tf.cast(y_true, tf.int64)
        if target.shape.rank == y_pred.shape.rank and target.shape[-1] == 1:
            target = tf.squeeze(target, -1)
        counts = None
        if self.ignore_class is not None:
            counts = tf.not_equal(target, self.ignore_class)
            target = tf.where(counts, target, 0)
        losses = self._losses(target, y_pred)
        if counts is not None:
            losses = tf.where(counts, losses, 0)
            keras_private.set_mask(losses, counts)
        return losses

    def _losses(self, target: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        dtype, head = tf.as_dtype(self.dtype), heads.find(y_pred)
        if head is not None:
            rows = row_chunks.compute(head, target, dtype, smoothing=self.label_smoothing, size=self.chunk)
            head.rows.append(rows)
            return rows.losses
        if (found := logits.noted(y_pred, "sequence_parts")) is not None:
            losses, (parts, devices) = [], found  # positions are on several devices (`parallel.sequence`)
            for own, part, device in zip(tf.split(target, len(parts), 1), parts, devices, strict=True):
                with tf.device(device):
                    losses.append(self._of_all(own, tf.cast(part, self.dtype)))
            return tf.concat(losses, 1)
        is_eager = not hasattr(y_pred, "graph")
        if not (is_eager or keras_private.in_symbolic_scope() or step_context.current().is_trying):
            raise InputError(
                f"`{type(self).__name__}` needs logits that come straight from a Dense layer without activation, or "
                "from a ReversibleEmbedding with `reverse=True`, which it computes again by chunks. Received: "
                f"{y_pred.name}. Make such a layer the model's last one (not quantized, split, recomputed or in a "
                "pipeline), or use `keras.losses.SparseCategoricalCrossentropy(from_logits=True)`."
            )
        return self._of_all(target, y_pred)

    def _of_all(self, target: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(target, y_pred)
        if not self.label_smoothing:
            return losses
        own = tf.gather(y_pred, target, batch_dims=target.shape.rank)
        return losses + self.label_smoothing * (own - tf.reduce_mean(y_pred, -1))

    def get_config(self):
        own = {name: getattr(self, name) for name in ("chunk", "label_smoothing", "ignore_class")}
        return {**own, **super().get_config()}
