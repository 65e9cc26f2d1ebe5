"""Ctrl-C and SIGTERM as events of a loop."""

import contextlib
import signal
import socket
import threading
import time

_SAME_S = 0.3


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
