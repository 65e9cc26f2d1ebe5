"""Datasets that tensorflow-datasets has prepared on this machine: `tfds:NAME`."""

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import numpy as np
import tensorflow as tf

from tfgpu.data.decoding import Files, Reading, open_files
from tfgpu.data.examples import Examples
from tfgpu.data.records import Index
from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError, MachineError, required, unknown


def open_tfds(name: str, reading: Reading) -> Examples:
    """Opens a prepared dataset of tensorflow-datasets; nothing is downloaded.

    Its train, validation and test splits are used as they are. The records are read with random access, like TFRecord
    files.

    Args:
        name: such as `"mnist"` or `"mnist:3.0.1"`; found in TFDS_DATA_DIR (default `~/tensorflow_datasets`).
        reading: size, corrupt records, memory.

    Returns:
        The examples, as the dataset's supervised keys define them.

    Raises:
        InputError: an unknown name, a dataset that is not prepared, or one without labels.
        MachineError: tensorflow-datasets is not installed.
    """
    builder = _builder(name)
    splits = {part: builder.info.splits[part] for part in PARTS if part in builder.info.splits}
    if "train" not in splits:
        raise InputError(
            f"tfds:{name} has no train split. Received: {', '.join(builder.info.splits)}. Use module:function."
        )
    keys, features = builder.info.supervised_keys, builder.info.features
    if not keys or len(keys) != 2 or not all(isinstance(k, str) for k in keys):
        raise InputError(f"tfds:{name} does not say which features are the example and the label. Use module:function.")
    x_name, y_name = keys
    if features[x_name].dtype not in (np.uint8, np.float32, np.float64, np.int32, np.int64):
        raise InputError(
            f"tfds:{name}: the feature {x_name!r} is {features[x_name].dtype}, not numbers. Use module:function."
        )
    paths, own_files = [], {}
    for part, split in splits.items():
        own_files[part] = range(len(paths), len(paths) + len(split.filepaths))
        paths += [Path(p) for p in split.filepaths]
    index = Index(paths)

    def read(i):
        example = features.deserialize_example(index.record(i))
        return example[x_name], tf.cast(example[y_name], tf.int64)

    def encoded(i):
        from tensorflow_datasets import decode

        undecoded = {x_name: decode.SkipDecoding()}
        return features.deserialize_example(index.record(i), decoders=undecoded)[x_name]

    files = Files(
        name=f"tfds:{name}",
        count=len(index.offsets),
        size=sum(p.stat().st_size for p in paths),
        read=read,
        label=lambda i: read(i)[1],  # unused decoding is pruned from the graph
        where=index.where,
        own={part: np.flatnonzero(np.isin(index.file_of, list(numbers))) for part, numbers in own_files.items()},
        class_names=tuple(getattr(features[y_name], "names", None) or ()) or None,
        lost=index.lost,
        encoded=encoded if type(features[x_name]).__name__ == "Image" else None,
        paths=tuple(paths),
    )
    return open_files(files, reading)


def shape_of(name: str, image_size: tuple[int, int] | None = None) -> tuple[tuple[int, ...], int] | None:
    """Returns the shape of a tensorflow-datasets dataset from its definition; it need not be prepared.

    Args:
        name: such as `"cifar10"`.
        image_size: the size to resize images to.

    Returns:
        The shape of an example and the number of classes; None if it is not a classification dataset with images of one
        size, or tensorflow-datasets is not installed.

    Raises:
        InputError: an unknown name.
    """
    try:
        tfds = _tfds()
    except MachineError:
        return None
    try:
        features = tfds.builder(name).info.features
    except tfds.core.DatasetNotFoundError as error:
        raise _closest(name, tfds.list_builders()) from error
    except (ValueError, AssertionError):
        return None
    if "image" not in features or "label" not in features:
        return None
    shape, classes = features["image"].shape, getattr(features["label"], "num_classes", None)
    if len(shape) != 3 or not classes:
        return None
    shape = (*(image_size or shape[:2]), shape[2])
    return None if None in shape else (shape, classes)


def _builder(name: str):
    tfds = _tfds()
    try:
        builder = tfds.builder(name)
    except tfds.core.DatasetNotFoundError as error:
        raise _closest(name, tfds.list_builders()) from error
    except (ValueError, AssertionError) as error:
        raise InputError(
            f"Cannot open 'tfds:{name}': {' '.join(str(error).split())[:200]}. Check the name and version."
        ) from error
    if not builder.info.splits:
        raise InputError(
            f"tfds:{name} is not prepared in {builder.data_dir}. Prepare it with internet access: "
            f"python -c \"import tensorflow_datasets as tfds; tfds.load('{name}')\""
        )
    if builder.info.file_format.value != "tfrecord":
        raise InputError(
            f"tfds:{name} is stored as {builder.info.file_format.value}. Prepare it as tfrecord: "
            f"tfds build {name} --file_format=tfrecord"
        )
    return builder


def _tfds() -> ModuleType:
    """The package. If an import fails inside it, it logs the error and is left without names."""
    need, fix = "tfds: sources need tensorflow-datasets", "Run: pip install 'tfgpu[tfds]'"
    tfds = required("tensorflow_datasets", need, fix, MachineError)
    if not hasattr(tfds, "builder"):
        raise MachineError(f"{need} (it is installed, but its own import failed: see its log). {fix}")
    return tfds


def _closest(name: str, choices: Iterable[str]) -> InputError:
    """One line, without the hundreds of known names."""
    message = str(unknown("tfds dataset", name, choices)).split(" Choices:")[0]
    return InputError(
        f'{message} List them: python -c "import tensorflow_datasets as tfds; print(tfds.list_builders())"'
    )
