"""A wish to leave: a signal makes it in one process, and all workers act on it after the same block of steps.

The handler only notes the wish. It travels with the numbers that the workers sum at each block's end anyway, so nobody
leaves while others still wait for it in a collective.
"""

import atexit
import contextlib
import logging
import signal
import threading
from collections.abc import Iterator, Sequence

from tfgpu.errors import Preempted

_log = logging.getLogger(__name__)


class Leaving:
    """The wish of one run to leave.

    Args:
        spans: the run spans several processes, which must agree first.
        go_on: how the run is taken up again, for the message.

    Attributes:
        is_wished: this process was asked to leave.
        is_agreed: all processes of the run know of it.
        name: the signal's name.
        is_left: the run ends by `Preempted`.
    """

    def __init__(self, *, spans: bool, go_on: str = "Start the same command again to go on."):
        self._spans, self._go_on = spans, go_on
        self.is_wished = self.is_agreed = self.is_left = False
        self.name = "another worker's signal"

    @property
    def is_due(self) -> bool:
        """Whether to leave now: where several processes train together, all of them say the same."""
        return self.is_agreed if self._spans else self.is_wished

    @contextlib.contextmanager
    def listening(self, signals: Sequence[signal.Signals]) -> Iterator[None]:
        """Takes the signals for wishes for the length of the block; further ones change nothing.

        Schedulers repeat their signal, so a second one must not end the process while it saves. Where one has come,
        further ones are ignored to the process's end: Python would die of one that comes then, with another exit code.

        TensorFlow's strategies of several workers put a handler of their own in the place of Python's when they are
        made: this one must come later. Python allows handlers in the main thread alone; in others nothing is done.

        Raises:
            Preempted: at the end of a block that ended well although a signal had come.
        """
        before: dict[int, object] = {}
        if threading.current_thread() is threading.main_thread():
            before = {number: signal.getsignal(number) for number in signals}

        def wish(number: int, frame) -> None:
            self.is_wished, self.name = True, signal.Signals(number).name

        try:
            for number in before:
                signal.signal(number, wish)
            yield
        finally:
            for number, handler in before.items():
                if self.is_wished:  # a function, which processes that are started from here do not inherit
                    signal.signal(number, lambda *_: None)
                    atexit.register(signal.signal, number, signal.SIG_IGN)
                else:
                    signal.signal(number, handler or signal.SIG_DFL)  # None: somebody's who is not Python
        if self.is_wished and not self.is_left:
            raise self.leave("The training was over.")

    def leave(self, what_is_saved: str) -> Preempted:
        """The exception that ends the process, and says why."""
        self.is_left = True
        message = f"Asked to leave by {self.name}. {what_is_saved} {self._go_on}"
        _log.warning(message)
        return Preempted(message)
