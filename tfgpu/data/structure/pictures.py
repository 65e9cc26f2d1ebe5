"""Pictures in files with more than a class each: numbers or several targets from a table, boxes, masks.

    images:homes.csv#price        a table whose column `file` (or `image`) names the picture, beside the table
    coco:boxes.json#pictures      COCO's annotations, and the folder of the pictures
    masks:leaves/                 leaves/images/1.jpg with leaves/masks/1.png; also leaves/train/images/...

Pictures and masks are read by place, like those of a folder by class; tables and boxes lie in memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data.decoding import Files, Reading, decode_image, open_files, resize
from tfgpu.data.examples import Examples
from tfgpu.data.folders import SUFFIXES, images_below
from tfgpu.data.names import SourceName, check_encodable
from tfgpu.data.position import on_cpu
from tfgpu.data.records import find, parts_of
from tfgpu.data.splits import PARTS
from tfgpu.data.structure import coco
from tfgpu.data.structure.opening import with_targets
from tfgpu.data.tables import WEIGHT, label_columns, place_of, read_columns
from tfgpu.errors import InputError

FILE = ("file", "image", "filename", "path")
_PNG = b"\x89PNG\r\n\x1a\n"


def open_pictures(source: SourceName, reading: Reading) -> Examples:
    """Opens pictures with targets.

    Args:
        source: of the kind `images`, `coco` or `masks`.
        reading: size, corrupt files, memory, task.

    Raises:
        InputError: files that are missing or do not belong together.
    """
    opened = {"images": _from_table, "coco": _from_coco, "masks": _from_masks}
    return opened[source.kind](source, reading)


def _from_table(source: SourceName, reading: Reading) -> Examples:
    paths = find(source.value, end=".csv")
    kind = "parquet" if paths[0].name.endswith(".parquet") else "csv"
    pictures, own, rows = _read_all(paths, lambda path: _table(path, kind, source.label))
    if len({tuple(each) for each in rows}) > 1:
        raise InputError(f"{source.value}: all tables must have the same columns. Received: {list(map(list, rows))}.")
    columns = {name: np.concatenate([each[name] for each in rows]) for name in rows[0]}
    weights = columns.pop(WEIGHT, None)
    y = next(iter(columns.values())) if len(columns) == 1 else columns
    name = Path(source.value).name
    return with_targets(_opened(name, pictures, own, reading), y, weights, task=reading.task)


def _read_all(paths: list[Path], read: Callable[[Path], tuple[Sequence[Path], Any]]) -> tuple[list, dict, list]:
    """The pictures of all files, in the order of their splits; the splits; and what else `read` has found in each."""
    pictures, own, found = [], {}, []
    for part, numbers in parts_of(paths).items():
        first = len(pictures)
        for at in numbers:
            named, about = read(paths[at])
            pictures += named
            found.append(about)
        own[part] = np.arange(first, len(pictures))
    return pictures, own, found


def _table(path: Path, kind: str, asked: str | None) -> tuple[list[Path], dict[str, np.ndarray]]:
    """A table's pictures, and its label columns and weights."""
    table = read_columns(path, kind)
    file = next((name for name in FILE if name in table), None)
    if file is None:
        raise InputError(
            f"{path} must have a column 'file' (or 'image') with the pictures' names. Received: {', '.join(table)}."
        )
    others = [name for name in table if name not in (file, WEIGHT)]
    labels = others if asked is None and len(others) == 1 else label_columns(path, others, asked)
    kept = {}
    for name in (file, *labels, *(each for each in (WEIGHT,) if each in table)):
        missing = next((row for row, value in enumerate(table[name]) if value is None), None)
        if missing is not None:
            raise InputError(f"{path}: column {name!r} has no value in {place_of(path, kind, missing)}. Fill it in.")
        try:
            kept[name] = np.asarray(table[name])
        except ValueError as error:
            raise InputError(f"{path}: the lists in column {name!r} must have one length.") from error
    pictures = [path.parent / str(value) for value in kept.pop(file)]
    return pictures, kept


def _from_coco(source: SourceName, reading: Reading) -> Examples:
    def read(path: Path) -> tuple[Sequence[Path], coco.Annotated]:
        found = coco.read(path, source.label)
        return found.pictures, found

    pictures, own, annotated = _read_all(find(source.value, end=".json"), read)
    y, class_names = coco.targets(annotated, reading.image_size)
    examples = with_targets(_opened(Path(source.value).name, pictures, own, reading), y, None, task=None)
    return replace(examples, structure=replace(examples.structure, class_names=class_names))


