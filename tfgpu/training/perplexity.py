"""The metric of a language model: perplexity."""

import keras


@keras.saving.register_keras_serializable(package="tfgpu")
class Perplexity(keras.metrics.Mean):
    """The exponential of the mean cross-entropy a token: among how many tokens the model is torn, on average.

    The mean is over all tokens of an epoch, whatever rows and batches they are in; it is not a mean of perplexities.
    Padding is left out by a `sample_weight` of 0 (as a weighted metric).

    Args:
        from_logits: the model gives logits, as the builders do. Default True.
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
        self._direction = "down"  # for callbacks that watch it

    def update_state(self, y_true, y_pred, sample_weight=None):
        """Takes in the tokens of a batch.

        Args:
            y_true: whole numbers [...], the tokens.
            y_pred: [..., tokens], logits or shares.
            sample_weight: [...] or what broadcasts to it.
        """
        y_pred = keras.ops.cast(y_pred, self.dtype)
        values = keras.losses.sparse_categorical_crossentropy(
            keras.ops.convert_to_tensor(y_true), y_pred, from_logits=self._from_logits
        )
        if sample_weight is not None:
            sample_weight = keras.ops.broadcast_to(keras.ops.cast(sample_weight, self.dtype), keras.ops.shape(values))
            sample_weight = keras.ops.reshape(sample_weight, [-1])
        super().update_state(keras.ops.reshape(values, [-1]), sample_weight)

    def result(self):
        """The perplexity so far."""
        return keras.ops.exp(super().result())

    def get_config(self):
        return {"name": self.name, "dtype": self.dtype, "from_logits": self._from_logits}
