"""One attempt of a group: its processes on all nodes, from the first start to the last exit.

The first failure ends the group: SIGTERM, a grace period, SIGKILL. So does a heartbeat timeout, a lost node, and a
signal to the launcher.
"""

import functools
import math
import selectors
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tfgpu.launch import processes
from tfgpu.launch.link import Link
from tfgpu.launch.processes import Signals
from tfgpu.launch.restarts import HEARTBEAT_TIMEOUT, PREEMPTED, WRONG_INPUT, Ending, Restarts
from tfgpu.launch.screen import Screen

FAILURE_GRACE_S = 0.5
"""Seconds between SIGTERM and SIGKILL after a failure: the others are blocked in a collective and cannot save."""
UNKILLABLE_S = 10.0
"""Seconds after the grace period before the launcher gives up on a node that has not ended its processes."""
PING_S = 5.0
_WORDS = 4
LOST_S = 60.0
"""Seconds without a message from the launcher after which the supervisor of another machine ends its processes."""


@dataclass(frozen=True)
class Member:
    """A process of the group.

    Attributes:
        name: such as `"worker 0"`.
        node: the number of the link whose node runs it.
        counted: whether the group waits for it to finish. Other members serve until all counted ones have.
        may_return: whether it may be restarted alone while the others continue.
        may_finish: whether it gets time to finish once the counted ones are done.
    """

    name: str
    node: int
    counted: bool = True
    may_return: bool = False
    may_finish: bool = False


ProcessSpecs = Callable[[Sequence[dict[str, Any]], Sequence[Sequence[int]]], Sequence[dict[str, Any]]]
"""Maps the facts and ports of the nodes to each member's `command`, `environment`, `directory` and `reports`."""


