"""Boxes and masks that move with their images in geometric stages.

They have Keras's names, in a dict of targets:

    {"bounding_boxes": {"boxes": ..., "labels": ...}, "segmentation_masks": ..., "labels": ...}

| name | what it is |
|---|---|
| `boxes` of `bounding_boxes` | float [batch, most, 4]: left, top, right, bottom in pixels |
| `labels` of `bounding_boxes` | int [batch, most], -1 where there is no box |
| `segmentation_masks` | int [batch, height, width] or [batch, height, width, 1] |

A box becomes the smallest upright one around its moved corners, cut at the picture's border; one that has left the
picture gets the label -1. Masks take the nearest pixel. Everything else in the dict stays as it is.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfgpu.data.augmentation import geometry
from tfgpu.errors import InputError

BOXES, MASKS = "bounding_boxes", "segmentation_masks"


def check(targets: Any, shape: tuple, name: str) -> None:
    """Rejects boxes and masks that could not move with their images.

    Args:
        targets: nested arrays of all examples.
        shape: one image's shape.
        name: the source's name, for errors.

    Raises:
        InputError: other shapes or names than those above.
    """
    if not isinstance(targets, Mapping):
        return
    boxes, masks = targets.get(BOXES), targets.get(MASKS)
    if boxes is not None:
        is_dict = isinstance(boxes, Mapping) and {"boxes", "labels"} <= boxes.keys()
        if not is_dict or boxes["boxes"].ndim != 3 or boxes["boxes"].shape[-1] != 4 or boxes["labels"].ndim != 2:
            raise InputError(
                f"{name}: {BOXES!r} must be a dict of 'boxes' [n, most, 4] and 'labels' [n, most], -1 where there is "
                "no box."
            )
    if masks is not None and (masks.ndim not in (3, 4) or masks.shape[1:3] != tuple(shape[:2])):
        raise InputError(f"{name}: {MASKS!r} must have the images' size {shape[:2]}. Received: {masks.shape[1:]}.")


def follow(targets: Any, matrices: tf.Tensor, fill: str, shape: tf.Tensor) -> Any:
    """Moves the boxes and masks of a batch with its images.

    Args:
        targets: a batch's targets; anything but a dict stays as it is.
        matrices: float32 [batch, 3, 3]; each maps an output pixel (x, y, 1) to the input pixel that it shows.
        fill: what masks show beyond the border, as for the images.
        shape: of the images, [batch, height, width, channels].
    """
    if not isinstance(targets, Mapping):
        return targets
    found = dict(targets)
    if MASKS in found:
        masks, is_plane = found[MASKS], found[MASKS].shape.rank == 3
        moved = geometry.warp(masks[..., None] if is_plane else masks, matrices, fill, "NEAREST")
        found[MASKS] = tf.ensure_shape(moved[..., 0] if is_plane else moved, masks.shape)
    if BOXES in found:
        found[BOXES] = {**found[BOXES], **_moved_boxes(found[BOXES], matrices, shape)}
    return found


def _moved_boxes(given: Mapping[str, tf.Tensor], matrices: tf.Tensor, shape: tf.Tensor) -> dict[str, tf.Tensor]:
    """Boxes are edges; the matrices count pixels by their centers, half a pixel further."""
    height, width = (tf.cast(shape[axis], tf.float32) for axis in (1, 2))
    left, top, right, bottom = (given["boxes"][..., at] - 0.5 for at in range(4))
    (a, b, c), (d, e, f) = ([matrices[:, row, column, None] for column in range(3)] for row in range(2))
    whole = a * e - b * d
    corners = []
    for x, y in ((left, top), (right, top), (left, bottom), (right, bottom)):
        corners.append(((e * (x - c) - b * (y - f)) / whole + 0.5, (a * (y - f) - d * (x - c)) / whole + 0.5))
    xs, ys = (tf.stack(each) for each in zip(*corners, strict=True))
    edges = [tf.reduce_min(xs, 0), tf.reduce_min(ys, 0), tf.reduce_max(xs, 0), tf.reduce_max(ys, 0)]
    limits = (width, height, width, height)
    edges = [tf.clip_by_value(edge, 0.0, limit) for edge, limit in zip(edges, limits, strict=True)]
    is_seen = (edges[2] > edges[0]) & (edges[3] > edges[1]) & (given["labels"] >= 0)
    return {
        "boxes": tf.where(is_seen[..., None], tf.stack(edges, -1), 0.0),
        "labels": tf.where(is_seen, given["labels"], tf.cast(-1, given["labels"].dtype)),
    }
