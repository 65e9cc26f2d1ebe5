"""Random changes to training images, applied per batch and independent of the number of replicas.

Stages (options and defaults; fractions are of the image's side unless stated otherwise):

| stage | effect | options |
|---|---|---|
| `flip` | mirrors in each direction with probability 1/2; wrong for digits | `horizontal=True, vertical=False` |
| `crop` | shifts by whole pixels, like padding and cropping | `padding=4, fill="constant"` |
| `shift` | shifts by fractions of pixels too | `fraction=0.1, fill="constant"` |
| `rotate` | rotates about the center | `degrees=10, fill="constant"` |
| `zoom` | scales by 1 - fraction to 1 + fraction | `fraction=0.1, fill="constant"` |
| `brightness` | scales the values by 1 - fraction to 1 + fraction | `fraction=0.2` |
| `contrast` | scales the distance to the image's mean likewise | `fraction=0.2` |
| `saturation` | scales the distance to the image's gray likewise; three channels | `fraction=0.2` |
| `hue` | rotates the hue by up to this fraction of the color circle; three channels | `fraction=0.05` |
| `noise` | adds Gaussian noise | `stddev=0.05` |
| `cutout` | blanks one square (DeVries and Taylor 2017, arXiv:1708.04552) | `fraction=0.25` |
| `mixup` | blends two examples and their labels (see `mixing.py`) | `alpha=0.2, probability=1` |
| `cutmix` | pastes a box of another example, with its share of the label | `alpha=1, probability=1` |

`fill` determines the pixels beyond the border: `constant` (0), `reflect` or `nearest`. Values may leave [0, 1]; `hue`
clips them. Every random number depends on (seed, epoch, position in the epoch).
"""

import math

import tensorflow as tf

from tfgpu.data.augmentation import geometry, mixing, targets
from tfgpu.data.augmentation.stages import COLOR, MIXING
from tfgpu.data.position import Numbers, of_rows
from tfgpu.errors import InputError

_GRAY = (0.299, 0.587, 0.114)  # ITU-R BT.601 luma
_FEW_CHANNELS = 3


def automatic(name: str, shape: tuple[int, ...]) -> tuple:
    """Chooses stages for a dataset that are safe without knowing what the images show.

    Args:
        name: the dataset's name, such as `"digits"`.
        shape: one example's shape.

    Returns:
        Stages for `load(augment=...)`. Never a flip: a mirrored digit is another symbol. Nothing for examples that
        are not images.

    Example:
        >>> [stage for stage, options in automatic("digits", (8, 8, 1))]
        ['shift', 'rotate', 'zoom']
    """
    if len(shape) != 3:
        return ()
    if name == "digits":
        return (("shift", {"fraction": 0.1}), ("rotate", {"degrees": 10}), ("zoom", {"fraction": 0.1}))
    return (("shift", {"fraction": 0.05, "fill": "reflect"}), ("zoom", {"fraction": 0.05, "fill": "reflect"}))


def check(stages: tuple[tuple[str, dict], ...], *, name: str, shape: tuple, labels_rank: int) -> None:
    """Rejects stages that do not suit the examples.

    Args:
        stages: complete `(name, options)` pairs.
        name: the dataset's name, for errors.
        shape: one example's shape.
        labels_rank: 1 for one class per example.

    Raises:
        InputError: the examples are not images of one size, lack color channels, or have no single class to mix.
    """
    if not stages:
        return
    if len(shape) != 3 or None in shape:
        raise InputError(
            f"Augmentation needs images of one size. Received: examples of shape {shape} in {name}. Remove `augment`."
        )
    for stage, _ in stages:
        if stage in COLOR and shape[-1] != 3:
            raise InputError(
                f"Augmentation {stage!r} needs images with three channels. Received: examples of shape {shape} in "
                f"{name}. Remove it."
            )
        if stage in MIXING and labels_rank != 1:
            raise InputError(
                f"Augmentation {stage!r} needs one class label per example. Received: labels of rank {labels_rank} in "
                f"{name}. Remove it."
            )


