"""A folder of images, with one subfolder per class.

    photos/cat/1.jpg            photos/train/cat/1.jpg
    photos/dog/2.png     or     photos/test/dog/2.png      (train, validation, test)

Reads JPEG, PNG, BMP and the first frame of a GIF; other image formats are an error, or count as corrupt. Hidden files
and folders, whose names begin with a dot, are ignored. Folders of up to 2 GiB are decoded once before training, so a
corrupt file is reported at the start; in larger ones it is reported when training reads it.
"""

import logging
from pathlib import Path

import numpy as np

from tfgpu.data.decoding import Reading, image_files, open_files
from tfgpu.data.examples import Examples
from tfgpu.data.names import check_encodable
from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif")
OTHER_SUFFIXES = (
    *(".webp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jxl", ".jp2", ".jfif", ".jpe", ".ppm", ".pgm", ".pbm"),
    *(".tga", ".ico", ".svg", ".dng", ".raw", ".psd"),
)

_log = logging.getLogger(__name__)


def open_folder(folder: str, reading: Reading) -> Examples:
    """Reads a folder of images by class.

    Args:
        folder: its path.
        reading: size, corrupt files, memory.

    Returns:
        uint8 images, one class per folder, ordered by name.

    Raises:
        InputError: no folder, no classes, no images, a corrupt image, images of different sizes.
    """
    root = Path(folder)
    unread = tuple(f"the image {path}" for path in _files(root, OTHER_SUFFIXES) if path.parent != root)
    if unread and not reading.skip_corrupt:
        names = ", ".join(name.removeprefix("the image ") for name in unread[:3]) + (", ..." if len(unread) > 3 else "")
        raise InputError(
            f"{str(root)!r} has {len(unread)} image(s) in an unsupported format: {names}. "
            f"Convert them to {', '.join(SUFFIXES)}, or skip them with skip_corrupt (--skip-corrupt)."
        )
    found = _find(root)
    class_names = _classes(root, found)
    paths, labels, own = [], [], {}
    for part, by_class in found.items():
        first = len(paths)
        for name, files in by_class.items():
            paths += files
            labels += [class_names.index(name)] * len(files)
        own[part] = np.arange(first, len(paths))
    check_encodable(paths)
    files = image_files(root.name, paths, labels, reading, own=own, class_names=class_names, lost=unread)
    return open_files(files, reading)


def _find(root: Path) -> dict[str, dict[str, list[Path]]]:
    """Lists the image files by split and class; a folder without splits is all `train`."""
    folders = _folders(root)
    parts = [f for f in folders if f.name in PARTS]
    if any(f.name == "train" for f in parts) and len(parts) == len(folders):
        found = {f.name: {c.name: images_below(c) for c in _folders(f)} for f in parts}
    else:
        found = {"train": {c.name: images_below(c) for c in folders}}
    if not any(files for by_class in found.values() for files in by_class.values()):
        loose = " It has images at its top level: move them into one folder per class." if images_below(root) else ""
        raise InputError(
            f"No images in {str(root)!r} by class.{loose} "
            f"Expected FOLDER/CLASS/*{'|'.join(SUFFIXES)} or FOLDER/train/CLASS/..."
        )
    return found


def _classes(root: Path, found) -> tuple[str, ...]:
    train = found["train"]
    empty = sorted(name for name, files in train.items() if not files)
    if empty:
        _log.warning("%s: skipping class folders without images: %s", root, ", ".join(empty))
    names = tuple(sorted(name for name, files in train.items() if files))
    if len(names) < 2:
        raise InputError(
            f"{str(root)!r} must contain at least two classes with training images. Received: "
            f"{', '.join(names) or 'none'}. Expected FOLDER/CLASS/image.png or FOLDER/train/CLASS/image.png."
        )
    for part, by_class in found.items():
        for name in [n for n, files in by_class.items() if not files]:
            del by_class[name]
        extra = sorted(set(by_class) - set(names))
        if extra:
            raise InputError(
                f"{str(root / part)!r} has classes without training images: {', '.join(extra)}. Add or remove them."
            )
    return names


def _folders(root: Path) -> list[Path]:
    return sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))


def images_below(folder: Path) -> list[Path]:
    """Lists the images below a folder, sorted, except hidden ones."""
    return _files(folder, SUFFIXES)


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Lists the files with these suffixes below a folder, except hidden ones and those in hidden folders."""
    files = (path for path in folder.rglob("*") if path.suffix.lower() in suffixes)
    shown = (p for p in files if not any(part.startswith(".") for part in p.relative_to(folder).parts))
    return sorted(p for p in shown if p.is_file())
