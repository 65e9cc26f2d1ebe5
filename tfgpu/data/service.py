"""Batches that other processes decode and augment, through the tf.data service.

`tfgpu data serve` starts a dispatcher and its workers. Fast workers make more batches than slow ones. Each batch is
numbered, and the training process restores their order, so the batches equal those that it would have made itself,
whatever the number of workers and whichever of them die. If a batch does not arrive, the training process makes it.

Source: A. Audibert et al., "tf.data service: A Case for Disaggregating ML Input Data Processing", 2023.
"""

import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import tensorflow as tf

from tfgpu.core import worker_rows
from tfgpu.data.epoch import EpochSpec
from tfgpu.data.feed import Feed, finish
from tfgpu.data.position import Counter
from tfgpu.errors import InputError, MachineError, whole_number

_WORKER = """
import sys
from tfgpu import quiet
with quiet.starting("3"):
    from tfgpu.data import service
service._work(sys.argv[1], sys.argv[2], int(sys.argv[3]))
"""
PATIENCE_S = 30.0
"""Seconds to wait for a batch before this process makes the next one itself."""
AHEAD = 64
"""Batches that may wait for an earlier one before this process makes that one itself."""

_log = logging.getLogger(__name__)


def address(service: str, *, name: str = "service") -> str:
    """Completes the dispatcher's address, and checks that it answers.

    Args:
        service: `"grpc://HOST:PORT"`, or `"HOST:PORT"`.
        name: the argument's name in errors.

    Raises:
        InputError: it is not an address, or nothing answers there.
    """
    host, _, port = str(service).removeprefix("grpc://").rpartition(":")
    if not host or not port.isdigit():
        raise InputError(f"`{name}` must look like 'grpc://HOST:PORT'. Received: {service!r}.")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise InputError(
            f"No tf.data service answers at {host}:{port} ({error.strerror or error}). Start one: tfgpu data serve."
        ) from error
    return f"grpc://{host}:{port}"


@dataclass(frozen=True)
class Epoch:
    """The batches of one epoch by number, or one worker's rows of them.

    Attributes:
        spec: what the batches are made of.
        number: the epoch's number.
        indices: int64 [count], in the epoch's order.
        feed: how batches are prepared ahead.
        ranges: the worker's rows; None: whole batches. With it an element is `(rows, total)`.
    """

    spec: EpochSpec
    number: int
    indices: tf.Tensor
    feed: Feed
    ranges: worker_rows.Ranges | None = None

    @property
    def steps(self) -> int:
        return self.spec.steps

    def batch(self, step: tf.Tensor) -> tf.data.Dataset:
        """The dataset of one batch, whose examples are decoded in parallel."""
        spec, start, index = self.spec, step * self.spec.global_batch, self._index(step)
        one_by_one = tf.data.Dataset.from_tensor_slices(index)
        loaded = one_by_one.map(spec.examples.load, num_parallel_calls=self.feed.calls, deterministic=True)
        number = tf.constant(self.number, tf.int64)
        return loaded.batch(spec.global_batch).map(lambda x: spec.made(number, start, x, index, self.ranges))

    def _index(self, step: tf.Tensor) -> tf.Tensor:
        """The examples that a batch, or the worker's rows of it, are made of."""
        start = step * self.spec.global_batch
        index = self.indices[start : start + self.spec.global_batch]
        if self.ranges is None:
            return index
        return tf.gather(index, self.spec.needed(tf.constant(self.number, tf.int64), start, self.ranges))

    def numbered(self) -> tf.data.Dataset:
        """All batches with their numbers, in the order in which they become ready."""

        def one(step):
            return self.batch(step).map(lambda *batch: (step, batch))

        return tf.data.Dataset.range(self.steps).interleave(
            one, cycle_length=2, num_parallel_calls=self.feed.calls, deterministic=False
        )

    def make(self, step: int):
        """Makes a batch in this process.

        Raises:
            tf.errors.InvalidArgumentError: an example is corrupt; the message names it.
        """
        try:
            return self.batch(tf.constant(step, tf.int64)).get_single_element()
        except tf.errors.OpError:
            for index in self._index(tf.constant(step, tf.int64)):
                try:
                    self.spec.examples.load(index)
                except tf.errors.OpError as error:
                    where = self.spec.examples.where
                    name = f"example {index} (the first is 0)" if where is None else where(index).numpy().decode()
                    raise tf.errors.InvalidArgumentError(None, None, f"Corrupt: {name}") from error
            raise


def batches(spec: EpochSpec, counter: Counter, feed: Feed, service: str) -> tf.data.Dataset:
    """Like `feed.batches`, but made by a service, and with the epoch counter instead of a dataset of epochs.

    Each training process asks for its own rows, so that all of them together have each example decoded once.
    """

    def epoch(number: int, ranges: worker_rows.Ranges | None) -> Epoch:
        with tf.device("CPU:0"):
            return Epoch(spec, number, spec.order(tf.constant(number, tf.int64)), feed, ranges)

    def made(ranges: worker_rows.Ranges | None) -> tf.data.Dataset:
        def generate():
            yield from in_order(epoch(counter.take(), ranges), service)

        element = epoch(0, ranges).numbered().element_spec[1]
        found = tf.data.Dataset.from_generator(generate, output_signature=element)
        return finish(found, spec.steps, feed)

    whole = made(None)
    return worker_rows.register(whole, worker_rows.WorkerRows(made, lambda: epoch(counter.next, None).make(0)))


