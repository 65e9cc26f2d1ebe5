"""The index file of a folder of TFRecord shards: what they hold and where each record begins. No TensorFlow here.

`index.json` is written last, so a folder that has one is whole. With it the shards are opened without reading them,
keep the source's order, parts, class names and type, and a damaged shard is named. Without it they can be read too.
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
from tfgpu.errors import InputError

FILE = "index.json"
FORMAT = "tfgpu shards"
VERSION = 1
_KINDS = ("bytes_list", "float_list", "int64_list")
_DTYPES = ("bool", "bfloat16", *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)))
_DTYPES += ("float16", "float32", "float64")
FRAME = 16  # bytes that a TFRecord file puts around each record


@dataclass(frozen=True)
class Shard:
    """One file.

    Attributes:
        file: its name in the folder.
        part: train, validation or test.
        examples, bytes: how many it has.
        sha256: of the whole file, in hexadecimal.
        lengths: bytes of each record, packed by `pack`.
        labels: each record's label, packed; None where a label is a sequence.
    """

    file: str
    part: str
    examples: int
    bytes: int
    sha256: str
    lengths: str
    labels: str | None

    def offsets(self) -> np.ndarray:
        """Returns where each record begins, int64 [examples]."""
        after = np.cumsum(unpack(self.lengths, self.examples) + FRAME)
        return np.concatenate([[0], after[:-1]]).astype(np.int64)


@dataclass(frozen=True)
class Manifest:
    """What a folder of shards holds.

    Example `i` of a part with `n` shards is record `i // n` of the part's shard `i % n`: each shard is a fair sample
    even where the source is sorted by class.

    Attributes:
        name: the source's name.
        features: names of the example's and the label's feature, the kind of the first, its shape, labels an example.
        dtype: the type that examples have in memory; None for encoded images.
        shape: one example's shape; None for sides that differ.
        class_names: one name a class.
        shards: the files, by part and number.
    """

    name: str
    features: Mapping[str, object]
    dtype: str | None
    shape: tuple[int | None, ...]
    class_names: tuple[str, ...]
    shards: tuple[Shard, ...]

    @property
    def examples(self) -> dict[str, int]:
        """How many examples each part has."""
        counts: dict[str, int] = {}
        for shard in self.shards:
            counts[shard.part] = counts.get(shard.part, 0) + shard.examples
        return counts

    @property
    def bytes(self) -> int:
        """Bytes of all shards together."""
        return sum(shard.bytes for shard in self.shards)

    def write(self, folder: Path) -> None:
        """Writes the index file; the shards must be there already."""
        facts = {"format": FORMAT, "version": VERSION, "classes": len(self.class_names), "examples": self.examples}
        (folder / FILE).write_text(json.dumps(facts | asdict(self), indent=1))


def read(folder: str | Path) -> Manifest:
    """Reads the index file of a folder.

    Raises:
        InputError: there is none, it is damaged, or of a later version.
    """
    found = find(folder)
    if found is None:
        raise InputError(f"No shards with an index at {str(folder)!r}. Write some: tfgpu data write SOURCE OUT.")
    return found


def find(folder: str | Path) -> Manifest | None:
    """Reads the index file of a folder; None where there is none, or one that something else wrote.

    Raises:
        InputError: it is damaged or of a later version.
    """
    path = Path(folder) / FILE
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_text())
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            return None
        if facts["version"] > VERSION:
            raise InputError(f"{path} was written by a later tfgpu. Upgrade tfgpu, or write the shards again.")
        shards = tuple(_shard(facts) for facts in facts["shards"])
        fields = {name: facts[name] for name in ("name", "features", "dtype")}
        _check_facts(facts, max((shard.bytes for shard in shards), default=0))
        return Manifest(**fields, shape=tuple(facts["shape"]), class_names=tuple(facts["class_names"]), shards=shards)
    except InputError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, zlib.error) as error:
        raise InputError(
            f"{path} is damaged: {' '.join(str(error).split())}. Copy it again, or remove it and read without it."
        ) from error


def _check_facts(facts: Mapping[str, Any], most: int) -> None:
    """Refuses what would fail, or take any memory, only where the records are read.

    Args:
        most: values that a record may have.

    Raises:
        ValueError, KeyError, TypeError, AttributeError: something is of another kind than the writer's.
    """
    features = facts["features"]
    kind, shape = features["kind"], features["shape"]
    for text in (facts["name"], features["x"], features["y"], *facts["class_names"]):
        text.encode()
    if kind not in _KINDS or isinstance(facts["class_names"], str):
        raise ValueError(f"records of the kind {kind!r} are not known, or the classes have no names")
    if facts["dtype"] is not None and facts["dtype"] not in _DTYPES:
        raise ValueError(f"{facts['dtype']!r} is no type of numbers")
    sides = [*shape, *(side for side in facts["shape"] if side is not None), features["labels"]]
    if any(isinstance(side, bool) or not isinstance(side, int) or side < 0 for side in sides if side is not None):
        raise ValueError(f"{sides} are no sizes")
    if kind != "bytes_list" and math.prod(shape) > most:
        raise ValueError(f"an example of {shape} is larger than a file")


def _shard(facts: Mapping[str, object]) -> Shard:
    """A shard of an index that anybody may have written.

    Raises:
        ValueError, TypeError: it is none; or it leads out of the folder, or to more memory than the file takes.
    """
    shard = Shard(**facts)  # type: ignore[arg-type]
    numbers = (shard.examples, shard.bytes)
    if any(isinstance(number, bool) or not isinstance(number, int) or number < 0 for number in numbers):
        raise ValueError(f"a shard has {shard.examples!r} examples and {shard.bytes!r} bytes")
    is_text = isinstance(shard.file, str) and shard.file != ""
    if not is_text or Path(shard.file).name != shard.file or "\0" in shard.file:
        raise ValueError(f"{shard.file!r} is no name of a file in its folder")
    if shard.examples * FRAME > shard.bytes:
        raise ValueError(f"{shard.file} has more examples than bytes for them")
    lengths = unpack(shard.lengths, shard.examples)
    if len(lengths) != shard.examples:
        raise ValueError(f"{shard.file} does not have a length for each record")
    if shard.labels is not None and len(unpack(shard.labels, shard.examples)) != shard.examples:
        raise ValueError(f"{shard.file} does not have a label for each record")
    if shard.part not in PARTS or not isinstance(shard.sha256, str):
        raise ValueError(f"{shard.file} is of the part {shard.part!r}, or has no checksum")
    if (lengths < 0).any() or lengths.sum() + FRAME * shard.examples != shard.bytes:
        raise ValueError(f"{shard.file} does not have as many bytes as its records")
    return shard


def of_files(paths: Sequence[Path]) -> Manifest | None:
    """Finds the index that lists all of these files; None where there is none.

    Raises:
        InputError: the index is damaged or of a later version.
    """
    folders = {path.parent for path in paths}
    found = find(folders.pop()) if len(folders) == 1 else None
    if found is None or not {path.name for path in paths} <= {shard.file for shard in found.shards}:
        return None
    return found


def check_shards(folder: str | Path) -> Manifest:
    """Reads all shards of a folder and compares their checksums with its index.

    Args:
        folder: what `write_shards` wrote.

    Returns:
        The index.

    Raises:
        InputError: there is no index, or a shard is missing or damaged; it is named.
    """
    listed = read(folder)
    check_files(folder, listed, checksums=True)
    return listed


def check_files(folder: str | Path, listed: Manifest, *, checksums: bool = False) -> None:
    """Compares a folder's shards with its index.

    Args:
        folder: where they lie.
        listed: its index.
        checksums: whether to read the files and compare their checksums, rather than their sizes only.

    Raises:
        InputError: a shard is missing, damaged, or not in the index; it is named.
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


