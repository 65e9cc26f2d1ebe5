"""The index file of a folder of TFRecord shards: their contents and each record's offset. Imports no TensorFlow.

`index.json` is written last, so a folder that has one is complete. It lets the shards be opened without reading them,
preserves the source's order, splits, class names and dtype, and detects damaged shards. Without it the shards can
still be read.
"""

import base64
import hashlib
import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfgpu.data.splits import PARTS
from tfgpu.errors import InputError, whole_number

FILE = "index.json"
MOST_SHARDS = 99999  # file names have five digits
FORMAT = "tfgpu shards"
VERSION = 1
_KINDS = ("bytes_list", "float_list", "int64_list")
_DTYPES = ("bool", "bfloat16", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))
_DTYPES += ("float16", "float32", "float64")
FRAME = 16  # bytes of framing around each record of a TFRecord file


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file: its name in the folder.
        part: train, validation or test.
        examples, bytes: the number of each.
        sha256: of the whole file, in hexadecimal.
        lengths: bytes of each record, packed by `pack`.
        labels: each record's label, packed; None if labels are sequences.
    """

    file: str
    part: str
    examples: int
    bytes: int
    sha256: str
    lengths: str
    labels: str | None

    def offsets(self) -> np.ndarray:
        """Returns each record's offset, int64 [examples]."""
        after = np.cumsum(unpack(self.lengths, self.examples) + FRAME)
        return np.concatenate([[0], after[:-1]]).astype(np.int64)


@dataclass(frozen=True)
class Manifest:
    """The contents of a folder of shards.

    Example `i` of a split with `n` shards is record `i // n` of the split's shard `i % n`: each shard is a fair sample
    even if the source is sorted by class.

    Attributes:
        name: the source's name.
        features: names of the example's and the label's feature, the kind of the first, its shape, labels per example.
        dtype: the dtype of examples in memory; None for encoded images.
        shape: one example's shape; None for dimensions that vary.
        class_names: one name per class.
        shards: the files, by split and number.
    """

    name: str
    features: Mapping[str, object]
    dtype: str | None
    shape: tuple[int | None, ...]
    class_names: tuple[str, ...]
    shards: tuple[Shard, ...]

    @property
    def examples(self) -> dict[str, int]:
        """The number of examples in each split."""
        counts: dict[str, int] = {}
        for shard in self.shards:
            counts[shard.part] = counts.get(shard.part, 0) + shard.examples
        return counts

    @property
    def bytes(self) -> int:
        """Total bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Writes the index file; the shards must exist already."""
        facts = {"format": FORMAT, "version": VERSION, "classes": len(self.class_names), "examples": self.examples}
        (folder / FILE).write_text(json.dumps(facts | asdict(self), indent=1))


def read(folder: str | Path) -> Manifest:
    """Reads the index file of a folder.

    Raises:
        InputError: it is missing, damaged, or from a newer version.
    """
    found = find(folder)
    if found is None:
        raise InputError(f"No shards with an index at {str(folder)!r}. Write some: tfgpu data write SOURCE OUT.")
    return found


def find(folder: str | Path) -> Manifest | None:
    """Reads the index file of a folder; None if it is missing or not tfgpu's.

    Raises:
        InputError: it is damaged or from a newer version.
    """
    path = Path(folder) / FILE
    return parse(path.read_bytes(), path) if path.is_file() else None


def parse(content: bytes, source: object) -> Manifest | None:
    """Reads the content of an index file; None if it is not tfgpu's.

    Args:
        content: of the file.
        source: where it is from, for errors.

    Raises:
        InputError: it is damaged or from a newer version.
    """
    try:
        facts = json.loads(content)
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            return None
        is_newer = facts["version"] > VERSION
        found = None
        if not is_newer:
            shards = tuple(_shard(each) for each in facts["shards"])
            _check_facts(facts, max((shard.bytes for shard in shards), default=0))
            fields = {name: facts[name] for name in ("name", "features", "dtype")}
            fields |= {name: tuple(facts[name]) for name in ("shape", "class_names")}
            found = Manifest(**fields, shards=shards)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise InputError(
            f"{source} is damaged: {' '.join(str(error).split())}. Copy it again, or remove it and read without it."
        ) from error
    if is_newer:
        raise InputError(f"{source} was written by a newer tfgpu. Upgrade tfgpu, or write the shards again.")
    return found


def _check_facts(facts: Mapping[str, Any], most: int) -> None:
    """Rejects values that would otherwise fail, or exhaust memory, when the records are read.

    Args:
        most: the most values that a record may have.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: a value that `write_shards` would not write.
    """
    features = facts["features"]
    kind, shape = features["kind"], features["shape"]
    for text in (facts["name"], features["x"], features["y"], *facts["class_names"]):
        text.encode()
    if kind not in _KINDS or isinstance(facts["class_names"], str):
        raise ValueError(f"the record kind {kind!r} is unknown, or the classes have no names")
    if facts["dtype"] is not None and facts["dtype"] not in _DTYPES:
        raise ValueError(f"{facts['dtype']!r} is not a numeric dtype")
    sides = [*shape, *(side for side in facts["shape"] if side is not None), features["labels"]]
    for side in sides:
        if side is not None:
            whole_number("shape", side, minimum=0)
    if kind != "bytes_list" and math.prod(shape) > most:
        raise ValueError(f"an example of {shape} is larger than a file")


