"""The calls that all workers make together, by number: each worker says which is its next, and compares.

A worker that does what the others don't would otherwise leave them waiting in a collective, or meet them in another
one. They compare at the begin of `fit`, `evaluate` and `predict` and at the end of each epoch, by a text through
TensorFlow's coordination service: a few milliseconds on the host, no collective, nothing in a step. The error of a
call, its return and the end of the script are sent without waiting. `watch.py` looks for workers that wait in vain.

The texts, all below one prefix: `event/N/RANK`, a worker's event number N; `news/N`, the first of these to come;
`verdict/N`, whether they are alike; `end/RANK` and `ended`, the end of a script, and of the first one to end.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.compat import coordination, distribute, slots
from tfgpu.compat.tensorflow import runtime
from tfgpu.core import replication
from tfgpu.core.workers import sentences, user_line
from tfgpu.core.workers.batch_count import BatchCount
from tfgpu.core.workers.sentences import Event
from tfgpu.errors import MachineError, silent_task

SLICE_S = 1.0
"""Seconds of one wait: Ctrl-C is heard in between."""
PROBE_EVERY_S = 5.0
"""While workers wait for one, they ask in this interval whether its server answers."""


@dataclass(frozen=True, eq=False)
class Wait:
    """That a thread is in a collective.

    Attributes:
        thread: its `ident`.
        step: the last step of the epoch whose callbacks have run; -1 before the first.
        batches: counts those that are read there, if any are.
        plan: steps before, and in, the call that runs there, if it runs steps.
    """

    thread: int
    step: int
    batches: BatchCount | None = None
    plan: tuple[int, int] | None = None


class Ledger:
    """This worker's part of the ledger.

    Args:
        names: the workers' names, by rank.
        tasks: TensorFlow's names of their tasks.
        rank: this worker's.

    Attributes:
        count: events so far.
        calls: the calls that the script is in, such as "`fit`", outermost first.
        step: as of `Wait`.
        wait: the collective in which a thread waits.
        failure: the error that the workers have agreed on.
        is_aborted: this process's collectives have been ended, for good.
        ended: rank and event of the first other worker whose script has ended.
        is_open: the coordination service answers.
        closing: set when this script ends.
    """

    def __init__(self, names: list[str], tasks: list[str], rank: int):
        self.names, self.tasks, self.rank = names, tasks, rank
        self.count, self.calls, self.is_open = 0, [], True
        self.step = -1
        self.wait: Wait | None = None
        self.failure: Exception | None = None
        self.is_aborted = False
        self._last: Wait | None = None
        self.ended: tuple[int, Event] | None = None
        self.closing = threading.Event()
        self._kept: list[str] = []

    @property
    def name(self) -> str:
        """This worker's."""
        return self.names[self.rank]

    def meet(self, what: str, facts: dict[str, str] | None = None, *, stop: bool = False) -> bool:
        """Waits for all workers to do the same; returns whether one of them has set `stop`.

        Raises:
            InputError: they do not.
            MachineError: a worker has failed, or no longer answers.
        """
        with self._until_closed():
            self._tell(Event(what, user_line.of_thread(), facts or {}, stop))
            text = self._collect() if self.rank == 0 else self._await(self._verdict, [0])
            if (error := sentences.from_text(text)) is not None:
                self.failure = error
                raise error
            self.failure = self.failure if self.is_aborted else None
            self._forget()
            return json.loads(text)["stop"]
        return stop

    def tell(self, what: str, line: str, *, is_failure: bool = False) -> None:
        """Says what this worker does, and waits for nobody.

        Args:
            what: as of `Event`.
            line: as of `Event`.
            is_failure: as of `Event`.
        """
        with self._until_closed():
            self._tell(Event(what, line, is_failure=is_failure))

    @contextlib.contextmanager
    def waiting(self, batches: BatchCount | None = None, plan: tuple[int, int] | None = None) -> Iterator[None]:
        """Around a collective: the thread of `watch.py` ends it if this worker would wait in vain.

        Args:
            batches: counts those that are read there.
            plan: as of `Wait`.

        Raises:
            InputError, MachineError: it has.
        """
        if self.wait is not None:
            yield
            return
        self.wait = self._last = Wait(threading.get_ident(), self.step, batches, plan)
        try:
            yield
        except tf.errors.OpError:
            if self.failure is None:
                raise
            raise self.failure from None
        finally:
            self.wait = None

    def here(self, line: str | None = None) -> Event:
        """Where the worker waits now; the line is asked for if it is not given."""
        thread = threading.main_thread().ident if self.wait is None else self.wait.thread
        place = f"in {' in '.join(reversed(self.calls))}" if self.calls else "for it"
        if self.calls and self._last is not None:
            begin, count = self._last.plan or (0, 0)
            place += f", in steps {begin + 1} to {begin + count}" if count else ", between steps"
        return Event(f"waited {place}", user_line.of_thread(thread) if line is None else line)

    def agrees_to_stop(self, step: int) -> bool:
        """Whether all workers stop after this step. Those that want to call it; the others' threads answer.

        Args:
            step: the last one that ran.
        """
        with self._until_closed():
            at = f"stop/{self.count}/{step}"
            if not self.is_open:
                return True
            self._put(f"{at}/{self.rank}", "yes")
            self._put(f"stop/{self.count}", str(step))
            for rank in range(len(self.names)):
                while (text := coordination.get(f"{at}/{rank}", SLICE_S)) is None:
                    if self.failure is not None or self.news() is not None or self.judged() is not None:
                        return False  # it is elsewhere, which the next collective shows
                if text != "yes":
                    return False
            return True
        return True

    def answer(self, wait: Wait) -> None:
        """Tells workers that want to stop after a step that this one, which waits in the next, does not."""
        step = coordination.get(f"stop/{self.count}")
        if step is not None and wait.step >= int(step):
            self._put(f"stop/{self.count}/{step}/{self.rank}", "no")

    def data_ended(self, wait: Wait) -> Exception | None:
        """The error if another worker has no batch for the step in which this one waits."""
        if wait.batches is None:
            return None
        count, has_ended = wait.batches.read()
        key = f"short/{self.count}"
        if has_ended:
            self._put(key, json.dumps({"rank": self.rank, "count": count}))
        elif (text := coordination.get(key)) is not None and (found := json.loads(text))["count"] < count:
            return sentences.data_ended(self.names[found["rank"]], self.name, self.here())
        return None

    def plans_differ(self, wait: Wait) -> Exception | None:
        """The error if another worker runs another number of steps in the call in which this one waits."""
        if wait.plan is None:
            return None
        begin, count = wait.plan
        key = f"plan/{self.count}/{begin}"
        if self._put(key, json.dumps({"rank": self.rank, "count": count})):
            return None
        found = json.loads(coordination.get(key, SLICE_S) or "{}")
        if found and found["count"] != count:
            return sentences.steps_differ(self.names[found["rank"]], found["count"], self.name, count, self.here())
        return None

    def news(self) -> tuple[str, Event] | None:
        """What another worker did that is beyond this one: its name and the event."""
        # Why it ended is there before its end is; on a busy machine a first, short look may miss it.
        text = coordination.get(self._news) or (self.ended and coordination.get(self._news, SLICE_S))
        if text is not None:
            found = json.loads(text)
            if found["rank"] != self.rank:
                return self.names[found["rank"]], sentences.read(found["event"])
        return None if self.ended is None else (self.names[self.ended[0]], self.ended[1])

    def judge(self, error: Exception) -> Exception:
        """Makes an error the verdict of the next event, unless there is one; returns the verdict."""
        coordination.put(self._next_verdict, sentences.as_text(error))
        self.failure = sentences.from_text(coordination.get(self._next_verdict, SLICE_S) or "") or error
        return self.failure

    def judged(self) -> Exception | None:
        """The error that is the verdict of the next event, if there is one."""
        text = coordination.get(self._next_verdict)
        return None if text is None else sentences.from_text(text)

    def _tell(self, event: Event) -> None:
        if not self.is_open:
            raise coordination.Unreachable
        self.count += 1
        text = event.as_json()
        self._put(f"event/{self.count}/{self.rank}", text)
        self._put(f"news/{self.count}", json.dumps({"rank": self.rank, "event": text}))

    def _put(self, key: str, text: str) -> bool:
        """Leaves a text, which is deleted later, unless there is one; returns whether there was none."""
        is_new = coordination.put(key, text)
        if is_new:
            self._kept.append(key)
        return is_new

    def _collect(self) -> str:
        """The first worker compares all events; the verdict."""
        events = {}
        for rank, name in enumerate(self.names):
            text = self._await(f"event/{self.count}/{rank}", [rank])
            if text.startswith('{"kind"'):  # another worker has found the difference
                return text
            events[name] = sentences.read(text)
            if (error := sentences.difference(events)) is not None:
                return self._decide(sentences.as_text(error))
        return self._decide(json.dumps({"kind": None, "stop": any(event.stop for event in events.values())}))

    def _await(self, key: str, ranks: list[int]) -> str:
        """The text of a key, or the verdict; an error's if a worker is gone that it takes.

        Args:
            key: of the text.
            ranks: of the workers without which it will not come.
        """
        probed = time.monotonic()
        while True:
            text = coordination.get(key, SLICE_S)
            if text is None:
                text = coordination.get(self._verdict)
            if text is not None:
                return text
            if self.rank and (error := self._difference_to_first()) is not None:
                return self._decide(sentences.as_text(error))
            if self.ended is not None:
                return self._decide(sentences.as_text(self._apart(*self.ended)))
            if time.monotonic() - probed > PROBE_EVERY_S:
                probed = time.monotonic()
                if (lost := self.lost(ranks)) is not None:
                    return self._decide(sentences.as_text(lost))

    def _difference_to_first(self) -> Exception | None:
        """The error if the first worker, which compares, does not wait but does something else."""
        texts = {
            name: coordination.get(f"event/{self.count}/{rank}")
            for rank, name in ((0, self.names[0]), (self.rank, self.name))
        }
        if None in texts.values():
            return None
        return sentences.difference({name: sentences.read(text) for name, text in texts.items()})

    def _apart(self, rank: int, event: Event) -> Exception:
        mine = coordination.get(f"event/{self.count}/{self.rank}")
        return sentences.apart(self.names[rank], event, self.name, sentences.read(mine) if mine else self.here())

    def lost(self, ranks: list[int] | None = None) -> MachineError | None:
        """The error for a worker whose server does not answer; None if all do."""
        for rank in range(len(self.names)) if ranks is None else ranks:
            if rank != self.rank and not coordination.answers(self.tasks[rank]):
                return self.gone(rank)
        return None

    def silent(self, error: tf.errors.OpError) -> MachineError | None:
        """The error for a worker that was silent for so long that TensorFlow gave it up; None if `error` names none."""
        task = silent_task(error.message)
        rank = 0 if task == "" else self.tasks.index(task) if task in self.tasks else self.rank
        return None if rank == self.rank else self.gone(rank)

    def gone(self, rank: int) -> MachineError:
        """The error for a worker that does not answer."""
        return MachineError(
            f"{self.names[rank]} no longer answers: it has ended, is stopped, or has lost its network. "
            "Start all workers again: training resumes from the newest checkpoint, if the script writes any."
        )

    def _decide(self, text: str) -> str:
        if not coordination.put(self._verdict, text):
            text = coordination.get(self._verdict, SLICE_S) or text
        self._kept.append(self._verdict)
        return text

    def _forget(self) -> None:
        """Deletes this worker's texts of earlier events, which all have read."""
        old = [key for key in self._kept if f"/{self.count}/" not in f"{key}/"]
        self._kept = [key for key in self._kept if key not in old]
        for key in old:
            coordination.delete(key)

    @contextlib.contextmanager
    def _until_closed(self) -> Iterator[None]:
        """Without the service the workers train as TensorFlow lets them, and its errors say who is lost."""
        try:
            yield
        except coordination.Unreachable:
            self.is_open = False

    @property
    def _verdict(self) -> str:
        return f"verdict/{self.count}"

    @property
    def _news(self) -> str:
        return f"news/{self.count + 1}"

    @property
    def _next_verdict(self) -> str:
        return f"verdict/{self.count + 1}"


