"""A function that runs once for each part of the sequence, in threads that take turns and meet.

Each rank traces the model's own code on its part of the positions. Where the code needs other positions, all ranks
wait, and what they brought is combined in the thread that started them. One thread runs at a time, in the ranks' order,
so that the graph is the same in every run.
"""

import contextlib
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import layers, threads
from tfgpu.core import replication, step_context
from tfgpu.core.randomness import rng
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement
from tfgpu.parallel.sequence.positions import PartOfDraw
from tfgpu.parallel.tensor import local_shards

_here = step_context.Slot("sequence.rank")


@dataclass(frozen=True)
class Rank:
    """One part of the sequence, in the thread that computes it.

    Attributes:
        at: its number, from 0.
        group: all ranks.
    """

    at: int
    group: "Group"

    @property
    def begin(self) -> int:
        """The position of its first query in the sequence."""
        return self.at * self.group.length

    def meet(self, combine: Callable[[list], list], value: object) -> object:
        """Waits for all ranks.

        Args:
            combine: takes what all ranks brought, in their order, and returns what each gets; that of rank 0 is called,
                in the thread that started the ranks.
            value: what this rank brings.
        """
        return self.group.wait(self.at, combine, value)


def here() -> Rank | None:
    """The rank that this thread computes, or None."""
    return _here.get()


def alone() -> contextlib.AbstractContextManager:
    """Inside the block, this thread computes no rank: its code runs as it is."""
    return _here.set_to(None)


def to_all(brought: list) -> list:
    """For `Rank.meet`: every rank gets what all bring."""
    return [tuple(list(column) for column in zip(*brought, strict=True))] * len(brought)


class Group:
    """The ranks of one run.

    Args:
        devices: of the ranks.
        length: positions in each part.

    Attributes:
        has_met: whether a rank needed others, or asked for the position at which it begins.
        losses: pairs of a layer and a loss that it added when it was computed on all positions.
    """

    def __init__(self, devices: Sequence[str], length: int):
        self.devices, self.length = tuple(devices), length
        self.has_met, self.losses = False, []
        self._turns: list[_Turn] = []

    @property
    def count(self) -> int:
        return len(self.devices)

    def run(self, function: Callable[[Rank], object], tape: tf.GradientTape | None = None) -> list:
        """What the function returns on each rank.

        Args:
            function: takes its rank.
            tape: records what the ranks do.

        Raises:
            InputError: some ranks met where others had ended.
        """
        state, context = threads.ThreadState(replication.replica_context()), step_context.current()
        self._turns, seeds = [_Turn() for _ in self.devices], []

        def work(at: int) -> None:
            turn, rank = self._turns[at], Rank(at, self)
            turn.begin()
            try:
                step_context.adopt(context)
                with ExitStack() as stack:
                    stack.enter_context(state.entered())
                    stack.enter_context(threads.recording(tape))
                    stack.enter_context(device_placement.operations_on(self.devices[at]))
                    stack.enter_context(tf.device(self.devices[at]))
                    stack.enter_context(_here.set_to(rank))
                    stack.enter_context(local_shards.computing(at, self.count, -2, seeds))
                    stack.enter_context(rng.sharding(PartOfDraw(1, at, self.count, self.length)))
                    turn.result = function(rank)
            except BaseException as error:
                turn.error = error
            turn.end()

        for at in range(self.count):
            threading.Thread(target=work, args=(at,), daemon=True).start()
        try:
            while not all(turn.is_done for turn in self._turns):
                self._advance()
        finally:
            for turn in self._turns:
                turn.stop()
        return [turn.result for turn in self._turns]

    def wait(self, at: int, combine: Callable, value: object) -> object:
        """See `Rank.meet`."""
        self.has_met = True
        return self._turns[at].pause(combine, value)

    def take_losses(self, operation: keras.Operation) -> None:
        """Moves the losses that a layer, or one within, has just added to `losses`."""
        if isinstance(operation, keras.layers.Layer):
            for each in layers.layers_within(operation):
                self.losses += [(each, loss) for loss in layers.added_losses(each)]
            layers.clear_losses(operation)

    def _advance(self) -> None:
        """Lets each rank run until it meets or ends, and combines what they bring."""
        for turn in self._turns:
            turn.go_on()
            if turn.error is not None:
                raise turn.error
        ended = [turn.is_done for turn in self._turns]
        if all(ended):
            return
        if any(ended):
            raise InputError(
                "The model's code does different things for different parts of the sequence. It must not depend on "
                "the values, or on which positions it sees."
            )
        combined = self._turns[0].combine([turn.value for turn in self._turns])
        for turn, answer in zip(self._turns, combined, strict=True):
            turn.answer = answer


class _Stopped(BaseException):
    """Another rank has failed."""


class _Turn:
    """Hands the turn between a rank's thread and the one that started it."""

    def __init__(self):
        self._may_run, self._has_paused = threading.Semaphore(0), threading.Semaphore(0)
        self._is_stopped = self.is_done = False
        self.result = self.error = self.combine = self.value = self.answer = None

    def go_on(self) -> None:
        """In the starting thread: returns when the rank meets or ends."""
        self._may_run.release()
        self._has_paused.acquire()

    def stop(self) -> None:
        """In the starting thread: ends a rank that waits."""
        if not self.is_done:
            self._is_stopped = True
            self.go_on()

    def begin(self) -> None:
        """In the rank's thread: waits for the first turn."""
        self._may_run.acquire()

    def end(self) -> None:
        """In the rank's thread."""
        self.is_done = True
        self._has_paused.release()

    def pause(self, combine: Callable, value: object) -> object:
        """In the rank's thread: gives the turn back; returns the answer in the next one."""
        if self._is_stopped:
            raise _Stopped
        self.combine, self.value = combine, value
        self._has_paused.release()
        self._may_run.acquire()
        if self._is_stopped:
            raise _Stopped
        answer, self.answer, self.value = self.answer, None, None
        return answer
