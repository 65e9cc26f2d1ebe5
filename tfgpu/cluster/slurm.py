"""The tasks of one `srun`, from Slurm's step variables.

A batch script outside `srun`, an interactive `salloc` shell and an `srun` of one task each count as one process.

Source: https://slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
"""

import itertools
import re
from collections.abc import Mapping, Sequence

from tfgpu.cluster import hostlist, values
from tfgpu.errors import InputError

HOSTS = "TFGPU_HOSTS"
_COUNT = re.compile(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?")
# `--gpus-per-task=2`, `=a100:2` and `gres/gpu:a100:2` all end in the number.
_GPUS = re.compile(r"(?:[\w./-]+[:=])*([0-9]{1,4})")


def read(environ: Mapping[str, str]) -> dict | None:
    """Reads the Slurm step that this process is a task of.

    Args:
        environ: environment variables by name. TFGPU_HOSTS lists the nodes' host names, in the nodes' order, for nodes
            whose own names do not resolve; TFGPU_PORT is the first port; TFGPU_PARAMETER_SERVERS is the number of
            parameter servers, which are the last tasks.

    Returns:
        Keyword arguments of `Cluster`, or None outside a step of several tasks.

    Raises:
        InputError: a variable is malformed, or contradicts the others.
    """
    if not _in_step(environ):
        return None
    name = "SLURM_STEP_NUM_TASKS" if values.text(environ, "SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    size = values.whole(environ, name, least=1)
    if size == 1:
        return None
    place = values.whole(environ, "SLURM_PROCID", most=size - 1)
    nodes = hosts_of(environ, "SLURM_STEP_NODELIST")
    counts = _counts(environ, len(nodes), size)
    where = _placed(environ, counts)
    node, local = where[place]
    _check_place(environ, place, node, local)
    job = [values.text(environ, name) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")]
    ports = values.ports(values.first_port(environ, ["slurm", *job]), counts)
    names = _hosts(environ, nodes)
    addresses = [f"{names[node]}:{ports[node][task]}" for node, task in where]
    fields = values.numbered(addresses, place, source="Slurm", parameter_servers=values.parameter_servers(environ))
    return {**fields, "local_rank": local, "local_size": counts[node], "gpus": _gpus(environ, local, counts[node])}


def hosts_of(environ: Mapping[str, str], name: str) -> list[str]:
    """Expands a variable that holds a hostlist."""
    try:
        return hostlist.expand(environ[name])
    except InputError as error:
        raise InputError(f"{name} is malformed: {error}") from None


def repeated(environ: Mapping[str, str], name: str) -> list[int]:
    """Expands Slurm's notation for counts per node: `2(x3),1` is 2, 2, 2, 1."""
    found: list[int] = []
    for part in environ[name].split(","):
        match = _COUNT.fullmatch(part.strip())
        if not match or int(match[1]) < 1 or len(found) + int(match[2] or 1) > hostlist.MOST:
            raise values.malformed(name, environ[name], f"{part[:60]!r} is not a task count.", f"{name}='2(x3),1'")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _in_step(environ: Mapping[str, str]) -> bool:
    if not values.text(environ, "SLURM_STEP_NODELIST") or not values.text(environ, "SLURM_PROCID"):
        return False
    if not values.text(environ, "SLURM_JOB_NODELIST"):
        return True
    # `sbatch` inside a step passes the old step's variables to the new job.
    return set(hosts_of(environ, "SLURM_STEP_NODELIST")) <= set(hosts_of(environ, "SLURM_JOB_NODELIST"))


def _counts(environ: Mapping[str, str], nodes: int, size: int) -> list[int]:
    for name in ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"):
        if values.text(environ, name):
            counts = repeated(environ, name)
            break
    else:
        name, counts = "SLURM_STEP_TASKS_PER_NODE", [size // nodes] * nodes
    if len(counts) != nodes or sum(counts) != size:
        problem = f"it must give the number of tasks on each of {nodes} nodes, {size} in total."
        example = f"{size // nodes}(x{nodes})" if size % nodes == 0 else "2(x3),1"
        raise values.malformed(name, environ.get(name, ""), problem, f"{name}='{example}'")
    return counts


def _placed(environ: Mapping[str, str], counts: Sequence[int]) -> list[tuple[int, int]]:
    """The node of each task, and its number on that node, in the order of the tasks."""
    kind = re.split(r"[:,=]", values.text(environ, "SLURM_DISTRIBUTION").lower() or "block")[0]
    if kind in ("block", "nopack", "pack", "*"):
        run = max(counts)
    elif kind == "cyclic":
        run = 1
    elif kind == "plane":
        run = values.whole(environ, "SLURM_DIST_PLANESIZE", least=1)
    else:
        name, problem = "SLURM_DISTRIBUTION", "it does not determine the node of each task."
        fix = "Start with `srun --distribution=block`."
        raise values.malformed(name, environ[name], f"{problem} {fix}", f"{name}=block")
    where: list[tuple[int, int]] = []
    for start in itertools.count(0, run):
        if len(where) == sum(counts):
            return where
        for node, count in enumerate(counts):
            where += [(node, task) for task in range(start, min(start + run, count))]


def _check_place(environ: Mapping[str, str], place: int, node: int, local: int) -> None:
    for name, expected in (("SLURM_NODEID", node), ("SLURM_LOCALID", local)):
        found = values.whole(environ, name, default=expected)
        if found != expected:
            raise InputError(
                f"{name} contradicts SLURM_STEP_TASKS_PER_NODE and SLURM_DISTRIBUTION. Expected {expected} for task "
                f"{place}. Received: '{found}'. Start with `srun --distribution=block`."
            )


def _hosts(environ: Mapping[str, str], nodes: list[str]) -> list[str]:
    if not values.text(environ, HOSTS):
        return nodes
    hosts = hosts_of(environ, HOSTS)
    if len(hosts) != len(nodes):
        problem = f"it must list one host for each of the step's {len(nodes)} nodes."
        raise values.malformed(HOSTS, environ[HOSTS], problem, f"{HOSTS}={','.join(nodes)}")
    return hosts


def _gpus(environ: Mapping[str, str], local: int, tasks_here: int) -> tuple[str, ...] | None:
    """This task's share of the node's GPUs; None if Slurm has already bound them, or there are too few."""
    if tasks_here == 1:
        return None
    # The step's GPUs on this node, numbered from 0 as CUDA does.
    names = [each for each in values.text(environ, "SLURM_STEP_GPUS").split(",") if each]
    on_node = [str(index) for index in range(values.whole(environ, "SLURM_GPUS_ON_NODE", default=len(names)))]
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    shown = on_node if visible is None else [each.strip() for each in visible.split(",") if each.strip()]
    each = len(shown) // tasks_here
    wanted = values.text(environ, "SLURM_GPUS_PER_TASK")
    if wanted:
        match = _GPUS.fullmatch(wanted)
        if not match:
            raise values.malformed("SLURM_GPUS_PER_TASK", wanted, "it must end in a number.", "SLURM_GPUS_PER_TASK=2")
        each = int(match[1])
    if not each or len(shown) < max(len(on_node), each * tasks_here):
        return None
    return tuple(shown[local * each : (local + 1) * each])
