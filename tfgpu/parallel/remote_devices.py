"""One process that drives the devices of several: TensorFlow's runtime sends what one of them makes to the next.

`tf.distribute.MirroredStrategy` refuses replicas in several processes, a server of TensorFlow's knows nothing of the
devices that this process has set up, and a call that waits for a process that is stopped waits for ever.
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
from tensorflow.python.distribute import mirrored_strategy
from tensorflow.python.eager import context

from tfgpu.compat.patch import wrap
from tfgpu.errors import MachineError

JOB = "worker"
"""What TensorFlow calls all processes; their numbers are its tasks."""
LOOK_S = 1.0
LOST_AFTER_S = 10.0
"""Seconds without an answer after which a process counts as lost."""

_log = logging.getLogger(__name__)
_OF_PEERS = (
    tf.errors.UnavailableError,
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.InternalError,
)
_OTHER_START = "context_id"  # what a server says that was started anew in the meantime


@dataclass(frozen=True)
class Connection:
    """The processes whose devices this one drives.

    Attributes:
        addresses: of all, by their numbers; this one is 0.
        serves: says whether TensorFlow's server answers at an address.
        lost: the numbers of those that were stopped or out of reach for too long.
    """

    addresses: tuple[str, ...]
    serves: Callable[[str], bool]
    lost: set[int] = field(default_factory=set)


_made: list[Connection] = []


def connection() -> Connection | None:
    """What `connect` has made, or None."""
    return _made[0] if _made else None


def names() -> tuple[str, ...]:
    """All devices of the connected processes, such as `"0/CPU:0"`, in their order; none where none are connected."""
    if connection() is None:
        return ()
    found = [tf.DeviceSpec.from_string(device.name) for device in tf.config.list_logical_devices()]
    kept = [device for device in found if device.device_type in ("CPU", "GPU")]
    return tuple(f"{device.task}/{device.device_type}:{device.device_index}" for device in kept)


def server(addresses: Sequence[str], number: int) -> tf.distribute.Server:
    """Starts TensorFlow's server with the devices of this process, as `tfgpu.environment` has set them up."""
    config = context.context().config
    # A stage that waits for another one must not hold up what that one needs.
    config.inter_op_parallelism_threads = config.inter_op_parallelism_threads or max(
        len(addresses) + 1, os.cpu_count() or 1
    )
    spec = tf.train.ClusterSpec({JOB: list(addresses)})
    return tf.distribute.Server(spec, job_name=JOB, task_index=number, protocol="grpc", config=config)


def connect(addresses: Sequence[str], serves: Callable[[str], bool]) -> None:
    """Lets this process, which is number 0, use the devices of all.

    Raises:
        MachineError: one of them has gone meanwhile.
    """
    made = Connection(tuple(addresses), serves)
    _made.append(made)
    # Else an assignment to another process's variable (a metric's reset) counts as done when it is sent, and the step
    # that is called next may run before it: 1006 of 1272 times in a loop of both.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "false"
    _allow_replicas_anywhere()
    threading.Thread(target=_watch, args=(made,), name="tfgpu-processes", daemon=True).start()
    spec = tf.train.ClusterSpec({JOB: list(addresses)})
    try:
        tf.config.experimental_connect_to_cluster(spec, job_name=JOB, task_index=0, protocol="grpc")
        tf.config.list_logical_devices()  # starts this process's server, and asks the others for their devices
    except tf.errors.OpError as error:
        raise _gone(made, ()) or error from None


def explained(error: tf.errors.OpError, model) -> MachineError | None:
    """The error to raise in place of TensorFlow's where a process of the connection is gone; else None."""
    made = connection()
    is_of_peer = isinstance(error, _OF_PEERS) or _OTHER_START in error.message
    gone = _gone(made, model.variables) if made is not None and is_of_peer else None
    if gone is not None:
        end_at_once_after_an_error()
    return gone


def end_at_once_after_an_error() -> None:
    """Lets this process end at once where an error ends it.

    TensorFlow says goodbye to each server when the interpreter takes it apart, and may wait for ever for one that is
    gone.
    """
    atexit.register(_end_at_once)


def _end_at_once() -> None:
    if getattr(sys, "last_type", None) is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _gone(made: Connection, variables) -> MachineError | None:
    numbers = sorted({*made.lost, *(at for at in range(1, len(made.addresses)) if not made.serves(made.addresses[at]))})
    if not numbers:
        return None
    devices = {tf.DeviceSpec.from_string(copy.device) for v in variables for copy in _copies(v)}
    told = []
    for number in numbers:
        own = sorted(f"{number}/{d.device_type}:{d.device_index}" for d in devices if d.task == number)
        told.append(f"process {number} ({made.addresses[number]}{', ' + ', '.join(own) if own else ''})")
    return MachineError(
        f"Lost: {'; '.join(told)}. It has ended, is stopped, or has lost its network, and what the model had on its "
        "devices is lost with it. Start all processes again (`tfgpu launch --max-restarts 1` does so): the script goes "
        "on from its newest checkpoint (tfgpu.callbacks.Checkpoint)."
    )


def _copies(variable) -> Sequence:
    value = getattr(variable, "value", variable)
    return getattr(value, "values", [value])


def _allow_replicas_anywhere() -> None:
    """Lets a `MirroredStrategy` have replicas in several processes, all of which this one drives and feeds."""

    @wrap(mirrored_strategy, "_is_device_list_single_worker")
    def is_single_worker(stock, devices):
        return True  # as this process sees it: there is one

    @wrap(mirrored_strategy.MirroredExtended, "_initialize_single_worker")
    def initialize(stock, self, devices):
        stock(self, devices)
        # What belongs to no replica, such as the data, stays here also where the first replica does not.
        host = f"/job:{JOB}/replica:0/task:0/device:CPU:0"
        self._input_workers_devices = ((host, self._input_workers_devices[0][1]),)
        self._host_input_device = type(self._host_input_device)(host)
        self._default_device = f"/job:{JOB}/replica:0/task:0"


def _watch(made: Connection) -> None:
    """Breaks the connections to a process that no longer answers, so that calls which wait for it fail.

    gRPC notices by itself that a process has ended. Of one that is stopped, or whose machine has vanished, it waits for
    the answer for ever, and so would the step.
    """
    answered = dict.fromkeys(range(1, len(made.addresses)), time.monotonic())
    while True:
        time.sleep(LOOK_S)
        for number, at in answered.items():
            if made.serves(made.addresses[number]):
                answered[number] = time.monotonic()
            elif time.monotonic() - at > LOST_AFTER_S:
                if number not in made.lost:
                    _log.warning(
                        "Process %d (%s) has not answered for %d s.", number, made.addresses[number], LOST_AFTER_S
                    )
                made.lost.add(number)
                _cut(made.addresses[number])


def _cut(address: str) -> None:
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
