"""What a launch starts on any engine: a script, its processes, and the restart policy."""

from dataclasses import dataclass, field
from pathlib import Path

from tfgpu.errors import InputError, is_number, positive, whole_number


@dataclass(frozen=True)
class Job:
    """A script to run as the processes of one cluster.

    Args:
        script: the Python file; every process runs `python -m tfgpu.run script arguments...`.
        arguments: the script's own.
        workers: processes that train, the chief included.
        parameter_servers: processes that hold variables; 0 for synchronous training.
        evaluator: whether one more process, outside the cluster, evaluates the checkpoints that the others save.
        gpus_per_worker: GPUs of each worker; None divides the machine's GPUs among them.
        max_restarts: restarts of the group after failures. A preemption uses none.
        startup_timeout_s: rendezvous timeout in seconds, after which a missing process is named.
        heartbeat_timeout_s: heartbeat timeout in seconds; 0: none.
        logs: folder for one log file per process; None writes none.
        environment: additional environment variables of every process.

    Raises:
        InputError: a number is out of range.

    Example:
        from tfgpu.launch import Job, local
        code = local.launch(Job("train.py", workers=4, max_restarts=3))
    """

    script: str
    arguments: tuple[str, ...] = ()
    workers: int = 1
    parameter_servers: int = 0
    evaluator: bool = False
    gpus_per_worker: int | None = None
    max_restarts: int = 0
    startup_timeout_s: float = 60.0
    heartbeat_timeout_s: float = 60.0
    logs: Path | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, least in (("workers", 1), ("parameter_servers", 0), ("max_restarts", 0)):
            whole_number(name, getattr(self, name), minimum=least)
        if self.gpus_per_worker is not None:
            whole_number("gpus_per_worker", self.gpus_per_worker, minimum=0)
        positive("startup_timeout_s", self.startup_timeout_s)
        silence_s = self.heartbeat_timeout_s
        if not is_number(silence_s) or not silence_s >= 0:
            raise InputError(f"`heartbeat_timeout_s` must be 0 (never) or more. Received: {silence_s!r}.")
