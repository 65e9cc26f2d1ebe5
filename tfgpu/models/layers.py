"""Two layers that Keras lacks: a learned token at the start of a sequence, and learned positions."""

import keras


@keras.saving.register_keras_serializable(package="tfgpu")
class ClassToken(keras.layers.Layer):
    """Prepends one learned vector to a sequence; after the last block it represents the whole sequence.

    Source: Dosovitskiy et al., 2020, "An Image is Worth 16x16 Words", after BERT's [CLS].

    Example:
        >>> ClassToken()(keras.ops.ones((2, 4, 8))).shape
        TensorShape([2, 5, 8])
    """

    def build(self, input_shape):
        self.token = self.add_weight(shape=(1, 1, input_shape[-1]), initializer="zeros", name="token")

    def call(self, inputs):
        shape = (keras.ops.shape(inputs)[0], 1, inputs.shape[-1])
        token = keras.ops.broadcast_to(keras.ops.cast(self.token, inputs.dtype), shape)
        return keras.ops.concatenate([token, inputs], axis=1)

    def compute_output_shape(self, input_shape):
        batch, length, width = input_shape
        return batch, length + 1, width


@keras.saving.register_keras_serializable(package="tfgpu")
class PositionEmbedding(keras.layers.Layer):
    """Adds one learned vector to each position of a fixed-length sequence.

    Args:
        stddev: standard deviation of the truncated normal initializer. Default: 0.02, as in BERT and ViT.

    Example:
        >>> PositionEmbedding()(keras.ops.ones((2, 4, 8))).shape
        TensorShape([2, 4, 8])
    """

    def __init__(self, stddev: float = 0.02, **kwargs):
        super().__init__(**kwargs)
        self.stddev = stddev

    def build(self, input_shape):
        self.positions = self.add_weight(
            shape=tuple(input_shape[1:]),
            initializer=keras.initializers.TruncatedNormal(stddev=self.stddev),
            name="positions",
        )

    def call(self, inputs, start_index=0):
        """Adds the positions from `start_index` on, where the inputs are a part of the sequence."""
        positions = self.positions[start_index : start_index + inputs.shape[1]]
        return inputs + keras.ops.cast(positions, inputs.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "stddev": self.stddev}
