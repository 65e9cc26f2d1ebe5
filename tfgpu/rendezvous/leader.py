"""The leader's part in a meeting: collects the facts of the others, compares them, and starts all at once."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from tfgpu.errors import InputError, MachineError
from tfgpu.rendezvous import wire
from tfgpu.rendezvous.facts import LONGEST, LONGEST_NAME, MAY_DIFFER, SCRIPT, advice, differences
from tfgpu.rendezvous.members import Member

LEADER = 0
MOST_NAMED = 20
_LAST_WORD_S = 2.0
_log = logging.getLogger("tfgpu.rendezvous")


@dataclass(frozen=True)
class Guest:
    """A process with an open connection to the leader."""

    id: str
    process: str
    writer: asyncio.StreamWriter


@dataclass(eq=False)
class Chair:
    """The leader's state about the others while their connections are open.

    Args:
        everyone: the processes, the leader first.
        facts: the leader's own facts.
        fail: ends the meeting with an error.
        note: records what a guest reports about a rejected process.
        missing: returns the message on missing processes.
    """

    everyone: Sequence[Member]
    facts: Mapping[str, str]
    fail: Callable[[Exception], None]
    note: Callable[[str, str], None]
    missing: Callable[[], str]

    def __post_init__(self) -> None:
        self.guests: dict[int, Guest] = {}
        self._lacks: dict[int, list[int]] = {}
        self._facts_of: dict[int, dict[str, str]] = {LEADER: dict(self.facts)}

    async def attend(self, hello: dict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads a guest's messages until it disconnects."""
        task = hello["task"]
        guest = self.guests[task] = Guest(str(hello["id"])[:64], str(hello["process"])[:200], writer)
        told = dict(hello["facts"]).items()
        self._facts_of[task] = {str(name)[:LONGEST_NAME]: str(value)[:LONGEST] for name, value in told}
        try:
            while True:
                word = await wire.read(reader, within_s=None)
                if "failed" in word:
                    kind = InputError if word.get("fatal") else MachineError
                    self.fail(kind(f"{self.everyone[task]} failed: {word['failed']}"))
                elif "late" in word:
                    self.fail(MachineError(self.missing()))
                else:
                    self._lacks[task] = [int(index) for index in word["lacks"]][:MOST_NAMED]
                    for process, note in dict(word["notes"]).items():
                        self.note(process, note)
        finally:
            if self.guests.get(task) is guest:  # It may have reconnected.
                del self.guests[task]
                self._lacks.pop(task, None)

    def has_heard_all(self, others: Sequence[int], running: Collection[int]) -> bool:
        """Whether each of the others has reached everyone, or already runs TensorFlow."""
        return len({*self._lacks, *running}) == len(others) and not any(self._lacks.values())

    def differences(self) -> str:
        """The message on facts that must not differ; empty if none does."""
        # Parameter servers and their workers may run different scripts.
        has_servers = any(each.name.startswith("parameter server") for each in self.everyone)
        found = differences(self._named(), skip=(*MAY_DIFFER, SCRIPT) if has_servers else (*MAY_DIFFER,))
        return f"The processes differ. {' '.join(found)}" if found else ""

    def warn(self) -> None:
        """Logs differences that may be intended."""
        for text in advice(self._named()):
            _log.warning("Between the processes, %s", text)

    async def let_go(self) -> None:
        """Tells all processes to start."""
        for guest in self.guests.values():
            guest.writer.write(wire.encode({"go": True}))
        # The guests close first, so that no connection remains in TIME_WAIT on this port.
        until = asyncio.get_running_loop().time() + _LAST_WORD_S
        while self.guests and asyncio.get_running_loop().time() < until:
            await asyncio.sleep(0.01)

    def stop(self, error: Exception) -> None:
        """Tells all processes why they cannot start."""
        words = {"stop": str(error)[: wire.LIMIT // 8], "fatal": isinstance(error, InputError)}
        for guest in list(self.guests.values()):
            guest.writer.write(wire.encode(words))

    def unheard(self, others: Sequence[int], absent: Collection[int]) -> list[str]:
        """Messages on processes that answer, but have not reached the leader or another process."""
        lines = []
        for index in others:
            if index in absent:
                continue
            if index not in self.guests:
                silent, leader = self.everyone[index], self.everyone[LEADER]
                lines.append(f"{silent} answers, but has not reached {leader}: firewall or wrong address")
                continue
            others = [self.everyone[other] for other in self._lacks.get(index, []) if other not in absent]
            lines += [f"{self.everyone[index].name} does not reach {other}: firewall" for other in others]
        return lines[:MOST_NAMED]

    def _named(self) -> dict[str, dict[str, str]]:
        return {self.everyone[index].name: facts for index, facts in sorted(self._facts_of.items())}
