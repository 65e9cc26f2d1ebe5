"""Coordinated preemption: a signal reaches one process, and all workers stop after the same block of steps.

The signal handler only sets a flag. The workers exchange it with the numbers that they sum at the end of each block
anyway, so none of them leaves while the others wait for it in a collective.
"""

import atexit
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator, Sequence

from tfgpu.errors import Preempted

_log = logging.getLogger(__name__)


class Preemption:
    """The preemption of one run.

    Args:
        spans: whether the run spans several processes, which must agree first.
        go_on: how to resume the run, for the message.
        must_stop: whether this process has a reason of its own to stop a run that spans several.

    Attributes:
        is_agreed: all processes of the run know that one of them must stop.
        name: the name of the signal.
        is_left: the run ends with `Preempted`.
    """

    def __init__(self, *, spans: bool, go_on: str, must_stop: Callable[[], bool]):
        self._spans, self._go_on, self._must_stop = spans, go_on, must_stop
        self._is_asked = self.is_agreed = self.is_left = False
        self.name = "another worker's signal"

    @property
    def is_requested(self) -> bool:
        """Whether this process was asked to stop, or must."""
        return self._is_asked or self._must_stop()

    @property
    def is_due(self) -> bool:
        """Whether to stop now; the same on all processes that train together."""
        return self.is_agreed if self._spans else self._is_asked

    @contextlib.contextmanager
    def listening(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Handles the signals in the block; only the first one has an effect.

        Schedulers repeat their signal, so a second one must not kill the process while it saves. After a signal,
        further ones are ignored until the process has ended: while Python shuts down, one would change the exit code.

        Multi-worker strategies of TensorFlow install a handler of their own when they are created: this one must be
        installed later. Python allows handlers in the main thread only; in other threads this does nothing.

        Raises:
            Preempted: at the end of a block that completed although a signal had arrived.
        """
        before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in signals}

        def handle(number: int, frame) -> None:
            self._is_asked, self.name = True, signal.Signals(number).name

        try:
            for number in before:
                signal.signal(number, handle)
            yield
        finally:
            for number, handler in before.items():
                if self._is_asked:  # a function: child processes do not inherit it
                    signal.signal(number, lambda *_: None)
                    atexit.register(signal.signal, number, signal.SIG_IGN)
                else:
                    signal.signal(number, handler or signal.SIG_DFL)  # None: a handler that Python did not install
        if self._is_asked and not self.is_left:
            raise self.leave("The training was complete.")

    def leave(self, what_is_saved: str) -> Preempted:
        """The exception that ends the process and says why."""
        self.is_left = True
        message = f"Asked to leave by {self.name}. {what_is_saved} {self._go_on}"
        _log.warning(message)
        return Preempted(message)
