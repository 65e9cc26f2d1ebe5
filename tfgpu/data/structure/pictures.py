"""Pictures in files with more than a class each: numbers or several targets from a table, boxes, masks.

    images:homes.csv#price        a table whose column `file` (or `image`) names the picture, beside the table
    coco:boxes.json#pictures      COCO's annotations, and the folder of the pictures; crowds (`iscrowd`) are left out
    masks:leaves/                 leaves/images/1.jpg with leaves/masks/1.png; also leaves/train/images/...

Pictures and masks are read by place, like those of a folder by class; tables and boxes lie in memory. Of
COCO's files (https://cocodataset.org/#format-data) only `images`, `annotations` (`bbox`) and `categories` are read.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.data.augmentation.targets import BOXES
from tfgpu.data.decoding import Reading, image_files, open_files, resize
from tfgpu.data.examples import Examples
from tfgpu.data.folders import SUFFIXES, images_below
from tfgpu.data.names import SourceName, check_encodable
from tfgpu.data.position import on_cpu
from tfgpu.data.records import find, parts_of
from tfgpu.data.splits import PARTS
from tfgpu.data.structure.opening import with_targets
from tfgpu.data.tables import WEIGHT, label_columns, place_of, read_columns
from tfgpu.errors import InputError

FILE = ("file", "image", "filename", "path")
_PNG = b"\x89PNG\r\n\x1a\n"


def open_listed(source: SourceName, reading: Reading) -> Examples:
    """Opens pictures with the labels of a table.

    Args:
        source: of the kind `images`.
        reading: size, corrupt files, memory, task.

    Raises:
        InputError: files that are missing or do not belong together.
    """
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


def open_coco(source: SourceName, reading: Reading) -> Examples:
    """Opens pictures with boxes.

    Args:
        source: of the kind `coco`.
        reading: size, corrupt files, memory, task.

    Raises:
        InputError: files that are missing or do not belong together.
    """

    def read(path: Path) -> tuple[Sequence[Path], Annotated]:
        found = read_coco(path, source.label)
        return found.pictures, found

    pictures, own, annotated = _read_all(find(source.value, end=".json"), read)
    y, class_names = _coco_targets(annotated, reading.image_size)
    examples = with_targets(_opened(Path(source.value).name, pictures, own, reading), y, None, task=None)
    return replace(examples, structure=replace(examples.structure, class_names=class_names))


def open_masks(source: SourceName, reading: Reading) -> Examples:
    """Opens pictures with masks.

    Args:
        source: of the kind `masks`.
        reading: size, corrupt files, memory, task.

    Raises:
        InputError: files that are missing or do not belong together.
    """
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
    name: str, pictures: Sequence[Path], own: Mapping, reading: Reading, masks: Sequence[Path] = ()
) -> Examples:
    """Pictures whose labels are their numbers; where there are masks, these are the last channel."""
    missing = [path for path in pictures if not path.is_file()]
    if missing:
        raise InputError(f"{name} names the picture {missing[0]}, which does not exist ({len(missing)} in total).")
    if not pictures:
        raise InputError(f"{name} names no pictures. Add at least one.")
    check_encodable([*pictures, *masks])
    count = len(pictures)
    files = image_files(name, pictures, range(count), reading, own=own, class_names=tuple(map(str, range(count))))
    if not masks:
        return open_files(files, reading)
    mask_of, size = on_cpu([str(path) for path in masks]), sum(path.stat().st_size for path in masks)

    def read(i: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        image, mask = files.read(i)[0], tf.io.decode_png(tf.io.read_file(tf.gather(mask_of, i)), channels=1)
        if reading.image_size is not None:  # the mask by its nearest pixels
            image = resize(image, reading.image_size)
            mask = tf.image.resize(mask, reading.image_size, method="nearest")
        return tf.ensure_shape(tf.concat([image, mask], axis=-1), [None, None, None]), i

    def where(i: tf.Tensor) -> tf.Tensor:
        return tf.strings.join([files.where(i), " with its mask ", mask_of[i], ", which must have its size"])

    facts = {"size": files.size + size, "read": read, "where": where, "paths": (*files.paths, *masks), "planes": 1}
    return open_files(replace(files, **facts, encoded=None), reading)


@dataclass(frozen=True)
class Annotated:
    """What one file of annotations says.

    Attributes:
        path: the file.
        pictures: in the file's order.
        sizes: (height, width) of each picture; None where the file does not say.
        boxes: of each picture, (category id, left, top, right, bottom) of each object in pixels.
        categories: names by id.
    """

    path: Path
    pictures: tuple[Path, ...]
    sizes: tuple[tuple[int, int] | None, ...]
    boxes: tuple[tuple[tuple[int, float, float, float, float], ...], ...]
    categories: dict[int, str]


def read_coco(path: Path, folder: str | None) -> Annotated:
    """Reads a file of annotations.

    Args:
        path: the JSON file.
        folder: where the pictures are, relative to the file; None: beside it, or in `images/`.

    Raises:
        InputError: it is not of this format, or an annotation is not valid.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        images, annotations = content["images"], content.get("annotations", [])
        categories = {int(each["id"]): str(each["name"]) for each in content["categories"]}
        number_of = {each["id"]: at for at, each in enumerate(images)}
        names = [str(each["file_name"]) for each in images]
        sizes = [(int(each["height"]), int(each["width"])) if "height" in each else None for each in images]
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"no {error}" if isinstance(error, LookupError) else " ".join(str(error).split())[:200]
        raise InputError(
            f"Cannot read {path} as COCO annotations: {reason}. It needs images (id, file_name, height, width), "
            "annotations (image_id, category_id, bbox) and categories (id, name)."
        ) from error
    boxes: list[list] = [[] for _ in images]
    for at, each in enumerate(annotations):
        if isinstance(each, dict) and each.get("iscrowd"):
            continue
        picture, box = _box(each, number_of, categories, f"{path}: annotation {at} (the first is 0)")
        boxes[picture].append(box)
    beside = [path.parent / folder] if folder is not None else [path.parent, path.parent / "images"]
    root = next((root for root in beside if names and (root / names[0]).is_file()), beside[0])
    return Annotated(path, tuple(root / name for name in names), tuple(sizes), tuple(map(tuple, boxes)), categories)