@dataclass(eq=False)
class Group:
    """Runs one attempt.

    Args:
        members: the processes.
        links: the supervisors of the nodes.
        process_specs: what to start, once the nodes have answered.
        screen: where output goes.
        signals: Ctrl-C and the like.
        restarts: the restart policy, for members that are restarted alone.
        grace_period_s: seconds that processes get to save after a request to stop that no failure caused.
        heartbeat_timeout_s: the heartbeat timeout in seconds; 0: none.
        answer_s: seconds for the nodes to answer.
    """

    members: Sequence[Member]
    links: Sequence[Link]
    process_specs: ProcessSpecs
    screen: Screen
    signals: Signals
    restarts: Restarts
    grace_period_s: float
    heartbeat_timeout_s: float
    answer_s: float = math.inf

    def __post_init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._codes: dict[int, int] = {}
        self._specs: Sequence[dict[str, Any]] = ()
        self._returns: dict[int, float] = {}  # Members that will be restarted alone, and when.
        self._started_at: dict[int, float] = {}
        self._quiet: dict[int, float] = {}  # Members without a heartbeat, and since when.
        self._news: list[tuple[int, int, str]] = []  # Member, code and description of each unrequested exit.
        self._killed = self._may_save = False
        self._code: int | None = None  # Set once the group has been told to stop: the reason.
        self._guilty: int | None = None
        self._done_at = 0.0
        self._give_up_at, self._begun_at, self._pinged_at = 0.0, time.monotonic(), 0.0

    def run(self) -> Ending:
        """Starts the processes, and returns when all have ended."""
        self._selector.register(self.signals.woken, selectors.EVENT_READ, self.signals.empty)
        for link in self.links:
            self._selector.register(link.messages, selectors.EVENT_READ, functools.partial(self._receive, link))
            if link.complaints is not None:
                self._selector.register(link.complaints, selectors.EVENT_READ, functools.partial(self._complain, link))
        self._serve()
        self._selector.close()
        return self._ending()

    def stop(self) -> None:
        """Ends the processes after an error in the launcher itself."""
        self._code = 1 if self._code is None else self._code
        self._end(self.grace_period_s)
        self._serve()
        self._selector.close()

    def _serve(self) -> None:
        while not all(link.ended for link in self.links):
            for key, _ in self._selector.select(0.5):
                key.data()
            self._judge()
            self._check_timeouts()

    # Messages

    def _receive(self, link: Link) -> None:
        messages = link.receive()
        if messages is None:
            self._selector.unregister(link.messages)
            if not link.ended:
                self._lose(link)
            return
        for message, data in messages:
            getattr(self, f"_on_{message.pop('event')}")(link, data, **message)

    def _complain(self, link: Link) -> None:
        lines = link.complain()
        if lines is None:
            self._selector.unregister(link.complaints)
            return
        if link.begun:
            for line in lines:
                self.screen.say(f"{_where(link)}: {line}")

    def _on_hello(self, link: Link, _: bytes, **facts: Any) -> None:
        link.facts = {"name": link.node, **facts}
        node = self.links.index(link)
        link.send("reserve", count=sum(member.node == node for member in self.members))

    def _on_ports(self, link: Link, _: bytes, ports: list[int]) -> None:
        link.ports = ports
        if self._code is None and all(each.ports is not None for each in self.links):
            self._start()

    def _on_output(self, _: Link, data: bytes, id: int, stream: int, bytes: int) -> None:
        self.screen.output(id, stream, data)

    def _on_exit(self, _: Link, data: bytes, id: int, code: int) -> None:
        self.screen.finish(id)
        self._codes[id] = code
        self._quiet.pop(id, None)
        if code != 0 and self._code is None:
            self._news.append((id, code, processes.described(code)))

    def _on_leaving(self, link: Link, _: bytes, number: int) -> None:
        if self._code is None:
            self._code, self._may_save = 1, True
            name = signal.Signals(number).name
            self.screen.say(f"The supervisor on {_where(link)} received {name}; all are stopped.", error=True)
            self._end(self.grace_period_s)

    def _on_late(self, _: Link, data: bytes, id: int) -> None:
        self._news.append((id, HEARTBEAT_TIMEOUT, f"no heartbeat for {self.heartbeat_timeout_s:g} s"))

    def _on_quiet(self, _: Link, data: bytes, id: int, seconds: float) -> None:
        self._quiet.pop(id, None)
        if seconds:
            self._quiet[id] = time.monotonic() - seconds

    def _on_refused(self, _: Link, data: bytes, id: int, why: str) -> None:
        self._news.append((id, WRONG_INPUT, f"could not be started: {why}"))

    def _on_ended(self, link: Link, _: bytes, left: int) -> None:
        link.ended = True
        if left and self._code == 0:
            self.screen.say(f"Killed {left} process(es) that the script had left running on {_where(link)}.")

    # Decisions

    def _start(self) -> None:
        self._specs = self.process_specs([link.facts for link in self.links], [link.ports for link in self.links])
        for number, link in enumerate(self.links):
            tasks = [self._task(id) for id, member in enumerate(self.members) if member.node == number]
            link.send("start", tasks=tasks, lost_s=LOST_S if link.pings else None)

    def _task(self, id: int) -> dict[str, Any]:
        self._started_at[id] = time.monotonic()
        return {"id": id, "heartbeat_timeout_s": self.heartbeat_timeout_s, **self._specs[id]}

    def _judge(self) -> None:
        """Decides whether to stop the group."""
        if self.signals.insists and not self._killed:
            self._killed = True
            self._end(0.0)
        if self._code is not None:
            return
        if self.signals.first is not None:
            self._handle_signal(self.signals.first)
        elif self._news and not self._replace():
            # Of simultaneous failures, a kill is the cause and a peer's error its consequence.
            self._blame(*min(self._news, key=lambda news: news[1] > 0))
        elif all(self._codes.get(id) == 0 for id, member in enumerate(self.members) if member.counted):
            self._complete()

    def _complete(self) -> None:
        """Handles the end of the counted members: lets those finish that may, and ends the servers."""
        self._done_at = self._done_at or time.monotonic()
        open_ids = [id for id in range(len(self.members)) if id not in self._codes]
        late = time.monotonic() - self._done_at > self.grace_period_s
        if not late and any(self.members[id].may_finish for id in open_ids):
            return
        self._code = 0
        self._end(self.grace_period_s if open_ids else 0.0)

    def _replace(self) -> bool:
        """Schedules the restart of members that may restart alone; returns whether nothing else had happened."""
        left = []
        for id, code, words in self._news:
            member, wait = self.members[id], None
            if member.may_return and id in self._codes:
                wait = self.restarts.after(code, time.monotonic() - self._started_at[id])
            if wait is None:
                left.append((id, code, words))
                continue
            self._returns[id] = time.monotonic() + wait
            self.screen.say(f"{member.name}: {words}. It alone is restarted; {self.restarts}.")
        self._news = left
        return not left

    def _return(self) -> None:
        now = time.monotonic()
        for id in [id for id, at in self._returns.items() if at <= now]:
            del self._returns[id], self._codes[id]
            task = self._task(id)
            task["environment"] = {**task["environment"], "TFGPU_REJOIN": "1"}
            self.links[self.members[id].node].send("start", tasks=[task])

    def _handle_signal(self, number: int) -> None:
        self._code, self._may_save = 128 + number, number != signal.SIGINT
        if number == signal.SIGINT:
            words = "Interrupted: the processes have been asked to stop. Press Ctrl-C again to kill them."
        else:
            name = signal.Signals(number).name
            words = f"{name}: the processes have been asked to stop, and have {self.grace_period_s:g} s to save."
        self.screen.say(words)
        self._end(self.grace_period_s, signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)

    def _blame(self, id: int, code: int, words: str) -> None:
        self._code, self._guilty = processes.as_exit_code(code), id
        name, path = self.members[id].name, self.screen.path(id)
        link = self.links[self.members[id].node]
        where = f" on {link.node}" if link.node else ""
        if code == PREEMPTED:
            self.screen.say(f"{name}{where} was preempted and has saved (exit code {PREEMPTED}); the rest stop.")
            self._end(self.grace_period_s)
            return
        self.screen.say(f"{name}{where}: {words}, after {time.monotonic() - self._begun_at:.1f} s.", error=True)
        before = [self.members[other].name for other, its in self._codes.items() if its == 0]
        if before:
            self.screen.say(f"Before that, {', '.join(before)} had ended with exit code 0.", error=True)
        for other, since in self._quiet.items():
            if other != id and code != WRONG_INPUT:  # which no frozen process causes
                words = f"had sent no heartbeat for {time.monotonic() - since:.0f} s"
                self.screen.say(f"Before that, {self.members[other].name} {words}.", error=True)
        lines = self.screen.last(id)
        if lines:
            self.screen.say(f"Its last lines{f' ({path} has all)' if path else ''}:", error=True)
            self.screen.say("\n".join(f"  {line}" for line in lines), error=True)
        self._end(FAILURE_GRACE_S)

    def _lose(self, link: Link) -> None:
        link.ended = True
        self.screen.say(_loss(link), error=True)
        if self._code is None:
            self._code = link.loss_code
            node = self.links.index(link)
            self._guilty = next((id for id, member in enumerate(self.members) if member.node == node), None)
            self._end(self.grace_period_s if self._code == PREEMPTED else FAILURE_GRACE_S)

    def _end(self, grace_period_s: float, number: int = signal.SIGTERM) -> None:
        self._give_up_at = time.monotonic() + grace_period_s + UNKILLABLE_S
        for link in self.links:
            link.send("end", grace_period_s=grace_period_s, number=number)

    def _check_timeouts(self) -> None:
        now = time.monotonic()
        if self._code is None:
            self._return()
        if now - self._pinged_at > PING_S:
            self._pinged_at = now
            for link in self.links:
                if link.pings:
                    link.send("ping")
        late = [link for link in self.links if link.facts is None and not link.ended]
        if late and self._code is None and now - self._begun_at > self.answer_s:
            self._code = 1
            self.screen.say(f"{_where(late[0])} did not answer within {self.answer_s:g} s.", error=True)
            self._end(0.0)
        if self._code is not None and now > self._give_up_at:
            for link in self.links:
                if not link.ended:
                    link.ended = True
                    self.screen.say(f"{_where(link)} has not ended its processes; giving up on it.", error=True)

    def _ending(self) -> Ending:
        asked = self.signals.first is not None
        if self._may_save:
            counted = [self._codes.get(id) for id, member in enumerate(self.members) if member.counted]
            if all(code in (0, PREEMPTED) for code in counted):
                return Ending(max(counted), asked=asked)
        return Ending(self._code, self._guilty, asked)


def _where(link: Link) -> str:
    return link.node or "this machine"


def _loss(link: Link) -> str:
    words = "; ".join(link.last_words()[-_WORDS:]) or "no message"
    if link.begun:
        return f"The connection to the supervisor on {_where(link)} was lost ({words})."
    return f"No supervisor could be started on {_where(link)}: {words}.{link.hint}"
