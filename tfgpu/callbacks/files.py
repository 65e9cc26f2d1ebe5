"""Writing a file so that readers see the old content or the new one, never half of it."""

import os
from pathlib import Path


def replace_text(path: str | Path, text: str) -> None:
    """Writes text beside its place and renames it there.

    Args:
        path: the file to make or replace; its folder exists.
        text: the whole content, written as UTF-8.

    Example:
        >>> replace_text("metrics.csv", "epoch,loss\\n1,0.5\\n")
    """
    target = Path(path)
    beside = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, target)
    finally:
        beside.unlink(missing_ok=True)
