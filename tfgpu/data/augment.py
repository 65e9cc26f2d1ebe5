"""Random changes to training images, a whole batch at a time, the same whatever the number of replicas.

Stages (options and defaults; all fractions are of the image's side):

| stage | what it does | options |
|---|---|---|
| `flip` | mirrors, each way with probability 1/2; wrong for digits | `horizontal=True, vertical=False` |
| `crop` | moves by whole pixels as padding and cropping back does | `padding=4, fill="constant"` |
| `shift` | moves by a part of a pixel too | `fraction=0.1, fill="constant"` |
| `rotate` | turns about the centre | `degrees=10, fill="constant"` |
| `zoom` | scales by 1 - fraction to 1 + fraction | `fraction=0.1, fill="constant"` |
| `contrast` | scales the distance to the image's mean by 1 - fraction to 1 + fraction | `fraction=0.2` |
| `noise` | adds normal noise | `stddev=0.05` |
| `cutout` | blanks one square (DeVries and Taylor 2017, arXiv:1708.04552) | `fraction=0.25` |

`fill` is what comes in at the border: `constant` (0), `reflect` or `nearest`.
"""

import math

import tensorflow as tf

from tfgpu.data.position import Numbers

_GEOMETRIC = ("flip", "crop", "shift", "rotate", "zoom")


def automatic(name: str, shape: tuple[int, ...]) -> tuple:
    """Chooses stages for a data set: what is safe without knowing what the images show.

    Args:
        name: the data set's name, such as `"digits"`.
        shape: one example's shape.

    Returns:
        Stages for `pipeline(augment=...)`. Never a flip: a mirrored digit is another sign. Nothing for
        examples that are not images.

    Example:
        >>> [stage for stage, options in automatic("digits", (8, 8, 1))]
        ['shift', 'rotate', 'zoom']
    """
    if len(shape) != 3:
        return ()
    if name == "digits":
        return (("shift", {"fraction": 0.1}), ("rotate", {"degrees": 10}), ("zoom", {"fraction": 0.1}))
    return (("shift", {"fraction": 0.05, "fill": "reflect"}), ("zoom", {"fraction": 0.05, "fill": "reflect"}))


def apply(images: tf.Tensor, stages: tuple[tuple[str, dict], ...], numbers: Numbers) -> tf.Tensor:
    """Runs the stages on a batch of images.

    Neighbouring geometric stages with one `fill` become a single transformation, so the image is resampled
    once.

    Args:
        images: float32 [batch, height, width, channels].
        stages: complete `(name, options)` pairs, as `names.parse_stages` returns them.
        numbers: the random numbers of these examples.

    Returns:
        float32, the same shape.

    Example:
        >>> from tfgpu.data.names import parse_stages
        >>> zero = tf.constant(0, tf.int64)
        >>> numbers = Numbers(seed=0, epoch=zero, start=zero, count=2)
        >>> apply(tf.ones([2, 8, 8, 1]), parse_stages(["flip"]), numbers).shape
        TensorShape([2, 8, 8, 1])
    """
    stream, shape = 0, images.shape
    for block in _blocks(stages):
        if block[0][0] in _GEOMETRIC:
            images = _transform(images, block, numbers, stream)
        else:
            name, options = block[0]
            images = _PIXEL_STAGES[name](images, options, numbers, stream)
        images = tf.ensure_shape(images, shape)
        stream += len(block)
    return images


def _blocks(stages):
    """Groups neighbouring geometric stages that fill the border alike; every other stage is alone."""
    blocks: list[list] = []
    for stage in stages:
        joins = blocks and all(_joinable(other, stage) for other in blocks[-1])
        if joins:
            blocks[-1].append(stage)
        else:
            blocks.append([stage])
    return blocks


def _joinable(one, other) -> bool:
    if one[0] not in _GEOMETRIC or other[0] not in _GEOMETRIC:
        return False
    return "flip" in (one[0], other[0]) or one[1]["fill"] == other[1]["fill"]


