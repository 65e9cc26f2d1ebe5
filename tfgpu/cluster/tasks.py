"""The task types of a cluster, and the fields of a `Cluster` from a process number."""

from collections.abc import Mapping, Sequence

from tfgpu.cluster import values
from tfgpu.errors import InputError

JOBS = ("chief", "worker", "ps", "evaluator")
PARAMETER_SERVERS = "TFGPU_PARAMETER_SERVERS"


def rank_of(task_type: str, task_index: int, has_chief: bool) -> int:
    """The position of a task among those that train; -1 if it does not train."""
    if task_type == "worker":
        return task_index + int(has_chief)
    return task_index if task_type == "chief" else -1


def numbered(addresses: Sequence[str], place: int, *, source: str, parameter_servers: int = 0) -> dict:
    """Makes the fields of a `Cluster` from addresses in the order of the processes.

    Args:
        addresses: `host:port` of every process.
        place: this process's position in `addresses`.
        source: where the facts come from.
        parameter_servers: how many processes, the last ones, are parameter servers. If any, the first is the chief.

    Returns:
        Keyword arguments of `Cluster`.

    Raises:
        InputError: no process would be left to train, or `place` is out of range.
    """
    training = len(addresses) - parameter_servers
    if not 0 <= place < len(addresses):
        raise InputError(f"a process's number must be from 0 to {len(addresses) - 1}, got {place}.")
    if parameter_servers and training < 2:
        raise InputError(
            f"{parameter_servers} parameter servers leave {max(training, 0)} of {len(addresses)} processes to train, "
            f"but a chief and a worker are needed. Start {parameter_servers + 2} or more."
        )
    has_chief = bool(parameter_servers)
    if place >= training:
        task_type, index = "ps", place - training
    elif has_chief and place == 0:
        task_type, index = "chief", 0
    else:
        task_type, index = "worker", place - int(has_chief)
    return {
        "workers": tuple(addresses[:training]),
        "parameter_servers": tuple(addresses[training:]),
        "task_type": task_type,
        "task_index": index,
        "rank": rank_of(task_type, index, has_chief),
        "has_chief": has_chief,
        "source": source,
    }


def parameter_servers(environ: Mapping[str, str]) -> int:
    """Reads TFGPU_PARAMETER_SERVERS: how many processes, the last ones, are parameter servers."""
    return values.whole(environ, PARAMETER_SERVERS, default=0)
