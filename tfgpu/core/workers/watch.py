"""A thread that ends collectives in which this worker waits for workers that do something else, or have ended.

It waits for the end of another script, one question a second, and looks at the other workers' news only if this one has
been in the same collective for some seconds. Ending a collective makes TensorFlow raise an error, which `explained`
replaces.
"""

import atexit
import json
import os
import signal
import sys
import threading
import time

import tensorflow as tf

from tfgpu.compat import coordination, slots
from tfgpu.compat.tensorflow import runtime
from tfgpu.core import extensions, step_blocks
from tfgpu.core.feed import sharded_dataset
from tfgpu.core.workers import ledger, sentences, user_line
from tfgpu.core.workers.ledger import SLICE_S, Ledger
from tfgpu.core.workers.sentences import Event

_COLLECTIVE = "ollective"
_OF_PEERS = tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.CancelledError
PATIENCE = 5
"""So many looks, a second apart, must find the same worker in the same collective behind the others' news."""
ASK_S = 6.0
"""Seconds in which the others tell why a collective failed."""
LEAVE_S = 8.0
"""Seconds for which the first worker, in whose process the texts are, waits for the others to read that it ends."""


def watch(kept: Ledger) -> None:
    """Starts the thread, and makes this process tell its end."""
    os.register_at_fork(after_in_child=_end_at_sigterm)
    thread = threading.Thread(target=_Watch(kept).run, name="tfgpu-workers", daemon=True)
    thread.start()
    end = _End(kept, thread)
    slots.of(runtime()).end_of_script = end


def _end_at_sigterm() -> None:
    """Lets SIGTERM end a forked process, such as those of a `PyDataset` with `use_multiprocessing=True`.

    TensorFlow's strategy of several workers installs a handler that only takes a note of the signal. Forked processes
    inherit it, and `multiprocessing.Pool` waits forever for those that it terminates: the script would not end.
    """
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # as Python knows it; no handler of the script's own
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Watch:
    def __init__(self, kept: Ledger):
        self._ledger, self._seen, self._looks, self._has_read_leader = kept, None, 0, False

    def run(self) -> None:
        try:
            while self._ledger.is_open and not self._ledger.closing.is_set():
                self._listen()
                self._look()
        except coordination.Unreachable:
            self._ledger.is_open = False

    def _listen(self) -> None:
        """Waits for the end of another script, or for a second."""
        mine = self._ledger
        if mine.ended is None:
            text = coordination.get("ended", SLICE_S)
            if text is not None and (found := json.loads(text))["rank"] != mine.rank:
                mine.ended = found["rank"], sentences.read(found["event"])
        else:
            mine.closing.wait(SLICE_S)
        if mine.ended is not None and mine.rank and not self._has_read_leader and mine.is_open:
            self._has_read_leader = coordination.get("end/0") is not None
            if self._has_read_leader:
                coordination.put(f"read/{mine.rank}", "")

    def _look(self) -> None:
        """Ends the collective in which this worker waits in vain."""
        mine, wait = self._ledger, self._ledger.wait
        if wait is None and mine.ended is None or mine.is_aborted:
            self._looks = 0
            return
        if self._seen is not wait:
            self._seen, self._looks = wait, 0
        self._looks += 1
        if self._looks < 2:
            return
        error, news = None, mine.news()
        if wait is not None:
            mine.answer(wait)
            error = mine.judged() or mine.data_ended(wait) or mine.plans_differ(wait)
        if error is None and news is None:
            self._looks = 1
        elif error is not None or self._looks > PATIENCE:
            error = error or sentences.apart(*news, mine.name, mine.here())
            if wait is mine.wait:
                mine.failure = error if wait is None else mine.judge(error)
                mine.is_aborted = True
                coordination.abort_collectives(str(mine.failure))