def _transform(images, block, numbers, stream):
    shape = tf.shape(images)
    height, width = tf.cast(shape[1], tf.float32), tf.cast(shape[2], tf.float32)
    ones = tf.ones([shape[0]])
    middle_x, middle_y = (width - 1.0) / 2.0, (height - 1.0) / 2.0
    total = _matrix(ones, 1, 0, middle_x, 0, 1, middle_y)
    for offset, (name, options) in enumerate(block):
        draw = numbers.uniform(2, stream=stream + offset)
        total = total @ _MATRICES[name](ones, draw[:, 0], draw[:, 1], (height, width), options)
    total = total @ _matrix(ones, 1, 0, -middle_x, 0, 1, -middle_y)
    fills = [options["fill"] for _, options in block if "fill" in options]
    return tf.raw_ops.ImageProjectiveTransformV3(
        images=images,
        transforms=tf.reshape(total, [-1, 9])[:, :8],
        output_shape=shape[1:3],
        fill_value=0.0,
        interpolation="BILINEAR",
        fill_mode=(fills[0] if fills else "nearest").upper(),
    )


def _matrix(ones, a, b, c, d, e, f):
    """Stacks [batch, 3, 3] matrices that take an output pixel (x, y, 1) to the input pixel it shows."""
    values = [tf.cast(v, tf.float32) * ones for v in (a, b, c, d, e, f, 0, 0, 1)]
    return tf.reshape(tf.stack(values, axis=-1), [-1, 3, 3])


def _spread(u, limit):
    """Takes [0, 1) to [-limit, limit)."""
    return (2.0 * u - 1.0) * limit


def _flip_matrix(ones, u, v, size, options):
    x = tf.where(u < 0.5, -1.0, 1.0) if options["horizontal"] else ones
    y = tf.where(v < 0.5, -1.0, 1.0) if options["vertical"] else ones
    return _matrix(ones, x, 0, 0, 0, y, 0)


def _crop_matrix(ones, u, v, size, options):
    steps = 2.0 * options["padding"] + 1.0
    dx, dy = (tf.floor(w * steps) - options["padding"] for w in (u, v))
    return _matrix(ones, 1, 0, dx, 0, 1, dy)


def _shift_matrix(ones, u, v, size, options):
    height, width = size
    return _matrix(ones, 1, 0, _spread(u, options["fraction"] * width), 0, 1, _spread(v, options["fraction"] * height))


def _rotate_matrix(ones, u, v, size, options):
    angle = _spread(u, math.radians(options["degrees"]))
    cos, sin = tf.cos(angle), tf.sin(angle)
    return _matrix(ones, cos, -sin, 0, sin, cos, 0)


def _zoom_matrix(ones, u, v, size, options):
    inverse = 1.0 / (1.0 + _spread(u, options["fraction"]))
    return _matrix(ones, inverse, 0, 0, 0, inverse, 0)


_MATRICES = {
    "flip": _flip_matrix,
    "crop": _crop_matrix,
    "shift": _shift_matrix,
    "rotate": _rotate_matrix,
    "zoom": _zoom_matrix,
}


def _contrast(images, options, numbers, stream):
    factor = 1.0 + _spread(numbers.uniform(1, stream=stream)[:, 0], options["fraction"])
    mean = tf.reduce_mean(images, axis=[1, 2], keepdims=True)
    return mean + (images - mean) * factor[:, None, None, None]


def _noise(images, options, numbers, stream):
    pixels = math.prod(images.shape[1:])
    noise = tf.reshape(numbers.normal(pixels, stream=stream), tf.shape(images))
    return images + options["stddev"] * noise


def _cutout(images, options, numbers, stream):
    height, width = images.shape[1], images.shape[2]
    centre = numbers.uniform(2, stream=stream)
    inside = []
    for axis, side in enumerate((height, width)):
        length = max(1, round(options["fraction"] * side))
        first = tf.floor(centre[:, axis] * side) - length // 2
        place = tf.range(side, dtype=tf.float32)[None, :] - first[:, None]
        inside.append((place >= 0.0) & (place < float(length)))
    blank = inside[0][:, :, None] & inside[1][:, None, :]
    return tf.where(blank[..., None], 0.0, images)


_PIXEL_STAGES = {"contrast": _contrast, "noise": _noise, "cutout": _cutout}
