"""What trials have found, in the user's cache folder: a second run of the same code does not repeat them.

The folder is `tfgpu/trials` in `XDG_CACHE_HOME` (or `~/.cache`), or the one that `TFGPU_CACHE` names; with
`TFGPU_CACHE=off` nothing is kept. Each verdict is a file named by a digest of the code that was tried, of what it was
given, and of the versions of everything that takes part. Code without a digest is tried in each run, and so is one
whose file is damaged. A file that cannot be written costs another trial, and no more. Of several workers each tries
for itself: a verdict that one of them has kept and another has not must not part them.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfgpu import atomic
from tfgpu.core import replication, step_context
from tfgpu.core.trial_cache import code_digest

Found = TypeVar("Found")
_log = logging.getLogger(__name__)
_MOST = 4096  # files
_OFF = "off"


def folder() -> Path | None:
    """Where verdicts are kept; None where the user wants none."""
    chosen = os.environ.get("TFGPU_CACHE", "")
    if chosen == _OFF:
        return None
    if chosen:
        return Path(chosen).expanduser() / "trials"
    home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(home).expanduser() / "tfgpu" / "trials"


def found(
    kind: str,
    things: tuple,
    trial: Callable[[], Found],
    pack: Callable[[Found], dict | None],
    unpack: Callable[..., Found],
    *,
    weights: bool = False,
) -> Found:
    """What a trial finds, or has found in an earlier run.

    Args:
        kind: of the trial.
        things: on which its verdict depends: functions, layers, shapes and other values.
        trial: makes the trial.
        pack: from what was found to plain values by name; None, for code that could not be tried, is not kept.
        unpack: from those values to what was found.
        weights: the code is tried on the weights that it has; see `code_digest.of`.
    """
    path = _path(kind, things, weights)
    kept = None if path is None else _read(path)
    if kept is not None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return unpack(**kept)
    result = trial()
    packed = None if path is None else pack(result)
    if packed is not None:
        _write(path, packed)
    return result


def _path(kind: str, things: tuple, weights: bool) -> Path | None:
    where = folder()
    is_alone = not replication.spans_processes(tf.distribute.get_strategy())
    if where is None or not is_alone or step_context.current().is_trying:
        return None
    config = keras.config
    settings = config.dtype_policy().name, config.floatx(), config.epsilon(), config.image_data_format()
    digest = code_digest.of_or_none(kind, (*_versions(), *settings), things, weights=weights)
    return None if digest is None else where / f"{digest}.json"


@functools.cache
def _versions() -> tuple:
    """Of Python, the libraries and tfgpu, whose own code counts besides."""
    root, code = Path(__file__).resolve().parents[2], hashlib.blake2b(digest_size=16)
    for path in sorted(root.rglob("*.py")):
        code.update(path.read_bytes())
    libraries = tf.__version__, keras.__version__, np.__version__
    return platform.python_version(), platform.machine(), *libraries, code.hexdigest()


def _read(path: Path) -> dict | None:
    """Reads an entry; None if the file is missing or damaged."""
    try:
        entry = json.loads(path.read_text(encoding="utf-8"))
        return entry["found"] if entry["check"] == _check(entry["found"]) else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _write(path: Path, result: dict) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _prune(path.parent)
        atomic.write_text(path, json.dumps({"found": result, "check": _check(result)}))
    except OSError as error:
        _log.debug("What a trial has found could not be kept: %s", error)


def _check(result: object) -> str:
    """By which a damaged file is found."""
    return hashlib.blake2b(json.dumps(result, sort_keys=True).encode(), digest_size=8).hexdigest()


def _prune(where: Path) -> None:
    """Removes the older half of the files once there are many."""
    with os.scandir(where) as entries:
        files = [(entry.stat().st_mtime, entry.path) for entry in entries if entry.name.endswith(".json")]
    for _, path in sorted(files)[: len(files) // 2] if len(files) >= _MOST else ():
        atomic.remove(Path(path))