def of(strategy: tf.distribute.Strategy | None, start: Callable[[Ledger], None] = lambda ledger: None) -> Ledger | None:
    """This process's ledger; made for the first strategy of several workers. None for other strategies.

    Args:
        strategy: of the model.
        start: called with a new ledger.
    """
    if strategy is None or not replication.spans_processes(strategy) or distribute.num_workers(strategy) < 2:
        return None
    kept = slots.of(runtime())
    if not hasattr(kept, "ledger"):
        kept.ledger = None
        if coordination.is_available():
            kept.ledger = Ledger(*_names(strategy), distribute.worker_index(strategy))
            start(kept.ledger)
    return kept.ledger


def current() -> Ledger | None:
    """This process's ledger, or None."""
    return slots.get(runtime(), "ledger")


def compare(what: str, facts: dict[str, str]) -> None:
    """`Ledger.meet` within a call; nothing outside, or without a ledger."""
    found = current()
    if found is not None and found.calls:
        found.meet(what, facts)


def waiting(
    batches: BatchCount | None = None, plan: tuple[int, int] | None = None
) -> contextlib.AbstractContextManager:
    """`Ledger.waiting`; nothing without a ledger."""
    found = current()
    return contextlib.nullcontext() if found is None else found.waiting(batches, plan)


def _names(strategy: tf.distribute.Strategy) -> tuple[list[str], list[str]]:
    jobs = strategy.cluster_resolver.cluster_spec().as_dict()
    names, tasks = [], []
    for job in ("chief", "worker"):
        for index, address in enumerate(jobs.get(job, ())):
            names.append(f"{'chief' if job == 'chief' else f'worker {index}'} ({address})")
            tasks.append(f"/job:{job}/replica:0/task:{index}")
    return names, tasks
