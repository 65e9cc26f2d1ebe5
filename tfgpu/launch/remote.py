"""The supervisor of one node: `python -m tfgpu.launch.remote`, started here, through ssh, by a Ray actor or Spark task.

It starts processes, watches their heartbeats and exits, and sends their output to the launcher. When the supervisor,
the launcher or the connection between them ends, its processes and everything that they started end too:

- the launcher is gone: standard input closes; the supervisor ends its processes;
- the supervisor is gone: the guard, its parent, adopts its descendants and kills them;
- the guard is gone: the kernel signals the supervisor, which ends its processes;
- both are gone: the kernel kills the processes that they had started.
"""

import argparse
import contextlib
import functools
import os
import selectors
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfgpu.launch import link, machine, processes
from tfgpu.launch.child import Child
from tfgpu.launch.heartbeat import LOOK_S
from tfgpu.launch.machine import Ports
from tfgpu.launch.processes import Signals

LOST_GRACE_S = 5.0
"""Seconds that processes get to save and exit when the launcher is gone."""
QUIET_S = 5.0
"""Seconds without a heartbeat after which the launcher is informed: it may explain another process's failure."""
_CROWDED = 2**20
_CHUNK = 2**16
_MOST_PIECES = 64


class Node:
    """The processes of one node.

    Args:
        incoming: file descriptor for messages from the launcher.
        outgoing: file descriptor for messages to the launcher.
        folders: directories to remove at the end; the first holds the heartbeat files.
        grace_period_s: seconds that processes get to save and exit when the launcher is gone.
    """

    def __init__(self, incoming: int, outgoing: int, folders: Sequence[str], *, grace_period_s: float = LOST_GRACE_S):
        self._incoming, self._outgoing, self._folders = incoming, outgoing, folders
        self._grace_s = grace_period_s
        self._children: dict[int, Child] = {}
        self._late: set[int] = set()  # Processes whose heartbeat timeout has been reported.
        self._reader = link.Reader(marked=False)
        self._pending = bytearray(link.MARK + b"\n")
        self._selector = selectors.DefaultSelector()
        self._ports: Ports | None = None
        self._kill_at: float | None = None  # Set once the processes have been told to stop.
        self._connected, self._crowded = True, False
        self._leaves = False
        self._lost_s, self._heard_at = None, time.monotonic()

    def run(self) -> None:
        """Serves the launcher until the processes have ended."""
        for each in (self._incoming, self._outgoing):
            os.set_blocking(each, False)
        with Signals() as signals:
            signal.signal(signal.SIGCHLD, signals.wake)
            self._selector.register(signals.woken, selectors.EVENT_READ, signals.empty)
            self._selector.register(self._incoming, selectors.EVENT_READ, self._receive)
            self._say("hello", **_facts())
            while self._kill_at is None or any(child.runs for child in self._children.values()):
                left_s = LOOK_S if self._kill_at is None else self._kill_at - time.monotonic()
                for key, _ in self._selector.select(min(LOOK_S, max(0.01, left_s))):
                    key.data()
                if signals.first is not None and not self._leaves:
                    self._leaves = True
                    self._say("leaving", number=signals.first)
                    self._do_end(LOST_GRACE_S)
                self._collect()
                self._look()
            self._finish()

    # The launcher

    def _receive(self) -> None:
        try:
            piece = os.read(self._incoming, _CHUNK)
        except OSError:
            piece = b""
        if not piece:
            self._selector.unregister(self._incoming)
            self._lose()
            return
        self._heard_at = time.monotonic()
        for message, _ in self._reader.feed(piece):
            getattr(self, f"_do_{message.pop('do')}")(**message)

    def _lose(self) -> None:
        """Ends the processes after the launcher is gone: nobody else will."""
        self._connected = False
        self._pending.clear()
        self._do_end(self._grace_s)

    def _say(self, event: str, data: bytes = b"", **facts: Any) -> None:
        if self._connected:
            self._pending += link.encode({"event": event, **facts}, data)
            self._send()

    def _send(self) -> None:
        try:
            sent = os.write(self._outgoing, self._pending[:_CHUNK]) if self._pending else 0
        except BlockingIOError:
            sent = 0
        except OSError:
            self._forget(self._outgoing)
            self._lose()
            return
        del self._pending[:sent]
        if not self._pending:
            self._forget(self._outgoing)
        elif self._outgoing not in self._selector.get_map():
            self._selector.register(self._outgoing, selectors.EVENT_WRITE, self._send)
        self._hold_back()

    def _hold_back(self) -> None:
        """Stops reading output while the launcher takes none, so memory stays flat; the processes then wait."""
        crowded = len(self._pending) > _CROWDED
        if crowded != self._crowded:
            self._crowded = crowded
            for child in self._children.values():
                for stream in child.streams:
                    if crowded:
                        self._forget(stream)
                    else:
                        self._follow(child, stream)

    # What the launcher asks for

    def _do_reserve(self, count: int) -> None:
        self._ports = Ports(count)
        self._say("ports", ports=self._ports.numbers)

    def _do_start(self, tasks: list[dict[str, Any]], lost_s: float | None = None) -> None:
        self._lost_s = lost_s or self._lost_s
        for task in tasks:
            if self._kill_at is not None:
                return
            child = Child(heart=Path(self._folders[0]) / f"{task['id']}", **task)
            try:
                child.start()
            except OSError as error:
                self._say("refused", id=child.id, why=f"{error.strerror}: {error.filename or task['command'][0]}")
                continue
            self._children[child.id] = child
            self._late.discard(child.id)
            for stream in child.streams:
                self._follow(child, stream)

    def _do_end(self, grace_period_s: float, number: int = signal.SIGTERM) -> None:
        """Asks all processes to stop, once; kills what still runs after `grace_period_s` seconds."""
        first = self._kill_at is None
        at = time.monotonic() + grace_period_s
        self._kill_at = at if first else min(self._kill_at, at)
        if first and grace_period_s > 0:
            for child in self._children.values():
                child.send(number)
                child.send(signal.SIGCONT)  # A suspended process could not handle the signal.

    def _do_ping(self) -> None:
        pass

    # The processes

    def _follow(self, child: Child, stream: int) -> None:
        if self._crowded:
            return
        self._selector.register(stream, selectors.EVENT_READ, functools.partial(self._read, child, stream))

    def _read(self, child: Child, stream: int) -> bool:
        """Forwards a piece of output; returns whether more may be ready."""
        try:
            piece = os.read(stream, _CHUNK)
        except BlockingIOError:
            return False
        if not piece:
            self._forget(stream)
            child.close(stream)
            return False
        self._say("output", piece, id=child.id, stream=child.streams[stream])
        return True

    def _drain(self, child: Child) -> None:
        """Reads the rest of an ended process's output, without waiting: its children may hold the pipe open."""
        for stream in list(child.streams):
            for _ in range(_MOST_PIECES):
                if not self._read(child, stream):
                    break

    def _collect(self) -> None:
        codes = processes.reap()
        for child in list(self._children.values()):
            if child.pid in codes and child.runs:
                child.ended(codes[child.pid])
                self._drain(child)
                self._say("exit", id=child.id, code=child.code)

    def _look(self) -> None:
        now = time.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            for child in self._children.values():
                child.send(signal.SIGKILL)
        for child in self._children.values():
            if child.runs:
                self._look_at(child)
        if self._lost_s and now - self._heard_at > self._lost_s and self._connected:
            self._lose()

    def _look_at(self, child: Child) -> None:
        """Reports a heartbeat timeout once, and heartbeats that stop and resume."""
        watch, was_quiet = child.watch, child.watch.quiet_s >= QUIET_S
        if watch.is_late() and child.id not in self._late:
            self._late.add(child.id)
            self._say("late", id=child.id)
        if was_quiet != (watch.quiet_s >= QUIET_S):
            self._say("quiet", id=child.id, seconds=watch.quiet_s)

    # Its own end

    def _finish(self) -> None:
        left = processes.kill_descendants()
        _remove(self._folders)
        for child in self._children.values():
            self._drain(child)
        self._say("ended", left=left)
        deadline = time.monotonic() + LOST_GRACE_S
        while self._pending and time.monotonic() < deadline:
            self._selector.select(LOOK_S)
            self._send()

    def _forget(self, file: int) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)


