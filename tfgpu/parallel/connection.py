"""`parallel.connect`: one process runs the script on the devices of several; the others lend it theirs.

All processes start the same script, by `tfgpu launch -n 2 train.py`, by a scheduler, or with a TF_CONFIG each:

    tfgpu.parallel.connect()  # at the top; all processes but 0 stay here until process 0 ends
    mesh = tfgpu.parallel.Mesh(pipeline=2, devices=["0/GPU:0", "1/GPU:0"])
    model = tfgpu.parallel.pipeline(build(), stages=2, microbatches=8, mesh=mesh)
"""

import os
import sys
from collections.abc import Iterable

from tfgpu import environment, rendezvous, repairs
from tfgpu.cluster import Cluster
from tfgpu.environment import Device
from tfgpu.errors import InputError, MachineError, Preempted
from tfgpu.parallel import remote_devices
from tfgpu.rendezvous import peers

_ONE_PROCESS = "{}"  # as a TF_CONFIG


def connect(cluster: Cluster | None = None) -> Cluster:
    """Lends the devices of all processes to process 0, where it returns; the other processes end in this call.

    Call it at the top of the script: after `tfgpu.environment` has set up devices, and before anything starts them.
    From there on, the script runs in process 0 alone, which reads data, trains and writes files. TF_CONFIG says so to
    `tfgpu.strategy()`, `tfgpu.data` and child processes. In a cluster of one process it does nothing.

    Args:
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        The facts, in process 0. The first device of process 1 is `"1/GPU:0"`.

    Raises:
        InputError: the cluster has parameter servers.
        MachineError: a process did not answer within `TFGPU_STARTUP_TIMEOUT` seconds (60), or TensorFlow has started
            the devices of this one.
        SystemExit: in the other processes: 0 when process 0 has ended, 75 if SIGTERM came before.

    Example:
        >>> connect().size
        1
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    if cluster.parameter_servers:
        raise InputError("`connect` needs a cluster of workers. This one has parameter servers: remove `--ps`.")
    if not cluster.is_multi_worker:
        return cluster
    if environment.is_initialized():
        raise MachineError(
            "`tfgpu.parallel.connect()` came too late: TensorFlow has started the devices of this process. Call it "
            "before the first model, strategy or tensor; in a notebook, restart the kernel first."
        )
    peers.fail_fast()
    rendezvous.join(cluster)
    if cluster.rank:
        _serve(cluster)
    until = peers.deadline()
    for number, address in list(enumerate(cluster.workers))[1:]:
        peers.wait_for(f"process {number}", address, until)
    repairs.repair_keras()
    remote_devices.connect(cluster.workers, peers.serves)
    os.environ["TF_CONFIG"] = _ONE_PROCESS
    return cluster


def check() -> None:
    """Refuses to spread a model where several processes would each train their own.

    Raises:
        InputError: as described.
    """
    cluster = Cluster.from_environment()
    if cluster.is_multi_worker and remote_devices.connection() is None:
        raise InputError(
            f"This is one of {cluster.size} processes, and each would train its own model. Call "
            "`tfgpu.parallel.connect()` at the top of the script to put one model on all of them, or set "
            "TF_CONFIG='{}' to make the processes independent."
        )


def select(chosen: int | str | Iterable[str] | None) -> tuple[Device, ...]:
    """The devices that were asked for, of this process and of connected ones; None returns all.

    Raises:
        InputError: as for `environment.select`, or `check`.
    """
    check()
    connected = remote_devices.names()
    return environment.everywhere(connected) if chosen is None else environment.select(chosen, connected)


def _serve(cluster: Cluster) -> None:
    asked: list[bool] = []
    # SIGTERM may have come to process 0 as well, which needs these devices to save what is on them.
    with peers.hearing_term(lambda: asked.append(True)):
        server = remote_devices.server(cluster.workers, cluster.rank)
        peers.stay_with(cluster.workers[0], f"process {cluster.rank}", is_asked_to_leave=lambda: bool(asked))
    del server
    sys.exit(Preempted.EXIT_CODE if asked else 0)
