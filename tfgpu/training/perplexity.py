"""Perplexity, the metric of language models."""

import keras


@keras.saving.register_keras_serializable(package="tfgpu")
class Perplexity(keras.metrics.Mean):
    """The exponential of the mean cross-entropy per token: the effective number of tokens the model chooses between.

    The mean is over all tokens of an epoch, however they are batched; it is not a mean of perplexities. Exclude padding
    with a `sample_weight` of 0 (as a weighted metric).

    Args:
        from_logits: the model's outputs are logits, as the builders' are. Default True.
        name: in the logs.
        dtype: of the sums.

    Example:
        >>> metric = Perplexity()
        >>> metric.update_state(keras.ops.array([[0, 3]]), keras.ops.zeros((1, 2, 4)))
        >>> round(float(metric.result()), 4)
        4.0
    """

    def __init__(self, from_logits: bool = True, name: str = "perplexity", dtype=None):
        super().__init__(name=name, dtype=dtype)
        self._from_logits = from_logits
        self._direction = "down"  # for callbacks that monitor it

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Adds the tokens of a batch.

        Args:
            y_true: whole numbers [...], the tokens.
            y_pred: [..., tokens], logits or probabilities.
            sample_weight: [...], or broadcastable to it.
        """
        y_pred = keras.ops.cast(y_pred, self.dtype)
        y_true = keras.ops.convert_to_tensor(y_true)
        values = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=self._from_logits)
        if sample_weight is not None:
            sample_weight = keras.ops.broadcast_to(keras.ops.cast(sample_weight, self.dtype), keras.ops.shape(values))
            sample_weight = keras.ops.reshape(sample_weight, [-1])
        super().update_state(keras.ops.reshape(values, [-1]), sample_weight)

    def result(self):
        """The perplexity so far."""
        return keras.ops.exp(super().result())

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype, "from_logits": self._from_logits}
