"""Geometric transformations of images, each by its own matrix; several are combined into one resampling."""

import math

import tensorflow as tf

from tfgpu.data.position import of_rows

STAGES = ("flip", "crop", "shift", "rotate", "zoom")


def moves(images: tf.Tensor, block, numbers, stream: int, rows: tf.Tensor | None = None) -> tuple[tf.Tensor, str]:
    """What a block of geometric stages that share one `fill` does to each image of a batch: one matrix for `warp`.

    Args:
        images: float32 [batch, height, width, channels].
        block: `(name, options)` pairs, with names from `STAGES`.
        numbers: the random numbers of the whole batch.
        stream: the first stage's stream of numbers; each stage uses one.
        rows: int64, which rows of the batch the images are; None: all.

    Returns:
        float32 [batch, 3, 3], and the fill.
    """
    size = [tf.cast(side, tf.float32) for side in tf.unstack(tf.shape(images)[1:3])]
    draws = [numbers.uniform(2, stream=stream + offset) for offset in range(len(block))]
    ones = tf.ones_like(draws[0][:, 0])
    total = matrix(ones, 1, 0, 0, 0, 1, 0)
    for draw, (name, options) in zip(draws, block, strict=True):
        total = total @ _matrix_of(name, options, ones, draw[:, 0], draw[:, 1], size)
    fills = [options["fill"] for _, options in block if "fill" in options]
    middle_y, middle_x = ((side - 1.0) / 2.0 for side in size)
    to_center = matrix(ones, 1, 0, middle_x, 0, 1, middle_y)
    total = to_center @ total @ matrix(ones, 1, 0, -middle_x, 0, 1, -middle_y)
    return of_rows(total, rows), fills[0] if fills else "nearest"


def warp(images: tf.Tensor, matrices: tf.Tensor, fill: str, interpolation: str = "BILINEAR") -> tf.Tensor:
    """Resamples each image by its own matrix.

    Args:
        images: float32 [batch, height, width, channels].
        matrices: float32 [batch, 3, 3]; each maps an output pixel (x, y, 1) to the input pixel that it shows, counted
            from the corner (see `moves`).
        fill: how to fill beyond the border: `constant` (0), `reflect` or `nearest`.
        interpolation: `BILINEAR` or `NEAREST`.

    Returns:
        The same dtype and shape.
    """
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.reshape(matrices, [-1, 9])[:, :8],
        output_shape=tf.shape(images)[1:3],
        fill_value=0.0,
        interpolation=interpolation,
        fill_mode=fill.upper(),
    )


def matrix(ones, a, b, c, d, e, f) -> tf.Tensor:
    """Stacks [batch, 3, 3] matrices whose first two rows are (a, b, c) and (d, e, f), numbers or [batch]."""
    values = [tf.cast(v, tf.float32) * ones for v in (a, b, c, d, e, f, 0, 0, 1)]
    return tf.reshape(tf.stack(values, axis=-1), [-1, 3, 3])


def boxes(size: tuple[int, int], center: tf.Tensor, lengths) -> tf.Tensor:
    """Marks one box in each image of a batch, clipped to the image.

    Args:
        size: (height, width) of the images, in pixels.
        center: float32 [batch, 2] in [0, 1): the box's center, down and across.
        lengths: (height, width) of the boxes in whole pixels, numbers or float32 [batch].

    Returns:
        bool [batch, height, width], true inside.

    Example:
        >>> boxes((2, 3), tf.constant([[0.5, 0.5]]), (1, 2)).numpy().astype(int).tolist()
        [[[0, 0, 0], [1, 1, 0]]]
    """
    inside = []
    for axis, (side, length) in enumerate(zip(size, lengths, strict=True)):
        length = tf.cast(length, tf.float32) * tf.ones_like(center[:, axis])
        first = tf.floor(center[:, axis] * side) - tf.floor(length / 2.0)
        place = tf.range(side, dtype=tf.float32)[None, :] - first[:, None]
        inside.append((place >= 0.0) & (place < length[:, None]))
    return inside[0][:, :, None] & inside[1][:, None, :]


def spread(u: tf.Tensor, limit) -> tf.Tensor:
    """Maps [0, 1) to [-limit, limit)."""
    return (2.0 * u - 1.0) * limit


def _matrix_of(name: str, options: dict, ones: tf.Tensor, u: tf.Tensor, v: tf.Tensor, size) -> tf.Tensor:
    """What a stage does to each image of a batch, by its two random numbers of [0, 1)."""
    if name == "flip":
        x = tf.where(u < 0.5, -1.0, 1.0) if options["horizontal"] else ones
        y = tf.where(v < 0.5, -1.0, 1.0) if options["vertical"] else ones
        return matrix(ones, x, 0, 0, 0, y, 0)
    if name == "crop":
        steps = 2.0 * options["padding"] + 1.0
        dx, dy = (tf.floor(w * steps) - options["padding"] for w in (u, v))
        return matrix(ones, 1, 0, dx, 0, 1, dy)
    if name == "shift":
        height, width = (options["fraction"] * side for side in size)
        return matrix(ones, 1, 0, spread(u, width), 0, 1, spread(v, height))
    if name == "rotate":
        angle = spread(u, math.radians(options["degrees"]))
        cos, sin = tf.cos(angle), tf.sin(angle)
        return matrix(ones, cos, -sin, 0, sin, cos, 0)
    inverse = 1.0 / (1.0 + spread(u, options["fraction"]))
    return matrix(ones, inverse, 0, 0, 0, inverse, 0)
