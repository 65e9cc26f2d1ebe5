"""COCO's annotations of objects: boxes and their classes (https://cocodataset.org/#format-data).

Only `images`, `annotations` (`bbox`) and `categories` are read. Crowds (`iscrowd`) are left out.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfgpu.data.augmentation.targets import BOXES
from tfgpu.errors import InputError


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


def read(path: Path, folder: str | None) -> Annotated:
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
    root = _root(path, folder, names)
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


def _root(path: Path, folder: str | None, names: Sequence[str]) -> Path:
    if folder is not None:
        return path.parent / folder
    beside = [path.parent, path.parent / "images"]
    return next((root for root in beside if names and (root / names[0]).is_file()), path.parent)


def targets(
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
