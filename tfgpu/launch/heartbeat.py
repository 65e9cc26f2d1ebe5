"""A sign of life: while the process runs, a file is touched every second; a stopped process touches nothing.

A supervisor names the file in TFGPU_HEARTBEAT and looks at its time. It tells a process that lives from one that is
stopped (SIGSTOP) or whose machine hangs, not one that trains from one that waits.
"""

import logging
import os
import threading
from pathlib import Path

HEARTBEAT = "TFGPU_HEARTBEAT"
PERIOD_S = 1.0
_log = logging.getLogger(__name__)


def beat(path: str | os.PathLike | None = None, *, period_s: float = PERIOD_S) -> threading.Event | None:
    """Starts to touch a file, from a thread that ends with the process.

    Args:
        path: the file, made where it is missing; its folder must be there. `None` takes TFGPU_HEARTBEAT, and does
            nothing where that is not set.
        period_s: seconds between two touches.

    Returns:
        What ends it when set; None where there is nothing to touch.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     end = beat(Path(folder) / "worker0", period_s=0.1)
        ...     Path(folder, "worker0").is_file()
        ...     end.set()
        True
    """
    path = os.environ.get(HEARTBEAT, "") if path is None else path
    if not os.fspath(path):
        return None
    file, end = Path(path), threading.Event()
    worked = _touch(file, say=True)

    def go_on() -> None:
        nonlocal worked
        while not end.wait(period_s):
            worked = _touch(file, say=worked)

    threading.Thread(target=go_on, name="heartbeat", daemon=True).start()
    return end


def _touch(file: Path, *, say: bool) -> bool:
    """Touches once; a disk that is full or gone is said once, and is no reason to end a training."""
    try:
        file.touch()
    except OSError as error:
        if say:
            _log.warning("The sign of life %s cannot be given: %s.", file, error)
        return False
    return True
