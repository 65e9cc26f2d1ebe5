"""The processes of a job on several machines, reached through ssh.

A supervisor (`tfgpu.launch.remote`) runs on each for as long as the connection lasts, so all end with the launcher.
Environment variables are sent over the connection, never on a command line, where `ps` would show them.
"""

import dataclasses
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence

from tfgpu.errors import InputError
from tfgpu.launch import local
from tfgpu.launch.job import Job
from tfgpu.launch.link import Link

OPTIONS = ("-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no")
OPTIONS += ("-o", "ServerAliveInterval=5", "-o", "ServerAliveCountMax=3")
"""No prompts, since nobody may be there to answer; a lost network is noticed within 15 s."""
CARRIED = re.compile(
    r"(TF|TFGPU|KERAS|XLA|NCCL|CUDA|OMP|MKL|HF|TFDS|WANDB|MLFLOW|AWS|GOOGLE)_\w+|PYTHON\w+|(LD_LIBRARY|)PATH"
)
"""The environment variables of this process that every process gets."""


def launch(
    job: Job,
    nodes: Sequence[str],
    *,
    python: str | None = None,
    directory: str | None = None,
    ssh: str = "ssh",
    grace_period_s: float = local.GRACE_S,
    runner: Sequence[str] = ("-m", "tfgpu.run"),
) -> int:
    """Runs a job's processes on several machines until all have ended.

    Every machine needs Python with tfgpu, and the script, at the same paths as here.

    Args:
        job: what to run; its workers are spread over the nodes.
        nodes: what `ssh` takes: `"host"`, `"user@host"`, `"ssh://user@host:port"`, or a name of its configuration.
        python: the interpreter on the nodes; None: the same path as here.
        directory: where the script runs on the nodes; None: the same path as here.
        ssh: the command, with options, such as `"ssh -i key"`.
        grace_period_s: seconds that processes get to save after a request to stop that no failure caused.
        runner: the interpreter's arguments before the script.

    Returns:
        The exit code, as of `tfgpu.launch.local.launch`; 1 if a node cannot be reached.

    Raises:
        InputError: the nodes or settings are invalid.
    """
    nodes = checked(nodes)
    local.check(job, script=False)
    python, directory = python or sys.executable, directory or os.getcwd()
    # GPUs differ between machines; the launch sets the other variables itself.
    own = ("CUDA_VISIBLE_DEVICES", *local.OURS)
    carried = {name: value for name, value in os.environ.items() if CARRIED.fullmatch(name) and name not in own}
    job = dataclasses.replace(job, environment={**carried, **job.environment})
    options = {"grace_period_s": grace_period_s, "environ": carried, "directory": directory}

    def connect() -> list[Link]:
        return [Link(node, command(ssh, node, python, directory, os.environ), pings=True) for node in nodes]

    return local.run(job, connect, nodes, runner=[python, *runner], **options)


def checked(nodes: Sequence[str]) -> list[str]:
    """Returns the nodes as ssh takes them.

    Raises:
        InputError: no node is given, one is malformed, or one is given twice.
    """
    names = [name.strip() for name in nodes]
    for name in names:
        if not name or name.startswith("-") or any(character.isspace() for character in name):
            raise InputError(f"--hosts must be a list of names separated by commas. Received: {','.join(nodes)!r}.")
        if names.count(name) > 1:
            raise InputError(f"--hosts has {name!r} twice. Name it once, and request more workers with -n.")
    if not names:
        raise InputError("--hosts must name at least one machine, such as --hosts host1,host2.")
    return names


def command(ssh: str, node: str, python: str, directory: str, environ: Mapping[str, str]) -> list[str]:
    """Returns the command that starts a node's supervisor.

    Example:
        >>> command("ssh -i key", "host1", "/opt/python", "/my work", {})[-2:]
        ['host1', "cd '/my work' && exec env /opt/python -m tfgpu.launch.remote"]
    """
    # Other variables are sent over the connection.
    found = [f"PYTHONPATH={shlex.quote(environ['PYTHONPATH'])}"] if environ.get("PYTHONPATH") else []
    start = " ".join([*found, shlex.quote(python), "-m tfgpu.launch.remote"])
    return [*shlex.split(ssh), *OPTIONS, "--", node, f"cd {shlex.quote(directory)} && exec env {start}"]