def _from_masks(source: SourceName, reading: Reading) -> Examples:
    root = Path(source.value)
    parts = [part for part in PARTS if (root / part / "images").is_dir()]
    folders = {part: root / part for part in parts} if "train" in parts else {"train": root}
    pictures, masks, own = [], [], {}
    for part, folder in folders.items():
        pairs = _pairs(folder)
        own[part] = np.arange(len(pictures), len(pictures) + len(pairs))
        pictures += [picture for picture, _ in pairs]
        masks += [mask for _, mask in pairs]
    examples = _opened(root.name, pictures, own, reading, masks)
    shape = (*examples.shape[:-1], examples.shape[-1] - 1)
    found = with_targets(replace(examples, shape=shape), {}, None, task=None)
    return replace(found, structure=replace(found.structure, planes=1))


def _pairs(folder: Path) -> list[tuple[Path, Path]]:
    """The pictures of a folder's `images/`, each with the mask of its name in `masks/`."""
    for name in ("images", "masks"):
        if not (folder / name).is_dir():
            raise InputError(f"{str(folder)!r} must hold the folders images/ and masks/. Received: no {name}/.")
    by_name = [
        {path.relative_to(folder / name).with_suffix(""): path for path in images_below(folder / name)}
        for name in ("images", "masks")
    ]
    pictures, masks = by_name
    if not pictures:
        raise InputError(f"No pictures in {str(folder / 'images')!r}. Expected {', '.join(SUFFIXES)}.")
    for one, other, what in ((pictures, masks, "mask"), (masks, pictures, "picture")):
        lonely = sorted(one.keys() - other.keys())
        if lonely:
            raise InputError(
                f"{one[lonely[0]]} has no {what} of the same name ({len(lonely)} in total). Add or remove it."
            )
    for path in masks.values():
        _check_mask(path)
    return [(pictures[name], masks[name]) for name in sorted(pictures)]


def _check_mask(path: Path) -> None:
    """Refuses masks whose numbers a decoder would change: palettes, colors, other than 8 bits."""
    try:
        with open(path, "rb") as file:
            head = file.read(26)
    except OSError as error:
        raise InputError(f"Cannot read the mask {path}: {error.strerror}. Check it.") from error
    is_gray = len(head) == 26 and head.startswith(_PNG) and (head[24], head[25]) == (8, 0)
    if not is_gray:
        found = "a palette" if head.startswith(_PNG) and head[25:26] == b"\x03" else "another format"
        raise InputError(
            f"The mask {path} must be a PNG of 8 bits of gray, whose numbers are the classes. Received: {found}. "
            "Convert it: Image.fromarray(numpy.array(Image.open(FILE)).astype('uint8')).save(FILE)."
        )


def _opened(
    name: str,
    pictures: Sequence[Path],
    own: Mapping[str, np.ndarray],
    reading: Reading,
    masks: Sequence[Path] | None = None,
) -> Examples:
    """Pictures whose labels are their numbers; where there are masks, these are the last channel."""
    _check_there(name, pictures)
    check_encodable([*pictures, *(masks or ())])
    count = len(pictures)
    path_of = on_cpu([str(path) for path in pictures])
    mask_of = None if masks is None else on_cpu([str(path) for path in masks])

    def read(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image = decode_image(tf.io.read_file(tf.gather(path_of, i)), reading.image_size)
        return image if mask_of is None else with_mask(image, tf.gather(mask_of, i), reading.image_size), i

    def where(i: tf.Tensor) -> tf.Tensor:
        more = [] if mask_of is None else [" with its mask ", mask_of[i], ", which must have its size"]
        return tf.strings.join(["the image ", path_of[i], *more])

    files = Files(
        name=name,
        count=count,
        size=sum(path.stat().st_size for path in [*pictures, *(masks or ())]),
        read=read,
        label=lambda i: i,
        where=where,
        own=own,
        class_names=tuple(map(str, range(count))),
        encoded=None if masks else lambda i: tf.io.read_file(tf.gather(path_of, i)),
        labels=np.arange(count),
        paths=(*pictures, *(masks or ())),
        planes=0 if masks is None else 1,
    )
    return open_files(files, reading)


def with_mask(image: tf.Tensor, path: tf.Tensor, size: tuple[int, int] | None) -> tf.Tensor:
    """Appends the mask in a file as the last channel; both get the size, the mask by its nearest pixels."""
    mask = tf.io.decode_png(tf.io.read_file(path), channels=1)
    if size is not None:
        image = resize(image, size)
        mask = tf.image.resize(mask, size, method="nearest")
    return tf.ensure_shape(tf.concat([image, mask], axis=-1), [None, None, None])


def _check_there(name: str, pictures: Sequence[Path]) -> None:
    missing = [path for path in pictures if not path.is_file()]
    if missing:
        raise InputError(f"{name} names the picture {missing[0]}, which does not exist ({len(missing)} in total).")
    if not pictures:
        raise InputError(f"{name} names no pictures. Add at least one.")
