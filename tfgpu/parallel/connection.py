"""The devices of several processes as those of one: one process runs the script, and the others lend it theirs.

One script for all, started by `tfgpu launch -n 2 train.py`, by a scheduler, or with a TF_CONFIG each:

    tfgpu.parallel.connect()  # at the top; the others stay here until process 0 is done
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

NONE_GIVEN = "{}"
"""A TF_CONFIG that says: one process."""


def connect(cluster: Cluster | None = None) -> Cluster:
    """Lends the devices of all processes to the first one, which returns and runs the script; the others end here.

    Stands at the top of the script, before anything that starts TensorFlow's devices, and after what sets them up
    (`tfgpu.environment`). From here on the script is one process's: it alone reads data, trains, and writes files, and
    TF_CONFIG says so to `tfgpu.strategy()`, `tfgpu.data` and all that is started from it. In one process nothing is
    done, so that the same script runs with `"GPU:0"` and its like.

    Args:
        cluster: the facts of the cluster; `None` reads them from the environment.

    Returns:
        The facts, in the first process. Of the devices of process 1, `"1/GPU:0"` is the first.

    Raises:
        InputError: the cluster has parameter servers.
        MachineError: a process did not answer within `TFGPU_STARTUP_TIMEOUT` seconds (60), or TensorFlow has started
            this one's devices.
        SystemExit: in the others: 0 when the first one is gone, 75 where SIGTERM came before.

    Example:
        >>> connect().size
        1
    """
    cluster = Cluster.from_environment() if cluster is None else cluster
    if cluster.parameter_servers:
        raise InputError(
            "`connect` needs a cluster of workers alone. This one has parameter servers: leave out `--ps`."
        )
    if not cluster.is_multi_worker:
        return cluster
    if environment.is_initialized():
        raise MachineError(
            "`tfgpu.parallel.connect()` comes too late: TensorFlow has started its devices in this process. Call it "
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
    os.environ["TF_CONFIG"] = NONE_GIVEN
    return cluster


def check() -> None:
    """Refuses to spread a model where several processes would each train one of their own.

    Raises:
        InputError: as said.
    """
    cluster = Cluster.from_environment()
    if cluster.is_multi_worker and remote_devices.connection() is None:
        raise InputError(
            f"This is one of {cluster.size} processes, and each would train a model of its own. Call "
            "`tfgpu.parallel.connect()` at the top of the script to spread one over all of them, or set TF_CONFIG to "
            "'{}' where they shall know nothing of each other."
        )


def select(chosen: int | str | Iterable[str] | None) -> tuple[Device, ...]:
    """The devices that someone asked for, of this process and of those that are connected; None for all.

    Raises:
        InputError: as for `environment.select`, or `check`.
    """
    check()
    connected = remote_devices.names()
    return environment.everywhere(connected) if chosen is None else environment.select(chosen, connected)


def _serve(cluster: Cluster) -> None:
    asked: list[bool] = []
    # The first process may have been asked too, and needs these devices to save what is on them.
    with peers.hearing_term(lambda: asked.append(True)):
        server = remote_devices.server(cluster.workers, cluster.rank)
        peers.stay_with(cluster.workers[0], f"process {cluster.rank}", is_asked_to_leave=lambda: bool(asked))
    del server
    sys.exit(Preempted.EXIT_CODE if asked else 0)