def check_shard(path: Path, shard: Shard, *, checksum: bool = False) -> None:
    """Raises `InputError` if a file is not as the index says."""
    mend = f"Copy it again from where it was written, or write the shards again. ({FILE} says what it should be.)"
    if not path.is_file():
        raise InputError(f"The shard {path} is missing. {mend}")
    size = path.stat().st_size
    if size != shard.bytes:
        raise InputError(f"The shard {path} is damaged: it has {size} bytes, not {shard.bytes}. {mend}")
    if checksum and digest(path) != shard.sha256:
        raise InputError(f"The shard {path} is damaged: its checksum is not the one of what was written. {mend}")


def check_shard_count(shards: int) -> None:
    """Raises `InputError` unless `shards` is a whole number from 1."""
    if isinstance(shards, bool) or not isinstance(shards, (int, np.integer)) or not 1 <= shards <= 99999:
        raise InputError(f"`shards` must be a whole number from 1 to 99999. Received: {shards!r}. Try 8.")


def check_output(out: str | Path, *, overwrite: bool = False) -> Path:
    """Refuses a folder that may not be written, before anything is.

    Args:
        out: the folder.
        overwrite: whether shards in it may be replaced.

    Returns:
        Its path.

    Raises:
        InputError: it is a file; or it has files, and they are not shards or may not be replaced.
    """
    path = Path(out).expanduser().resolve()
    if path.exists() and not path.is_dir():
        raise InputError(f"The output {str(path)!r} is a file. Give a folder.")
    if not path.is_dir() or not any(path.iterdir()):
        return path
    listed = find(path)
    if listed is None:
        raise InputError(f"{str(path)!r} is not empty and holds no shards with an index. Give another folder.")
    if not overwrite:
        raise InputError(f"{str(path)!r} holds shards. Add --overwrite to replace them, or give another folder.")
    others = sorted({p.name for p in path.iterdir()} - {FILE} - {shard.file for shard in listed.shards})
    if others:
        raise InputError(
            f"{str(path)!r} also holds {others[0]!r}, so it is not replaced. Move that away, or give another folder."
        )
    return path


def digest(path: Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pack(numbers: np.ndarray) -> str:
    """Makes whole numbers a short text.

    Example:
        >>> unpack(pack(np.array([7, 7, 9]))).tolist()
        [7, 7, 9]
    """
    return base64.b64encode(zlib.compress(np.asarray(numbers, "<i8").tobytes())).decode()


def unpack(text: str, most: int | None = None) -> np.ndarray:
    """Reads what `pack` wrote: int64 [n].

    Args:
        text: the short text.
        most: how many numbers there may be: a short text can stand for many gigabytes of zeros.

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