def _shard(facts: Mapping[str, object]) -> Shard:
    """Parses a shard of an untrusted index.

    Raises:
        ValueError, TypeError: it is invalid, points out of the folder, or declares more memory than the file occupies.
    """
    shard = Shard(**facts)  # type: ignore[arg-type]
    whole_number("examples", shard.examples, minimum=0)
    whole_number("bytes", shard.bytes, minimum=0)
    is_text = isinstance(shard.file, str) and shard.file != ""
    if not is_text or Path(shard.file).name != shard.file or "\0" in shard.file:
        raise ValueError(f"{shard.file!r} is not a file name in its folder")
    if shard.examples * FRAME > shard.bytes:
        raise ValueError(f"{shard.file} has more examples than its bytes can hold")
    lengths = unpack(shard.lengths, shard.examples)
    if len(lengths) != shard.examples:
        raise ValueError(f"{shard.file} does not have a length for each record")
    if shard.labels is not None and len(unpack(shard.labels, shard.examples)) != shard.examples:
        raise ValueError(f"{shard.file} does not have a label for each record")
    if shard.part not in PARTS or not isinstance(shard.sha256, str):
        raise ValueError(f"{shard.file} belongs to an unknown split {shard.part!r}, or has no checksum")
    if (lengths < 0).any() or lengths.sum() + FRAME * shard.examples != shard.bytes:
        raise ValueError(f"the size of {shard.file} does not match its records")
    return shard


def of_files(paths: Sequence[Path]) -> Manifest | None:
    """Finds the index that lists all of these files; returns None without one.

    Raises:
        InputError: the index is damaged or from a newer version.
    """
    folders = {path.parent for path in paths}
    found = find(folders.pop()) if len(folders) == 1 else None
    if found is None or not {path.name for path in paths} <= {shard.file for shard in found.shards}:
        return None
    return found


def check_shards(folder: str | Path) -> Manifest:
    """Reads all shards of a folder and compares their checksums with its index.

    Args:
        folder: the output of `write_shards`.

    Returns:
        The index.

    Raises:
        InputError: the index is missing, or a shard is missing or damaged.

    Example:
        print(tfgpu.data.check_shards("shards/").examples)
    """
    listed = read(folder)
    check_files(folder, listed, checksums=True)
    return listed


def check_files(folder: str | Path, listed: Manifest, *, checksums: bool = False) -> None:
    """Compares a folder's shards with its index.

    Args:
        folder: the shards' folder.
        listed: its index.
        checksums: compare the files' checksums as well as their sizes.

    Raises:
        InputError: a shard is missing, damaged, or not in the index.
    """
    folder = Path(folder)
    extra = sorted({p.name for p in folder.glob("[!.]*.tfrecord*")} - {shard.file for shard in listed.shards})
    if extra:
        raise InputError(
            f"{folder / extra[0]} is not in {FILE}, which lists the folder's shards. "
            f"Move it away, or remove {FILE} to read all files without it."
        )
    for shard in listed.shards:
        check_shard(folder / shard.file, shard, checksum=checksums)


def check_shard(path: Any, shard: Shard, *, checksum: bool = False) -> None:
    """Raises `InputError` if a file, a `Path` or a `RemoteFile`, does not match the index."""
    fix = f"Copy it again from the original, or write the shards again. ({FILE} has the expected values.)"
    if not path.is_file():
        raise InputError(f"The shard {path} is missing. {fix}")
    size = path.stat().st_size
    if size != shard.bytes:
        raise InputError(f"The shard {path} is damaged: it has {size} bytes, not {shard.bytes}. {fix}")
    if checksum and digest(path) != shard.sha256:
        raise InputError(f"The shard {path} is damaged: its checksum does not match. {fix}")


def check_output(out: str | Path, *, overwrite: bool = False) -> Path:
    """Rejects a folder that may not be written, before anything is.

    Args:
        out: the folder.
        overwrite: whether shards in it may be replaced.

    Returns:
        Its path.

    Raises:
        InputError: it is a file, or contains files that are not shards or may not be replaced.
    """
    path = Path(out).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise InputError(f"The output {str(path)!r} is a file. Use a folder.")
    if not path.is_dir() or not any(path.iterdir()):
        return path
    listed = find(path)
    if listed is None:
        raise InputError(f"{str(path)!r} is not empty and has no shards with an index. Use another folder.")
    if not overwrite:
        raise InputError(f"{str(path)!r} already has shards. Replace them with --overwrite, or use another folder.")
    others = sorted({p.name for p in path.iterdir()} - {FILE} - {shard.file for shard in listed.shards})
    if others:
        raise InputError(
            f"{str(path)!r} also contains {others[0]!r}, so it is not replaced. Move that away, or use another folder."
        )
    return path


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(numbers: np.ndarray) -> str:
    """Encodes whole numbers as a short text.

    Example:
        >>> unpack(pack(np.array([7, 7, 9]))).tolist()
        [7, 7, 9]
    """
    return base64.b64encode(zlib.compress(np.asarray(numbers, "<i8").tobytes())).decode()


def unpack(text: str, most: int | None = None) -> np.ndarray:
    """Decodes the output of `pack`: int64 [n].

    Args:
        text: the short text.
        most: the most numbers to accept: a short text can expand to gigabytes of zeros.

    Raises:
        ValueError, zlib.error: it is damaged, or has more numbers.
    """
    packed = base64.b64decode(text)
    if most is None:
        content = zlib.decompress(packed)
    else:
        reader = zlib.decompressobj()
        content = reader.decompress(packed, 8 * most + 1)
        if len(content) > 8 * most:
            raise ValueError(f"there are more than {most} numbers")
        if not reader.eof:
            raise ValueError("the numbers end too early")
    return np.frombuffer(content, "<i8").astype(np.int64)
