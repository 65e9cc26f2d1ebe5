"""One process that drives the devices of several processes; TensorFlow's runtime sends tensors between them.

Three things are missing in TensorFlow: `tf.distribute.MirroredStrategy` refuses replicas in several processes, a
TensorFlow server ignores the devices that this process has set up, and a call that waits for a stopped process waits
forever.
"""

import atexit
import contextlib
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import psutil
import tensorflow as tf

from tfgpu.compat import distribute, slots, variables
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import runtime
from tfgpu.core import extensions
from tfgpu.errors import MachineError

JOB = "worker"
"""TensorFlow's name for all processes; their numbers are its tasks."""
CHECK_INTERVAL_S = 1.0
HEARTBEAT_TIMEOUT_S = 10.0
"""Seconds without an answer after which a process counts as lost."""

_log = logging.getLogger(__name__)
_OF_PEERS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
)
_RESTARTED = "context_id"  # in the error of a server that was restarted in the meantime


@dataclass(frozen=True)
class Connection:
    """The processes whose devices this one drives.

    Attributes:
        addresses: of all processes, by their numbers; this one is 0.
        serves: whether a TensorFlow server answers at an address.
        lost: the numbers of processes that did not answer for too long.
    """

    addresses: tuple[str, ...]
    serves: Callable[[str], bool]
    lost: set[int] = field(default_factory=set)


def connection() -> Connection | None:
    """The connection that `connect` made, or None."""
    return slots.get(runtime(), "connection")


def names() -> tuple[str, ...]:
    """The devices of all connected processes, such as `"0/CPU:0"`, in their order; empty without a connection."""
    if connection() is None:
        return ()
    found = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    kept = [device for device in found if device.device_type in ("CPU", "GPU")]
    return tuple(f"{device.task}/{device.device_type}:{device.device_index}" for device in kept)


def server(addresses: Sequence[str], number: int) -> tf.distribute.Server:
    """Starts a TensorFlow server with the devices of this process, as `tfgpu.environment` has set them up."""
    config = runtime().config
    # A stage that waits for another stage must not block the operations that the other one needs.
    least = max(len(addresses) + 1, os.cpu_count() or 1)
    config.inter_op_parallelism_threads = config.inter_op_parallelism_threads or least
    spec = tf.train.ClusterSpec({JOB: list(addresses)})
    return tf.distribute.Server(spec, job_name=JOB, task_index=number, protocol="grpc", config=config)


def connect(addresses: Sequence[str], serves: Callable[[str], bool]) -> None:
    """Makes this process, which is number 0, use the devices of all processes.

    Raises:
        MachineError: one of them has ended in the meantime.
    """
    made = Connection(tuple(addresses), serves)
    slots.of(runtime()).connection = made
    # Otherwise an assignment to another process's variable (a metric's reset) counts as done when it is sent, and the
    # next step may run before it: measured 1006 of 1272 times in a loop of both.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "false"
    _allow_replicas_anywhere()
    threading.Thread(target=_watch, args=(made,), name="tfgpu-processes", daemon=True).start()
    spec = tf.train.ClusterSpec({JOB: list(addresses)})
    try:
        tf.config.experimental_connect_to_cluster(spec, job_name=JOB, task_index=0, protocol="grpc")
        tf.config.list_logical_devices()  # starts this process's server, and queries the devices of the others
    except tf.errors.OpError as error:
        raise _lost_error(made, ()) or error from None


def explained(error: tf.errors.OpError, model) -> MachineError | None:
    """The error to raise in place of TensorFlow's where a connected process is gone; else None."""
    made = connection()
    is_of_peer = isinstance(error, _OF_PEERS) or _RESTARTED in error.message
    lost = _lost_error(made, model.variables) if made is not None and is_of_peer else None
    if lost is not None:
        end_at_once_after_an_error()
    return lost


extensions.error_explanations.register(explained)


def end_at_once_after_an_error() -> None:
    """Makes this process end at once if an error ends it.

    When the interpreter shuts down, TensorFlow notifies each server, and can wait forever for one that is gone.
    """
    atexit.register(_end_at_once)


def _end_at_once() -> None:
    if getattr(sys, "last_type", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _lost_error(made: Connection, trained) -> MachineError | None:
    numbers = sorted({*made.lost, *(at for at in range(1, len(made.addresses)) if not made.serves(made.addresses[at]))})
    if not numbers:
        return None
    copies = [copy for v in trained for copy in variables.copies(getattr(v, "value", v))]
    devices = {tf.DeviceSpec.from_string(copy.device) for copy in copies}
    described = []
    for number in numbers:
        own = sorted(f"{number}/{d.device_type}:{d.device_index}" for d in devices if d.task == number)
        described.append(f"process {number} ({made.addresses[number]}{', ' + ', '.join(own) if own else ''})")
    return MachineError(
        f"Lost: {'; '.join(described)}. It has ended, is stopped, or has lost its network, and the variables on its "
        "devices are lost. Restart all processes (`tfgpu launch --max-restarts 1` does): the script resumes from its "
        "newest checkpoint (tfgpu.callbacks.Checkpoint)."
    )


def _allow_replicas_anywhere() -> None:
    """Allows a `MirroredStrategy` with replicas in several processes, all of which this one drives and feeds."""

    @wrap("mirrored_strategy.is_device_list_single_worker")
    def is_single_worker(stock, devices):
        return True  # this process drives all devices

    @wrap("MirroredExtended.initialize_single_worker")
    def initialize(stock, self, devices):
        stock(self, devices)
        # What belongs to no replica, such as the data, stays here even if the first replica is elsewhere.
        here = f"/job:{JOB}/replica:0/task:0"
        distribute.keep_inputs_on(self, f"{here}/device:CPU:0", here)


def _watch(made: Connection) -> None:
    """Breaks the connections to a process that no longer answers, so that calls that wait for it fail.

    gRPC notices that a process has ended. For one that is stopped, or whose machine is unreachable, gRPC waits forever,
    and so would the step.
    """
    answered = dict.fromkeys(range(1, len(made.addresses)), time.monotonic())
    while True:
        time.sleep(CHECK_INTERVAL_S)
        for number, at in answered.items():
            address = made.addresses[number]
            if made.serves(address):
                answered[number] = time.monotonic()
            elif time.monotonic() - at > HEARTBEAT_TIMEOUT_S:
                if number not in made.lost:
                    _log.warning("Process %d (%s) has not answered for %d s.", number, address, HEARTBEAT_TIMEOUT_S)
                made.lost.add(number)
                _disconnect(address)


def _disconnect(address: str) -> None:
    """Shuts down this process's connections to an address."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError, psutil.Error):
        there = {found[4][0] for found in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}
        for each in psutil.Process().net_connections("tcp"):
            if _is_at(each.raddr, there, int(port)):
                _shut_down(each.fd, there, int(port))


def _shut_down(number: int, there: set[str], port: int) -> None:
    """Shuts down the socket with this file descriptor, if it is still connected to that peer.

    gRPC may have closed it since it was listed, and another file or socket may have its number. A duplicate cannot
    change under us, so the check is made on a duplicate.
    """
    with contextlib.suppress(OSError):
        copy = os.dup(number)
        try:
            with socket.socket(fileno=copy) as mine:
                copy = None
                if _is_at(mine.getpeername(), there, port):
                    mine.shutdown(socket.SHUT_RDWR)
        finally:
            if copy is not None:  # not a socket
                os.close(copy)


def _is_at(peer: tuple, there: set[str], port: int) -> bool:
    return isinstance(peer, tuple) and peer[1:2] == (port,) and peer[0].removeprefix("::ffff:") in there