def _box(each: Any, number_of: dict, categories: dict[int, str], where: str) -> tuple[int, tuple]:
    try:
        picture, category = number_of.get(each["image_id"]), each["category_id"]
        left, top, width, height = (float(side) for side in each["bbox"])
    except (LookupError, TypeError, ValueError) as error:
        raise InputError(f"{where} needs image_id, category_id and bbox: [left, top, width, height].") from error
    if picture is None or category not in categories:
        what = f"image_id={each['image_id']}" if picture is None else f"category_id={category}"
        raise InputError(f"{where} has {what}, which the file does not list. Add or correct it.")
    if not np.isfinite([left, top, width, height]).all() or width <= 0 or height <= 0:
        raise InputError(f"{where} must have a box wider and higher than 0. Received: bbox={each['bbox']}. Remove it.")
    return picture, (category, left, top, left + width, top + height)


def _coco_targets(
    files: Sequence[Annotated], image_size: tuple[int, int] | None
) -> tuple[dict[str, Any], dict[str, tuple[str, ...]]]:
    """The boxes of all pictures in the form of `tfgpu.data.augmentation.targets`, and the names of their classes.

    Args:
        files: what the files say; classes are numbered from 0 by their ids.
        image_size: (height, width) that the pictures will have; None: as they are.

    Raises:
        InputError: files whose categories differ, or a picture without a size although pictures are resized.
    """
    categories: dict[int, str] = {}
    for file in files:
        for number, name in file.categories.items():
            if categories.setdefault(number, name) != name:
                raise InputError(f"{file.path}: category {number} is {name!r}, but {categories[number]!r} elsewhere.")
    label_of = {number: at for at, number in enumerate(sorted(categories))}
    rows = [(file, *each) for file in files for each in zip(file.pictures, file.sizes, file.boxes, strict=True)]
    most = max([1, *(len(boxes) for *_, boxes in rows)])
    edges = np.zeros((len(rows), most, 4), np.float32)
    labels = np.full((len(rows), most), -1, np.int64)
    for at, (file, picture, size, boxes) in enumerate(rows):
        scale = np.ones(4)
        if image_size is not None and boxes:
            if size is None:
                raise InputError(f"{file.path} does not say the height and width of {picture.name}. Add them.")
            scale = np.tile([image_size[1] / size[1], image_size[0] / size[0]], 2)
        for number, (category, *sides) in enumerate(boxes):
            edges[at, number], labels[at, number] = np.asarray(sides) * scale, label_of[category]
    names = tuple(categories[number] for number in sorted(categories))
    return {BOXES: {"boxes": edges, "labels": labels}}, {BOXES: names}
