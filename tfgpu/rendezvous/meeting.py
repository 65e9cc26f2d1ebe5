"""The rendezvous protocol: every process connects to every other on the port that TensorFlow will use.

The first task is the leader. Each process keeps its connection to the leader open and reports which processes it has
not reached yet. When all have reached each other, the leader compares the facts and starts all at once. At the first
deadline, the leader tells all who is missing; if the leader itself is missing, each process reports what it knows.

All pairs are tried because a firewall can block any pair, in either direction. Each process makes as many connections
as there are other processes.
"""

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Mapping, Sequence

from tfgpu.errors import InputError, MachineError
from tfgpu.rendezvous import wire
from tfgpu.rendezvous.leader import MOST_NAMED, Chair
from tfgpu.rendezvous.members import Member

BIND_WAIT_S = 3.0
"""Seconds to wait for a port that an ending process still holds."""
LEADER = 0
CALLS_AT_ONCE = 256
_TICK_S = 0.05
_LAST_WORD_S = 2.0
_NOTE_AFTER_S = 10.0
_BROKEN = (OSError, EOFError, wire.Foreign, wire.Running)  # A timeout is an OSError.
_log = logging.getLogger("tfgpu.rendezvous")


class Meeting:
    """One process's part in the meeting.

    Args:
        everyone: the processes, in the same order everywhere.
        me: this process's position.
        facts: facts to compare, by name.
        attempt: the number of this start of the job; processes of another attempt are rejected. May be empty.
        timeout_s: seconds to wait for the others.
    """

    def __init__(self, everyone: Sequence[Member], me: int, facts: Mapping[str, str], attempt: str, timeout_s: float):
        self.everyone, self.me = list(everyone), me
        self.facts, self.attempt, self.timeout_s = dict(facts), attempt, timeout_s
        self.own = self.everyone[me]
        self.process = f"process {os.getpid()} on {socket.gethostname()}"
        self._id = uuid.uuid4().hex
        self._others = [index for index in range(len(self.everyone)) if index != me]
        listed = json.dumps([(each.name, each.address) for each in self.everyone])
        self._digest = hashlib.sha256(listed.encode()).hexdigest()[:16]
        self._has_servers = any(each.name.startswith("parameter server") for each in self.everyone)
        self._reached: set[int] = set()
        self._running: set[int] = set()  # TensorFlow has started there.
        self._why: dict[int, str] = {}
        self._notes: dict[str, str] = {}
        self._guests = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._leader: asyncio.StreamWriter | None = None
        self._leader_knows = False
        self._chair = Chair(self.everyone, self.facts, fail=self._fail, note=self._note, missing=self._missing)

    async def hold(self) -> None:
        """Returns when all may start TensorFlow; its port is then free.

        Raises:
            InputError: the processes differ; a restart would not help.
            MachineError: a process is missing, or the port is in use; a restart may help.
        """
        self._end: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._end.add_done_callback(lambda end: end.cancelled() or end.exception())  # marks it as retrieved
        self._calls = asyncio.Semaphore(CALLS_AT_ONCE)
        jobs: list[asyncio.Task] = []
        server = None
        try:
            async with asyncio.timeout(self.timeout_s):
                server = await self._listen()
                work = [self._lead() if self.me == LEADER else self._follow(), self._say_who_is_awaited()]
                work += [self._reach(index) for index in self._others if index != LEADER]
                jobs = [asyncio.create_task(each) for each in work]
                for job in jobs:
                    job.add_done_callback(self._pass_on)
                await asyncio.shield(self._end)
        except TimeoutError:
            await self._end_late()
        except (InputError, MachineError) as error:
            await self._tell_others(error)
            raise
        finally:
            for job in jobs:
                job.cancel()
            if server:
                server.close()
            await self._hang_up()

    # Listening.

    async def _listen(self) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        until = loop.time() + BIND_WAIT_S
        while True:
            try:
                return await asyncio.start_server(self._answer, sock=wire.listener(self.own.port), limit=wire.LIMIT)
            except OSError as error:
                if loop.time() > until:
                    raise await self._port_in_use(error) from None
            await asyncio.sleep(0.2)

    async def _port_in_use(self, error: OSError) -> Exception:
        """The error for a port in use; names the process that holds it, if known."""
        try:
            reader, writer = await wire.connect("localhost", self.own.port)
            self._writers.add(writer)
            writer.write(self._hello())
            answer = await wire.read(reader)
            if "refused" in answer:
                return InputError(answer["refused"]) if answer.get("fatal") else MachineError(answer["refused"])
        except _BROKEN:
            pass
        return MachineError(
            f"Port {self.own.port} of this machine, which TensorFlow needs for {self.own}, cannot be opened: "
            f"{wire.words(error)}. `ss -ltnp 'sport = :{self.own.port}'` shows the process that uses it: end it, or "
            "choose another port."
        )

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers a connection; foreign programs get no answer and block nobody."""
        if self._guests > CALLS_AT_ONCE + 2 * len(self.everyone):
            writer.close()
            return
        self._guests += 1
        self._writers.add(writer)
        try:
            hello = await wire.read(reader)
            refusal = self._refusal(hello)
            if refusal:
                writer.write(wire.encode(refusal))
                return
            writer.write(self._hello())
            if self.me == LEADER and hello.get("stays"):
                await self._chair.attend(hello, reader, writer)
        except (*_BROKEN, LookupError, TypeError, ValueError):
            _log.debug("A connection to %s was not from the cluster, or broke.", self.own.address)
        finally:
            self._guests -= 1
            self._writers.discard(writer)
            writer.close()

    def _refusal(self, hello: dict) -> dict | None:
        """Why a caller does not belong to this meeting, if so."""
        process, attempt, task = str(hello["process"])[:200], str(hello["attempt"])[:200], hello["task"]
        if attempt != self.attempt:
            self._note(process, f"{process}, of attempt {attempt!r}, was rejected: this is attempt {self.attempt!r}")
            text = f"This is {process}, of attempt {attempt!r}, but {self.own} is {self.process}, of attempt "
            text += f"{self.attempt!r}. End the processes of the older attempt."
            is_older = attempt.isdecimal() and self.attempt.isdecimal() and int(attempt) < int(self.attempt)
            return {"refused": text, "fatal": False, "ends": is_older}
        if hello["cluster"] != self._digest:
            text = f"TF_CONFIG differs: {process} is {hello['name']} at {hello['address']}, one of {hello['count']}, "
            text += f"but in the TF_CONFIG of {self.own}, {self.process}, it is {self._place_here(hello)}. "
            text += "Use the same addresses everywhere."
            self._note(process, text)
            return {"refused": text, "fatal": True, "ends": True}
        if task not in range(len(self.everyone)):
            raise wire.Foreign
        if task == self.me and hello["id"] != self._id:
            return self._twice(task, process, self.process)
        there = self._chair.guests.get(task)
        if hello.get("stays") and there and there.id != hello["id"]:
            return self._twice(task, process, there.process)
        return None

    def _place_here(self, hello: dict) -> str:
        names = [each.address for each in self.everyone if each.name == hello["name"]]
        if len(self.everyone) != hello["count"]:
            return f"one of {len(self.everyone)}"
        return f"at {names[0]}" if names and names[0] != hello["address"] else "among other addresses"

    def _note(self, process: str, text: str) -> None:
        """Records a rejected process, for the final message."""
        if len(self._notes) < MOST_NAMED or process in self._notes:
            self._notes[process] = text[:1000]

    def _twice(self, task: int, one: str, other: str) -> dict:
        text = f"Two processes are {self.everyone[task]}: {one}, and {other}. Give each process its own task "
        text += "(TF_CONFIG's `task`), or end the one left over."
        self._fail(InputError(text))
        return {"refused": text, "fatal": True, "ends": True}

    # Calling.

    async def _reach(self, index: int) -> None:
        """Calls until the other process has answered."""
        pause = 0.1
        while index not in self._reached:
            async with self._calls:
                await self._call(index)
            await asyncio.sleep(pause)
            pause = min(2 * pause, 1.0)

    async def _call(self, index: int) -> None:
        """Calls once; the connection to the leader stays open until the end."""
        other, writer = self.everyone[index], None
        try:
            reader, writer = await wire.connect(other.host, other.port)
            self._writers.add(writer)
            writer.write(self._hello(stays=index == LEADER))
            await self._hear(index, await wire.read(reader), reader, writer)
        except wire.Running:
            self._why[index] = "TensorFlow already runs there: this process is too late, or another job uses the port"
            if self._has_servers:  # A task that rejoins finds the others already running.
                self._reached.add(index)
                self._running.add(index)
        except wire.Foreign:
            self._why[index] = "another program answers there"
        except EOFError:
            self._why[index] = "it closed the connection"
        except TimeoutError:
            self._why[index] = "no answer" if writer is None else "it accepted the connection and did not answer"
        except OSError as error:
            self._why[index] = wire.words(error)
        finally:
            if writer:
                self._writers.discard(writer)
                writer.close()

    async def _hear(self, index: int, answer: dict, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if "refused" in answer:
            text = self._why[index] = str(answer["refused"])
            if answer.get("ends"):
                raise InputError(text) if answer.get("fatal") else MachineError(text)
            return
        self._reached.add(index)
        if index != LEADER:
            return
        self._leader = writer
        listening = asyncio.create_task(self._obey(reader))
        reporting = asyncio.create_task(self._report(writer))
        try:
            await asyncio.wait([listening, reporting], return_when=asyncio.FIRST_COMPLETED)
        finally:
            reporting.cancel()
            listening.cancel()
            self._leader = None
            self._reached.discard(LEADER)
        if listening.done() and listening.exception():
            raise listening.exception()

    async def _obey(self, reader: asyncio.StreamReader) -> None:
        word = await wire.read(reader, within_s=None)
        if word.get("go"):
            self._finish()
        elif "stop" in word:
            self._leader_knows = True
            self._fail((InputError if word.get("fatal") else MachineError)(str(word["stop"])))

    async def _report(self, writer: asyncio.StreamWriter) -> None:
        last = None
        while True:
            lacks = [index for index in self._others if index not in self._reached][:MOST_NAMED]
            state = {"lacks": lacks, "notes": dict(list(self._notes.items())[:MOST_NAMED])}
            if state != last:
                writer.write(wire.encode(state))
                await writer.drain()
                last = state
            await asyncio.sleep(_TICK_S)

    async def _follow(self) -> None:
        while True:
            await self._call(LEADER)
            if LEADER in self._running and len(self._reached) == len(self._others):
                self._finish()
            await asyncio.sleep(0.2)

    # Leading.

    async def _lead(self) -> None:
        while len(self._reached) < len(self._others) or not self._chair.has_heard_all(self._others, self._running):
            await asyncio.sleep(_TICK_S)
        wrong = self._chair.differences()
        if wrong:
            self._fail(InputError(wrong))
            return
        self._chair.warn()
        await self._chair.let_go()
        self._finish()

    # Ending.

    def _finish(self) -> None:
        if not self._end.done():
            self._end.set_result(None)

    def _fail(self, error: Exception) -> None:
        if not self._end.done():
            self._end.set_exception(error)

    def _pass_on(self, job: asyncio.Task) -> None:
        if not job.cancelled() and job.exception():
            self._fail(job.exception())

    async def _end_late(self) -> None:
        """Handles the deadline: asks the leader for the missing processes, or reports those known here."""
        text = self._missing()
        if self._leader and not self._end.done():
            with contextlib.suppress(OSError):
                self._leader.write(wire.encode({"late": True}))
            await asyncio.wait([self._end], timeout=_LAST_WORD_S)
        if self._end.done():
            return self._end.result()
        error = MachineError(text)
        if self.me == LEADER:
            await self._tell_others(error)
        raise error

    async def _tell_others(self, error: Exception) -> None:
        """Sends an error: the leader to all, the others to the leader, reconnecting if necessary."""
        if self._leader_knows:
            return
        if self.me == LEADER:
            self._chair.stop(error)
            await asyncio.sleep(_TICK_S)
            return
        message = wire.encode({"failed": str(error)[: wire.LIMIT // 8], "fatal": isinstance(error, InputError)})
        with contextlib.suppress(*_BROKEN):
            writer = self._leader
            if writer is None:
                async with asyncio.timeout(_LAST_WORD_S):
                    leader = self.everyone[LEADER]
                    reader, writer = await wire.connect(leader.host, leader.port)
                    self._writers.add(writer)
                    writer.write(self._hello(stays=True))
                    await wire.read(reader)
            writer.write(message)
            await writer.drain()

    async def _hang_up(self) -> None:
        for writer in list(self._writers):
            writer.close()
        await asyncio.sleep(_TICK_S)

    def _missing(self) -> str:
        """The message on missing processes, as far as this process knows."""
        absent = [index for index in self._others if index not in self._reached]
        lines = [
            f"{self.everyone[index]} did not answer: not started, wrong port, or firewall"
            + (f" ({self._why[index]})" if index in self._why else "")
            for index in absent[:MOST_NAMED]
        ]
        if len(absent) > MOST_NAMED:
            lines.append(f"{len(absent) - MOST_NAMED} more did not answer")
        if self.me == LEADER:
            lines += self._chair.unheard(self._others, absent)
        if not lines:
            lines = [f"{self.everyone[LEADER]} did not start the processes"]
        lines += list(self._notes.values())[:MOST_NAMED]
        why = f"The processes of the cluster did not connect within {self.timeout_s:g} s. {'; '.join(lines)}."
        return f"{why} Start what is missing, or increase TFGPU_STARTUP_TIMEOUT."

    async def _say_who_is_awaited(self) -> None:
        await asyncio.sleep(_NOTE_AFTER_S)
        absent = [str(self.everyone[index]) for index in self._others if index not in self._reached]
        if absent:
            _log.warning("Waiting for %s, up to %g s.", ", ".join(absent[:MOST_NAMED]), self.timeout_s)

    def _hello(self, *, stays: bool = False) -> bytes:
        own = {"task": self.me, "name": self.own.name, "address": self.own.address, "count": len(self.everyone)}
        own |= {"cluster": self._digest, "attempt": self.attempt, "process": self.process, "id": self._id}
        return wire.encode({**own, "stays": stays, "facts": self.facts if stays else {}})