def apply(
    images: tf.Tensor,
    labels: tf.Tensor,
    stages: tuple[tuple[str, dict], ...],
    numbers: Numbers,
    rows: tf.Tensor | None = None,
):
    """Runs the stages on a batch, or on some of its rows, with the same result to the bit.

    Adjacent geometric stages with one `fill` become a single transformation, so the image is resampled once.

    Args:
        images: float32 [batch, height, width, channels]; with `rows` those of `needed(stages, numbers, rows)`.
        labels: [batch], or float32 [batch, classes] if a stage mixes examples; only such stages change them. Or a dict
            of targets, in which boxes and masks move with the images (see `targets`). Of the same rows as the images.
        stages: complete `(name, options)` pairs, as returned by `stages.parse_stages`.
        numbers: the random numbers of the whole batch.
        rows: int64, the rows of the batch to make, in any order; None: all.

    Returns:
        Images and labels of the rows; only the first dimension of their shapes may differ.

    Example:
        >>> from tfgpu.data.augmentation.stages import parse_stages
        >>> zero = tf.constant(0, tf.int64)
        >>> numbers = Numbers(seed=0, epoch=zero, start=zero, count=2)
        >>> images, labels = apply(tf.ones([2, 8, 8, 1]), tf.constant([3, 7]), parse_stages(["flip"]), numbers)
        >>> images.shape, labels.numpy().tolist()
        (TensorShape([2, 8, 8, 1]), [3, 7])
    """
    held = _held(stages, numbers, rows)  # before each stage that mixes, and in the end
    stream, shape, have = 0, images.shape, held.pop(0)
    for block in _blocks(stages):
        name, options = block[0]
        if name in geometry.STAGES:
            matrices, fill = geometry.moves(images, block, numbers, stream, have)
            labels = targets.follow(labels, matrices, fill, tf.shape(images))
            images = geometry.warp(images, matrices, fill)
        elif name in MIXING:
            wanted = held.pop(0)
            moved = None if rows is None else (have, wanted)
            images, labels = mixing.apply(name, images, labels, options, numbers, stream, moved)
            shape, have = shape if rows is None else [None, *shape[1:]], wanted
        else:
            images = _changed(name, images, options, numbers, stream, have)
        images = tf.ensure_shape(images, shape)
        stream += len(block)
    return images, labels


def needed(stages: tuple[tuple[str, dict], ...], numbers: Numbers, rows: tf.Tensor) -> tf.Tensor:
    """The rows of a batch that `apply` needs to make `rows`: with stages that mix, their partners too.

    Args:
        stages, numbers, rows: as for `apply`.

    Returns:
        int64; `rows` itself if no stage mixes examples, else increasing and each once.
    """
    return _held(stages, numbers, rows)[0]


def _held(stages, numbers: Numbers, rows: tf.Tensor | None) -> list:
    """Which rows are needed before each stage that mixes examples, from the first to the last, and after it."""
    streams = [stream for stream, (name, _) in enumerate(stages) if name in MIXING]
    found = [rows]
    for stream in reversed(streams):
        found.insert(0, None if rows is None else mixing.with_partners(found[0], numbers, stream))
    return found


def _blocks(stages):
    """Groups adjacent geometric stages with the same fill; every other stage is alone."""
    blocks: list[list] = []
    for stage in stages:
        fill = stage[1].get("fill")  # a flip has none
        fits = stage[0] in geometry.STAGES and blocks and blocks[-1][0][0] in geometry.STAGES
        if fits and (fill is None or {other.get("fill", fill) for _, other in blocks[-1]} == {fill}):
            blocks[-1].append(stage)
        else:
            blocks.append([stage])
    return blocks


def _changed(name: str, images: tf.Tensor, options: dict, numbers: Numbers, stream: int, rows) -> tf.Tensor:
    """Changes the values of images, each by itself.

    A factor blends the image with a version without brightness (black), contrast (its mean) or saturation (its gray): 0
    gives that version, 1 the image, 2 extrapolates. Keras's layers for these either draw once per batch or use the
    histogram of the whole batch, so an image would depend on its neighbors.
    """
    if name == "noise":
        pixels = math.prod(images.shape[1:])
        noise = (numbers if rows is None else numbers.at(rows)).normal(pixels, stream=stream)  # as large as the images
        return images + options["stddev"] * tf.reshape(noise, tf.shape(images))
    if name == "cutout":
        height, width = images.shape[1:3]
        lengths = [max(1, round(options["fraction"] * side)) for side in (height, width)]
        blank = geometry.boxes((height, width), of_rows(numbers.uniform(2, stream=stream), rows), lengths)
        return tf.where(blank[..., None], 0.0, images)
    factor = of_rows(1.0 + geometry.spread(numbers.uniform(1, stream=stream)[:, 0], options["fraction"]), rows)
    if name == "hue":  # 1 is a full circle
        hue, saturation, value = tf.unstack(tf.image.rgb_to_hsv(tf.clip_by_value(images, 0.0, 1.0)), axis=-1)
        hue = tf.math.floormod(hue + (factor - 1.0)[:, None, None], 1.0)
        return tf.image.hsv_to_rgb(tf.stack([hue, saturation, value], axis=-1))
    factor = factor[:, None, None, None]
    if name == "brightness":
        return images * factor
    gray = tf.constant(_GRAY)
    without = _means(images) if name == "contrast" else tf.reduce_sum(images * gray, axis=-1, keepdims=True)
    return without + (images - without) * factor


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