def _facts() -> dict[str, Any]:
    # Under ssh: the address at which this node was reached, where its peers reach it too.
    connection = os.environ.get("SSH_CONNECTION", "").split()
    address = connection[2] if len(connection) == 4 else "127.0.0.1"
    return {"address": address, "cpus": machine.cpus(), "gpus": machine.gpus(os.environ)}


def _guard(supervisor: int, folders: Sequence[str]) -> int:
    """Waits for the supervisor's end, and ends what it left behind."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    _, status = os.waitpid(supervisor, 0)
    processes.kill_descendants()
    _remove(folders)
    return os.waitstatus_to_exitcode(status)


def _remove(folders: Sequence[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def main(words: Sequence[str] | None = None) -> int:
    """Runs the guard, and the supervisor as its child."""
    parser = argparse.ArgumentParser(prog="python -m tfgpu.launch.remote")
    parser.add_argument(
        "--grace-period", type=float, default=LOST_GRACE_S, help="seconds to save if the launcher is gone"
    )
    parser.add_argument("folders", nargs="*", help="directories to remove at the end")
    given = parser.parse_args(words)
    processes.adopt_orphans()
    folders, guard = [tempfile.mkdtemp(prefix="tfgpu-launch-"), *given.folders], os.getpid()
    supervisor = os.fork()
    if supervisor:
        return processes.as_exit_code(_guard(supervisor, folders))
    processes.adopt_orphans()
    incoming, outgoing = os.dup(0), os.dup(1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # Stray prints must not mix with the messages.
    node = Node(incoming, outgoing, folders, grace_period_s=given.grace_period)
    processes.die_with_parent(signal.SIGTERM, guard)
    node.run()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # The launcher waits for this process, and there is nothing to clean up.