def in_order(epoch: Epoch, service: str, *, patience_s: float = PATIENCE_S, ahead: int = AHEAD) -> Iterator:
    """Yields the batches of an epoch in order, each once.

    Args:
        epoch: the batches.
        service: the dispatcher's address.
        patience_s: seconds to wait for a batch before this process makes the next one itself.
        ahead: batches that may wait for an earlier one before this process makes that one itself.
    """
    arrived: queue.Queue = queue.Queue(maxsize=2)
    stop, steps = threading.Event(), epoch.steps
    threading.Thread(target=_fetch, args=(epoch, service, arrived, stop), daemon=True).start()
    waiting, step, here, patience, is_open = {}, 0, 0, patience_s, True
    try:
        while step < steps:
            if step in waiting:
                yield waiting.pop(step)
                step += 1
                continue
            if is_open and len(waiting) < ahead:
                try:
                    number, batch = arrived.get(timeout=patience)
                    patience, is_open = patience_s, number is not None
                    if is_open and number >= step:
                        waiting[number] = batch
                    continue
                except queue.Empty:
                    _log.warning("No batch from %s in %g s. This process makes the next one.", service, patience)
                    patience = min(1.0, patience)  # until one arrives: the next ones are unlikely to be faster
            yield epoch.make(step)
            here, step = here + 1, step + 1
    finally:
        stop.set()
        if here:
            told = "%d of %d batches did not arrive from %s in time; this process made them."
            _log.info(told, here, steps, service)


def _fetch(epoch: Epoch, service: str, arrived: queue.Queue, stop: threading.Event) -> None:
    """Puts the service's batches into the queue, then (None, None), even after an error."""
    policy = tf.data.experimental.service.ShardingPolicy.DYNAMIC
    try:
        distribute = tf.data.experimental.service.distribute(processing_mode=policy, service=service)
        for number, batch in epoch.numbered().apply(distribute):
            if not _put(arrived, (int(number), batch), stop):
                return
    except Exception as error:  # otherwise the reader would wait for a dead thread
        told = next(iter(str(error).splitlines()), "")[:300]
        rest = "This process makes the rest of the epoch."
        _log.warning("tf.data service %s: %s: %s. %s", service, type(error).__name__, told, rest)
    _put(arrived, (None, None), stop)


def _put(arrived: queue.Queue, item: tuple, stop: threading.Event) -> bool:
    while not stop.is_set():
        try:
            arrived.put(item, timeout=0.1)
            return True
        except queue.Full:
            continue
    return False


def serve(workers: int = 1, *, port: int = 0, host: str = "localhost", join: str | None = None, say=print) -> None:
    """Runs a dispatcher and its workers until the process ends; restarts workers that die.

    Args:
        workers: processes that make batches.
        port: of the dispatcher; 0 picks a free one.
        host: this machine's name as seen from the others.
        join: the address of a dispatcher on another machine; then only workers are started.
        say: called with the dispatcher's address when everything is ready.

    Raises:
        InputError: an invalid number or host, or nothing answers at `join`.
        MachineError: the port is taken, or workers exit immediately.
    """
    whole_number("workers", workers)
    whole_number("port", port, minimum=0, maximum=65535)
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        raise InputError(
            f"`host` must be a name or an address of this machine. Received: {host!r} ({error.strerror or error})."
        ) from None
    dispatcher = None
    if join is None:
        config = tf.data.experimental.service.DispatcherConfig(port=port)
        try:
            dispatcher = tf.data.experimental.service.DispatchServer(config)
        except tf.errors.OpError as error:
            raise MachineError(
                f"Cannot start a dispatcher on port {port}: {error.message}. Choose another port."
            ) from error
        place = f"{host}:{dispatcher.target.rpartition(':')[2]}"
    else:
        place = address(join, name="join").removeprefix("grpc://")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    running, began, quick = [_worker(place, host) for _ in range(workers)], time.monotonic(), 0
    try:
        say(f"grpc://{place}")
        while True:
            time.sleep(0.5)
            for at, process in enumerate(running):
                if process.poll() is None:
                    continue
                quick = quick + 1 if time.monotonic() - began < 10 else 0
                if quick > 3:
                    raise MachineError(f"The workers exit immediately with code {process.returncode}.")
                _log.warning("A worker exited with code %d; restarting it.", process.returncode)
                running[at], began = _worker(place, host), time.monotonic()
    except KeyboardInterrupt:
        pass
    finally:
        for process in running:
            process.kill()
            process.wait()


def _worker(dispatcher: str, host: str) -> subprocess.Popen:
    hidden = {"CUDA_VISIBLE_DEVICES": "-1"}  # it decodes on the CPU and must not use GPU memory
    command = [sys.executable, "-c", _WORKER, dispatcher, host, str(os.getpid())]
    return subprocess.Popen(command, env={**os.environ, **hidden}, start_new_session=True)


def _work(dispatcher: str, host: str, parent: int) -> None:
    """Runs a worker until the process that started it ends."""
    config = tf.data.experimental.service.WorkerConfig(dispatcher_address=dispatcher, worker_address=f"{host}:%port%")
    worker = tf.data.experimental.service.WorkerServer(config)
    while os.getppid() == parent:
        time.sleep(0.5)
    del worker
    os._exit(0)
