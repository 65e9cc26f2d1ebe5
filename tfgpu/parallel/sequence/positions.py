"""Tensors of a part of the sequence: which have an axis of positions, how they are cut and joined.

Positions are on axis 1. A tensor that all ranks have alike (a pooled vector, a mask without positions) is marked, since
its size could be that of a part by chance.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.keras import get_mask, set_mask, tree
from tfgpu.core.randomness.row_draws import DrawShard, RowDraw


def is_part(value: object, length: int) -> bool:
    """Whether a value is a tensor with `length` positions on axis 1, which are not all there are."""
    if not tf.is_tensor(value) or value.shape.rank is None or value.shape.rank < 2:
        return False
    return value.shape[1] == length and not slots.get(value, "sequence_alike", False)


def mark_alike(structure: object) -> object:
    """Notes that all ranks have these tensors alike; returns them."""
    for value in tree.flatten(structure):
        if tf.is_tensor(value):
            slots.of(value).sequence_alike = True
    return structure


def cut(value: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """An equal part of the positions on each device, with its part of the mask."""
    parts = on_each(tf.identity, devices, tf.split(value, len(devices), 1))
    mask = get_mask(value)
    if mask is not None:
        for part, own in zip(parts, on_each(tf.identity, devices, tf.split(mask, len(devices), 1)), strict=True):
            set_mask(part, own)
    return parts


def copied(value: tf.Tensor, devices: Sequence[str]) -> list[tf.Tensor]:
    """The same tensor on each device, marked."""
    copies, mask = on_each(tf.identity, devices, [value] * len(devices)), get_mask(value)
    for each in copies:
        mark_alike(each)
        if mask is not None:
            set_mask(each, mask)
    return copies


def joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """All positions on the current device, with the whole mask."""
    whole, masks = tf.concat(list(parts), 1), [get_mask(part) for part in parts]
    if masks[0] is not None:
        set_mask(whole, tf.concat(masks, 1))
    return whole


def whole(structures: Sequence, length: int) -> object:
    """One structure from one per rank: parts are joined, other values are the first rank's."""
    leaves = [tree.flatten(each) for each in structures]
    found = [joined(column) if is_part(column[0], length) else column[0] for column in zip(*leaves, strict=True)]
    return tree.pack_sequence_as(structures[0], found)


def split(structure: object, length: int, devices: Sequence[str], ranks: Sequence[int]) -> list:
    """One structure for each rank from one of whole tensors.

    Args:
        structure: tensors.
        length: positions in a part.
        devices: of the ranks.
        ranks: the numbers of axes that a tensor with positions may have.
    """

    def parts(value):
        if not tf.is_tensor(value):
            return [value] * len(devices)
        has_positions = value.shape.rank in ranks and value.shape[1] == length * len(devices)
        return cut(value, devices) if has_positions else copied(value, devices)

    columns = [parts(value) for value in tree.flatten(structure)]
    return [tree.pack_sequence_as(structure, [column[at] for column in columns]) for at in range(len(devices))]


def on_each(function: Callable, devices: Sequence[str], *columns: Sequence) -> list:
    """The function's value on each device, of that device's arguments."""
    found = []
    for device, *row in zip(devices, *columns, strict=True):
        with tf.device(device):
            found.append(function(*row))
    return found


@dataclass(frozen=True)
class PartOfDraw(DrawShard):
    """The piece of a draw for these positions, where it has positions on axis 1.

    Attributes:
        length: positions in a part.
    """

    length: int = 0

    def unsplit(self, rows: RowDraw) -> RowDraw:
        return self._along(rows.static).unsplit(rows) if self._splits(rows.static) else rows

    def take(self, drawn: tf.Tensor, static: tf.TensorShape) -> tf.Tensor:
        return self._along(static).take(drawn, static) if self._splits(static) else drawn

    def _splits(self, static: tf.TensorShape) -> bool:
        return static.rank >= 2 and static[1] == self.length

    def _along(self, static: tf.TensorShape) -> DrawShard:
        return DrawShard(1 - static.rank, self.at, self.count)
