"""Some rows of a batch, changed as they are in the whole batch, to the bit.

Random numbers, and what is computed from them, are small: they are made for the whole batch, and the rows are taken
from them. Making them for the rows alone would change bits: how TensorFlow rounds a sine or a product depends on its
place in the tensor. Only images are made for the rows alone.
"""

import tensorflow as tf


def of_rows(values: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """The rows of a tensor of the whole batch; all if `rows` is None."""
    return values if rows is None else tf.gather(values, rows)
