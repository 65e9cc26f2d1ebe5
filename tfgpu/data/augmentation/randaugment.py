"""RandAugment: a few operations of one strength, drawn for each image from fourteen.

Source: E. D. Cubuk, B. Zoph, J. Shlens and Q. V. Le, "RandAugment: practical automated data augmentation with a
reduced search space", 2019, arXiv:1909.13719. The magnitude ranges from 0 to 30; at 30 an image is rotated by 30
degrees, sheared by 0.3, translated by 45% of its side, or blended with factors of 0.1 or 1.9.
"""

import math

import tensorflow as tf

from tfgpu.data.augmentation import color, geometry
from tfgpu.data.augmentation.rows import of_rows

_GREATEST = 30.0
_MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")
CHANGES = (
    *("identity", "autocontrast", "equalize", "solarize", "posterize"),
    *("saturation", "contrast", "brightness", "sharpness"),
    *_MOVES,
)


def apply(images: tf.Tensor, options: dict, numbers, stream: int, rows: tf.Tensor | None = None) -> tf.Tensor:
    """Changes each image of a batch `num_ops` times.

    Args:
        images: float32 [batch, height, width, channels] in [0, 1]; some operations clip values outside.
        options: `num_ops`, `magnitude` and `fill`, as returned by `stages.parse_stages`.
        numbers: the random numbers of the whole batch.
        stream: which stream of them to use.
        rows: int64, which rows of the batch the images are; None: all.

    Returns:
        float32, the same shape, in [0, 1].
    """
    count = int(options["num_ops"])
    draw = numbers.uniform(2 * count, stream=stream)
    strength = options["magnitude"] / _GREATEST
    for i in range(count):
        choice = tf.cast(tf.floor(draw[:, 2 * i] * len(CHANGES)), tf.int32)
        sign = tf.where(draw[:, 2 * i + 1] < 0.5, -1.0, 1.0)
        moves = of_rows(_moves(choice, sign, strength, tf.shape(images), images.shape[1:3]), rows)
        images = _change(images, of_rows(choice, rows), of_rows(sign, rows), strength, moves, options["fill"])
    return images


_FIRST_MOVE = len(CHANGES) - len(_MOVES)


def _change(images, choice, sign, strength, moves, fill):
    """Runs each operation only on the images that drew it: one operation per image, not fourteen."""
    kind = tf.minimum(choice, _FIRST_MOVE)  # all moves are one resampling
    places, parts = [], []
    for number, name in enumerate((*CHANGES[:_FIRST_MOVE], "move")):
        chosen = tf.where(kind == number)[:, 0]
        part, signs = tf.gather(images, chosen), tf.gather(sign, chosen)
        if name == "move":
            part = geometry.warp(part, tf.gather(moves, chosen), fill)
        else:
            part = tf.clip_by_value(_recolor(name, part, 1.0 + 0.9 * strength * signs, strength), 0.0, 1.0)
        places.append(tf.cast(chosen, tf.int32))
        parts.append(part)
    return tf.ensure_shape(tf.dynamic_stitch(places, parts), images.shape)


def _recolor(name, images, factor, strength):
    if name == "autocontrast":
        return color.stretch(images)
    if name == "equalize":
        return color.equalize(images)
    if name == "solarize":
        return color.solarize(images, 1.0 - strength)
    if name == "posterize":
        return color.posterize(images, 8 - round(4 * strength))
    blends = {
        "saturation": color.saturate,
        "contrast": color.contrast,
        "brightness": color.brighten,
        "sharpness": color.sharpen,
    }
    return blends[name](images, factor) if name in blends else images


def _moves(choice, sign, strength: float, shape, size) -> tf.Tensor:
    """The matrix [batch, 3, 3] of each image that drew a move; 0 for the others. The sign is the direction."""
    chosen = tf.where(choice >= _FIRST_MOVE)
    which, signed = tf.gather_nd(choice, chosen) - _FIRST_MOVE, tf.gather_nd(sign, chosen) * strength
    matrices = geometry.centered(_matrices(which, signed, size), shape)
    return tf.scatter_nd(chosen, matrices, tf.concat([tf.shape(choice, tf.int64), [3, 3]], 0))


def _matrices(which, strength, size):
    height, width = size

    def amount(name, greatest):
        return tf.where(which == _MOVES.index(name), strength * greatest, 0.0)

    ones = tf.ones_like(strength)
    turn = geometry.turned(ones, amount("rotate", math.radians(30.0)))
    across, down = amount("translate_x", 0.45 * width), amount("translate_y", 0.45 * height)
    rest = geometry.matrix(ones, 1, amount("shear_x", 0.3), across, amount("shear_y", 0.3), 1, down)
    return turn @ rest
