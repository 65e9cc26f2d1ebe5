"""Processes of one `mpirun`, whose variables give this process's rank, but not the addresses of the others.

The hosts come from TFGPU_HOSTS (in the format of `mpirun -H`) or from the Slurm allocation around the `mpirun`. If all
processes run on this machine, neither is needed.

Sources: https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html,
https://www.mpich.org/static/docs/latest/www1/mpiexec.html
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from tfgpu.cluster import hostlist, slurm, tasks, values
from tfgpu.errors import InputError

HOSTS = slurm.HOSTS
EXAMPLE = f"{HOSTS}=host1:4,host2:4"
# Rank, size, local rank and local size, by launcher. The first two must be set.
LAUNCHERS = {
    "Open MPI": (
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    "MVAPICH": (
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
    ),
    "MPICH or Intel MPI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "Cray MPICH": ("PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE"),
}
# Variables that identify a job: equal in all its processes, different in other jobs.
_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "PMI_JOBID", "PALS_APID", "SLURM_JOB_ID")
_HOST = re.compile(r"(?P<hosts>[^:]+?)(?::(?P<slots>[0-9]{1,6}))?")


@dataclass(frozen=True)
class World:
    """MPI_COMM_WORLD according to the environment; unknown local numbers are -1."""

    rank: int
    size: int
    local_rank: int
    local_size: int


def world(environ: Mapping[str, str]) -> World | None:
    """Reads rank and size; None if no `mpirun` has set them.

    Raises:
        InputError: a number is malformed.
    """
    for names in sorted(LAUNCHERS.values(), key=lambda names: not values.text(environ, names[2])):
        if values.text(environ, names[0]) and values.text(environ, names[1]):
            size = values.whole(environ, names[1], least=1)
            rank = values.whole(environ, names[0], most=size - 1)
            local = [values.whole(environ, name) if values.text(environ, name) else -1 for name in names[2:]]
            return World(rank, size, *local)
    return None


def read(environ: Mapping[str, str]) -> dict | None:
    """Reads the variables that `mpirun` sets in a process.

    Args:
        environ: environment variables by name. TFGPU_HOSTS lists hosts and slots as `mpirun -H` does, and must be set
            in every process (Open MPI: `mpirun -x TFGPU_HOSTS`); TFGPU_PORT is the first port.

    Returns:
        Keyword arguments of `Cluster`, or None without MPI or with one process.

    Raises:
        InputError: a variable is malformed, or the other processes' hosts are unknown.
    """
    found = world(environ) or _pmix(environ)
    if found is None or found.size == 1:
        return None
    hosts, origin = _hosts(environ, found)
    counts = _filled(hosts, found.size, origin)
    where = [(node, task) for node, count in enumerate(counts) for task in range(count)]
    node, local = where[found.rank]
    _check_place(found, local, counts[node], origin)
    job = [values.text(environ, name) for name in _JOB]
    ports = values.ports(values.first_port(environ, ["mpi", *job]), counts)
    addresses = [f"{hosts[node][0]}:{ports[node][task]}" for node, task in where]
    fields = tasks.numbered(addresses, found.rank, source="MPI", parameter_servers=tasks.parameter_servers(environ))
    gpus = _gpus(environ, local, counts[node])
    return {**fields, "local_rank": local, "local_size": counts[node], "gpus": gpus}


def _pmix(environ: Mapping[str, str]) -> World | None:
    """A plain PMIx launcher sets the rank but not the size; so does Slurm's, for one task."""
    if not values.text(environ, "PMIX_RANK") or values.text(environ, "SLURM_STEP_NODELIST"):
        return None
    if not values.text(environ, HOSTS):
        raise InputError(
            f"PMIX_RANK={values.quoted(environ['PMIX_RANK'])} gives this process's rank, but not the number of "
            f"processes. Set {HOSTS} to the hosts and their slots, such as {EXAMPLE}, or start with `tfgpu launch`."
        )
    size = sum(slots for _, slots in _listed(environ))
    return World(values.whole(environ, "PMIX_RANK", most=size - 1), size, -1, -1)


def _hosts(environ: Mapping[str, str], found: World) -> tuple[list[tuple[str, int]], str]:
    """The hosts with their slots, and the variable that names them."""
    if values.text(environ, HOSTS):
        return _listed(environ), HOSTS
    if found.local_size == found.size:
        return [("127.0.0.1", found.size)], "one machine"
    if values.text(environ, "SLURM_JOB_NODELIST"):
        # SLURM_TASKS_PER_NODE does not help: on all hosts but the first it counts `mpirun`'s helpers.
        nodes = slurm.hosts_of(environ, "SLURM_JOB_NODELIST")
        if len(nodes) * found.local_size == found.size:
            return [(node, found.local_size) for node in nodes], "SLURM_JOB_NODELIST"
    raise InputError(
        f"According to MPI this is process {found.rank} of {found.size}, but the hosts of the others are unknown. Set "
        f"{HOSTS} to the hosts and their slots in the order of the ranks, such as {EXAMPLE} (Open MPI: `mpirun -x "
        f"{HOSTS}`), or start with `srun` or `tfgpu launch`."
    )


def _listed(environ: Mapping[str, str]) -> list[tuple[str, int]]:
    hosts: list[tuple[str, int]] = []
    for part in re.split(r",(?![^\[\]]*\])", environ[HOSTS]):
        match = _HOST.fullmatch(part.strip())
        if not match or match["slots"] and int(match["slots"]) < 1:
            raise values.malformed(HOSTS, environ[HOSTS], f"{part[:60]!r} is not HOST:SLOTS.", EXAMPLE)
        try:
            names = hostlist.expand(match["hosts"])
        except InputError as error:
            raise InputError(f"{HOSTS} is malformed: {error} With slots: {EXAMPLE}.") from None
        for name in names:
            before = hosts.pop()[1] if hosts and hosts[-1][0] == name else 0  # Listed again: one more slot.
            hosts.append((name, before + int(match["slots"] or 1)))
    return hosts


def _filled(hosts: list[tuple[str, int]], size: int, origin: str) -> list[int]:
    """The number of ranks on each host, filling the hosts in order; hosts past the last rank are omitted."""
    counts: list[int] = []
    for _, slots in hosts:
        counts.append(min(slots, size - sum(counts)))
        if sum(counts) == size:
            return counts
    raise InputError(f"{origin} has {sum(counts)} slots for {size} processes. List more, such as {EXAMPLE}.")


def _check_place(found: World, local: int, local_size: int, origin: str) -> None:
    if found.local_rank in (-1, local) and found.local_size in (-1, local_size):
        return
    raise InputError(
        f"According to {origin}, rank {found.rank} is process {local} of {local_size} on its host, but MPI says "
        f"{found.local_rank} of {found.local_size}: the ranks do not fill the hosts in order. Start with "
        f"`mpirun --map-by slot`, or set {HOSTS} in the order of the ranks: {EXAMPLE}."
    )


def _gpus(environ: Mapping[str, str], local: int, processes_here: int) -> tuple[str, ...] | None:
    """This process's share of CUDA_VISIBLE_DEVICES; None if there is nothing to share."""
    shown = [each.strip() for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]
    each = len(shown) // processes_here
    if processes_here == 1 or not each or "-1" in shown:
        return None
    return tuple(shown[local * each : (local + 1) * each])
