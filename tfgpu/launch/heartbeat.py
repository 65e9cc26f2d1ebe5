"""Heartbeats: a process touches a file every second, and its supervisor watches the file for a timeout.

The supervisor names the file in TFGPU_HEARTBEAT. Heartbeats stop when the process is stopped (SIGSTOP) or its machine
hangs; a process that waits for its peers still sends them.
"""

import logging
import os
import threading
import time
from pathlib import Path

HEARTBEAT = "TFGPU_HEARTBEAT"
PERIOD_S = 1.0
LOOK_S = 0.5
"""Seconds between two checks of a heartbeat."""
_log = logging.getLogger(__name__)


def beat(path: str | os.PathLike | None = None, *, period_s: float = PERIOD_S) -> threading.Event | None:
    """Starts the heartbeat in a daemon thread.

    Args:
        path: the file, created if missing; its directory must exist. None uses TFGPU_HEARTBEAT, and does nothing
            if that is not set.
        period_s: seconds between two heartbeats.

    Returns:
        An event that stops the heartbeat; None outside a launch.

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
    """Touches the file once. A full or missing disk is logged once and does not stop training."""
    try:
        file.touch()
    except OSError as error:
        if say:
            _log.warning("The heartbeat file %s cannot be written: %s.", file, error)
        return False
    return True


class Watch:
    """Watches the heartbeat file of one process.

    Only changes of the file's time count, not its distance from a clock, which may be set during a run. At most a
    second counts between two checks: a supervisor that was suspended itself saw no heartbeats.

    Args:
        path: the file.
        timeout_s: seconds without a heartbeat after the first one; 0: no timeout.

    Attributes:
        quiet_s: seconds since the last heartbeat; 0 before the first.
    """

    def __init__(self, path: Path, timeout_s: float):
        self.path, self.quiet_s = path, 0.0
        self._timeout_s, self._seen = timeout_s, None
        self._looked_at = time.monotonic()

    def is_late(self) -> bool:
        """Checks the file. Call it every `LOOK_S`."""
        now = time.monotonic()
        passed_s, self._looked_at = min(now - self._looked_at, 2 * LOOK_S), now
        try:
            seen = self.path.stat().st_mtime_ns
        except OSError:
            seen = None
        if seen is None or seen != self._seen:
            self._seen, self.quiet_s = seen, 0.0
        else:
            self.quiet_s += passed_s
        return 0 < self._timeout_s <= self.quiet_s
