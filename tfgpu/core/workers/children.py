"""Processes that this worker forks, such as those of a `PyDataset` with `use_multiprocessing=True`."""

import os
import signal


def end_at_sigterm() -> None:
    """Lets SIGTERM end forked processes, from now on.

    TensorFlow's strategy of several workers installs a handler that only takes a note of the signal. Forked processes
    inherit it, and `multiprocessing.Pool` waits forever for those that it terminates: the script would not end.
    """
    os.register_at_fork(after_in_child=_reset)


def _reset() -> None:
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # as Python knows it; no handler of the script's own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
