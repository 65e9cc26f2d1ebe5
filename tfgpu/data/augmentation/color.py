"""Changes the values of images, not their positions: every function takes a batch and one strength per image.

`factor` blends the image with a version without brightness (black), contrast (its mean), saturation (its gray) or
sharpness (its blur): 0 gives that version, 1 the image, 2 extrapolates. Keras's layers for these either draw once per
batch or use the histogram of the whole batch, so an image would depend on its neighbors; here each depends only on
itself.
"""

import tensorflow as tf

_GRAY = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma
_FEW_CHANNELS = 3


def brighten(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Scales the values.

    Args:
        images: float32 [batch, height, width, channels].
        factor: float32 [batch].
    """
    return images * _each(factor)


def contrast(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Scales the distance to the image's mean, per channel."""
    return _blend(_means(images), images, factor)


def saturate(images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    """Scales the distance to the image's gray; images without three channels stay unchanged."""
    if images.shape[-1] != 3:
        return images
    return _blend(tf.reduce_sum(images * tf.constant(_GRAY), axis=-1, keepdims=True), images, factor)


def turn_hue(images: tf.Tensor, turns: tf.Tensor) -> tf.Tensor:
    """Rotates the hue by `turns` [batch], where 1 is a full circle; clips to [0, 1] first."""
    hue, saturation, value = tf.unstack(tf.image.rgb_to_hsv(tf.clip_by_value(images, 0.0, 1.0)), axis=-1)
    hue = tf.math.floormod(hue + turns[:, None, None], 1.0)
    return tf.image.hsv_to_rgb(tf.stack([hue, saturation, value], axis=-1))


def _means(images: tf.Tensor) -> tf.Tensor:
    """Each image's mean by channel, [batch, 1, 1, channels], the same to the bit whatever else is in the batch.

    TensorFlow sums in another order where one image is alone, and where it takes several channels at a time.
    """
    one_more = tf.cond(tf.shape(images)[0] == 1, lambda: tf.concat([images, images], 0), lambda: images)
    if images.shape[-1] <= _FEW_CHANNELS:
        means = tf.reduce_mean(one_more, axis=[1, 2], keepdims=True)
    else:
        means = tf.reduce_mean(tf.transpose(one_more, [0, 3, 1, 2]), axis=[2, 3])[:, None, None, :]
    return means[: tf.shape(images)[0]]


def _blend(without: tf.Tensor, images: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
    return without + (images - without) * _each(factor)


def _each(values: tf.Tensor) -> tf.Tensor:
    return values[:, None, None, None]