class _End:
    """Tells the other workers that this script has ended, and how."""

    def __init__(self, kept: Ledger, thread: threading.Thread):
        self._ledger, self._thread, self._event = kept, thread, Event("ended its script")
        stock = sys.excepthook

        def hook(kind, error, traceback):
            note_error(error)
            stock(kind, error, traceback)

        sys.excepthook = hook
        atexit.register(self.tell)

    def by_error(self, error: BaseException) -> None:
        """Notes the error that ends the script; to one of TensorFlow's it adds who does something else."""
        self._event = sentences.of_error("ended its script", error)
        # The end of a worker's process may end a collective before this worker's thread has heard of it.
        failure = explained(error, None) if isinstance(error, tf.errors.OpError) else None
        if failure is not None and str(failure) not in getattr(error, "__notes__", ()):
            error.add_note(str(failure))

    def tell(self) -> None:
        """Tells the others; the first worker waits until they have read it, because its process holds the texts."""
        mine, text = self._ledger, self._event.as_json()
        mine.closing.set()
        if not mine.is_open:
            return
        try:
            coordination.put(f"end/{mine.rank}", text, LEAVE_S)
            coordination.put("ended", json.dumps({"rank": mine.rank, "event": text}), LEAVE_S)
            until = time.monotonic() + LEAVE_S
            for rank in range(1, len(mine.names)) if mine.rank == 0 else ():
                while time.monotonic() < until:
                    if coordination.get(f"end/{rank}", 0.1) is not None or coordination.get(f"read/{rank}") is not None:
                        break
        except coordination.Unreachable:
            pass
        mine.is_open = False
        self._thread.join(2 * SLICE_S)  # which is in TensorFlow's runtime


def end_collectives(why: str) -> None:
    """Ends the collectives in which this process waits for other workers, and all later ones."""
    mine = ledger.current()
    if mine is not None and not mine.is_aborted:
        mine.is_aborted = True
        coordination.abort_collectives(why)


def note_error(error: BaseException) -> None:
    """Notes the error that ends the script, so that the other workers can name it."""
    end = slots.get(runtime(), "end_of_script")
    if end is not None:
        end.by_error(error)


def explained(error: tf.errors.OpError, model: object) -> Exception | None:
    """The error to raise in place of TensorFlow's where the workers did different things; else None."""
    mine = ledger.current()
    if mine is None or not (_COLLECTIVE in error.message or isinstance(error, _OF_PEERS)):
        return None
    if mine.failure is not None:
        return mine.failure
    if mine.ended is None and (gone := mine.silent(error)) is not None:
        # All others get the same error from TensorFlow, and its service may not answer any more.
        mine.failure, mine.is_open = gone, False
        return gone
    line = user_line.of_error(error.__traceback__) or user_line.of_thread()
    if mine.is_open:
        try:
            return _asked(mine, line)
        except coordination.Unreachable:
            mine.is_open = False
    if mine.ended is not None:  # The texts have ended with the first worker; this one has heard so much.
        rank, event = mine.ended
        mine.failure = sentences.apart(mine.names[rank], event, mine.name, mine.here(line))
    return mine.failure


extensions.error_explanations.register(explained, order=10)


def _asked(mine: Ledger, line: str) -> Exception | None:
    """Asks the other workers why a collective failed."""
    here = mine.here(line)
    coordination.put(f"failed/{mine.count}/{mine.rank}", json.dumps({"more": _has_more(), "event": here.as_json()}))
    until, found = time.monotonic() + ASK_S, {}
    while time.monotonic() < until and len(found) < len(mine.names):
        if (error := mine.judged()) is not None:
            mine.failure = error
            return error
        if (news := mine.news()) is not None:
            return mine.judge(sentences.apart(*news, mine.name, here))
        for rank, name in enumerate(mine.names):
            if name not in found and (text := coordination.get(f"failed/{mine.count}/{rank}", 0.2)) is not None:
                found[name] = json.loads(text)
    events = {name: sentences.read(facts["event"]) for name, facts in found.items()}
    if len(found) == len(mine.names) and (error := sentences.difference(events)) is not None:
        return mine.judge(error)
    short, long = ([name for name, facts in found.items() if facts["more"] is more] for more in (False, True))
    if short and long:
        return mine.judge(sentences.data_ended(short[0], long[0], events[long[0]]))
    return mine.lost([rank for rank, name in enumerate(mine.names) if name not in found])


def _has_more() -> bool | None:
    """Whether this worker's data has another batch; None if that is unknown."""
    run = step_blocks.current()
    iterator = run.block.iterator if run is not None and run.block is not None else None
    source, _ = sharded_dataset.source_of(iterator)
    if not isinstance(source, tf.data.Iterator):
        return None
    answer: list[bool] = []
    thread = threading.Thread(target=lambda: answer.append(next(source, None) is not None), daemon=True)
    thread.start()
    thread.join(ASK_S / 3)
    return answer[0] if answer else None
