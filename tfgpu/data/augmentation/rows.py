"""Some rows of a batch, changed as they are in the whole batch, to the bit.

What is drawn for each example, and what is computed of it, is small: it is made for the whole batch, and the rows are
taken from it. Less would not do, because TensorFlow rounds the last bit of a sine or a product by the place in a
tensor. Only images are made for the rows alone.
"""

import tensorflow as tf


def of_rows(values: tf.Tensor, rows: tf.Tensor | None) -> tf.Tensor:
    """The rows of a tensor of the whole batch; all if `rows` is None."""
    return values if rows is None else tf.gather(values, rows)
