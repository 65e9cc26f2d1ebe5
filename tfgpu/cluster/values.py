"""Reads numbers, ports and tasks from environment variables; errors quote the value and show a valid one."""

import re
import zlib
from collections.abc import Mapping, Sequence

from tfgpu.errors import InputError

JOBS = ("chief", "worker", "ps", "evaluator")
PARAMETER_SERVERS = "TFGPU_PARAMETER_SERVERS"
PORT = "TFGPU_PORT"
# Below Linux's ephemeral ports (32768 and up), which any connection may use, and above most services' ports.
FIRST_PORT = 10240
PORTS_OF_A_JOB = 16
_JOBS = 1400
_QUOTED_CHARACTERS = 2000


def quoted(value: str) -> str:
    """The `repr` of a value, truncated if very long."""
    return repr(value if len(value) <= _QUOTED_CHARACTERS else value[:_QUOTED_CHARACTERS] + "...")


def malformed(name: str, value: str, problem: str, example: str) -> InputError:
    """Makes the error for a variable that cannot be parsed."""
    return InputError(f"{name} is malformed: {problem} Received: {quoted(value)}. Expected a value such as {example}.")


def text(environ: Mapping[str, str], name: str) -> str:
    """The stripped value of a variable; empty if it is not set."""
    return environ.get(name, "").strip()


def whole(
    environ: Mapping[str, str], name: str, *, default: int | None = None, least: int = 0, most: int = 10**9
) -> int:
    """Reads a whole number.

    Raises:
        InputError: it is missing without a default, not a number, or out of range.
    """
    value = text(environ, name)
    if not value and default is not None:
        return default
    if not re.fullmatch(r"[0-9]{1,10}", value) or not least <= int(value) <= most:
        span = f"of at least {least}" if most == 10**9 else f"from {least} to {most}"
        problem = "it is not set." if name not in environ else f"it must be a whole number {span}."
        raise malformed(name, environ.get(name, ""), problem, f"{name}={max(least, 2)}")
    return int(value)


def first_port(environ: Mapping[str, str], job: Sequence[str]) -> int:
    """The first port of a job: TFGPU_PORT, or one derived from the job's identity.

    Args:
        environ: environment variables by name.
        job: identifies the job, such as its number and its step's; equal in all its processes.

    Returns:
        A port; it and the next `PORTS_OF_A_JOB - 1` are below the ephemeral ports.
    """
    if text(environ, PORT):
        return whole(environ, PORT, least=1, most=65535)
    return FIRST_PORT + PORTS_OF_A_JOB * (zlib.crc32("/".join(job).encode()) % _JOBS)


def ports(first: int, counts: Sequence[int]) -> list[list[int]]:
    """The ports of a job's tasks, by node: ports on one node differ, and so do the job's first 16.

    So nodes that share one machine, as in a test setup, do not clash.

    Args:
        first: the job's first port.
        counts: tasks of each node.

    Example:
        >>> ports(12000, [2, 2])
        [[12000, 12001], [12002, 12003]]
    """
    widest = max(counts)
    span = max(PORTS_OF_A_JOB, widest)
    return [[first + (node * widest + task) % span for task in range(count)] for node, count in enumerate(counts)]


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
    task = {"task_type": task_type, "task_index": index, "rank": rank_of(task_type, index, has_chief)}
    all_tasks = {"workers": tuple(addresses[:training]), "parameter_servers": tuple(addresses[training:])}
    return {**task, **all_tasks, "has_chief": has_chief, "source": source}


def parameter_servers(environ: Mapping[str, str]) -> int:
    """Reads TFGPU_PARAMETER_SERVERS: how many processes, the last ones, are parameter servers."""
    return whole(environ, PARAMETER_SERVERS, default=0)
