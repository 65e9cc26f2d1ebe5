"""Process trees (descendants, orphans, children that die with their parent), and signals as events of a loop."""

import contextlib
import ctypes
import os
import signal
import socket
import threading
import time

_SAME_S = 0.3
_DEATH_SIGNAL = 1
_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Makes this process the parent of every descendant whose own parent dies.

    Source: PR_SET_CHILD_SUBREAPER in prctl(2).
    """
    _prctl(_SUBREAPER, 1)


def die_with_parent(number: int, parent: int) -> None:
    """Asks the kernel to signal this process when its parent ends, however it ends.

    Args:
        number: the signal.
        parent: the parent's process ID; if the parent has already ended, the signal is sent at once.

    Source: PR_SET_PDEATHSIG in prctl(2).
    """
    _prctl(_DEATH_SIGNAL, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def descendants(root: int) -> list[int]:
    """Lists the running processes that descend from `root`, in no particular order; zombies do not run."""
    import psutil  # the doctor imports this module even if psutil is missing

    found = []
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(root).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found.append(process.pid)
    return found


def kill_descendants(limit_s: float = 5.0) -> int:
    """Kills all descendants of this process until none are left.

    Args:
        limit_s: seconds after which it gives up.

    Returns:
        How many there were.
    """
    seen: set[int] = set()
    deadline = time.monotonic() + limit_s
    while alive := descendants(os.getpid()):
        seen.update(alive)
        for pid in alive:
            send(pid, signal.SIGKILL)
        reap()
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
    reap()
    return len(seen)


def reap() -> dict[int, int]:
    """Collects the children that have ended: exit codes by process ID, negative for a signal."""
    codes = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            codes[pid] = os.waitstatus_to_exitcode(status)
    return codes


def send(pid: int, number: int) -> None:
    """Sends a signal; does nothing if the process has ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def send_to_group(leader: int, number: int) -> None:
    """Sends a signal to all processes of a group; does nothing if they have ended."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, number)


def described(code: int) -> str:
    """Describes how a process ended.

    Args:
        code: its exit code, negative for a signal.

    Example:
        >>> described(-9), described(3)
        ('killed by SIGKILL', 'exit code 3')
    """
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def as_exit_code(code: int) -> int:
    """Converts an exit code to the shell's form: 128+n for signal n."""
    return code if code >= 0 else 128 - code


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


class Signals:
    """Handles SIGINT, SIGTERM and SIGHUP while it is open; signals that were ignored (by `nohup`, say) stay ignored.

    Outside `with`, it handles none.

    Attributes:
        first: the first signal that arrived, or None.
        insists: whether Ctrl-C was pressed again after it.
    """

    def __init__(self):
        self.first: int | None = None
        self.insists = False
        self._came_at = 0.0
        self._before: dict[int, object] = {}
        self._waker, self.woken = socket.socketpair()
        for each in (self._waker, self.woken):
            each.setblocking(False)

    def __enter__(self) -> "Signals":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python delivers signals to the main thread only.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        self.close()

    def close(self) -> None:
        """Closes the sockets."""
        self._waker.close()
        self.woken.close()

    def wait(self, seconds: float) -> None:
        """Waits for that time, or until a signal arrives."""
        end = time.monotonic() + seconds
        while self.first is None and time.monotonic() < end:
            time.sleep(min(0.05, max(0.0, end - time.monotonic())))

    def wake(self, *_) -> None:
        """Makes `woken` readable; may handle a further signal."""
        with contextlib.suppress(OSError):  # enough bytes are waiting, or it is closed
            self._waker.send(b"!")

    def empty(self) -> None:
        """Reads the bytes that woke the loop."""
        with contextlib.suppress(BlockingIOError):
            while self.woken.recv(64):
                pass

    def _take(self, number: int, _) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = number
        elif number == signal.SIGINT and now - self._came_at > _SAME_S:  # `timeout` sends each signal twice.
            self.insists = True
        self._came_at = now
        self.wake()
