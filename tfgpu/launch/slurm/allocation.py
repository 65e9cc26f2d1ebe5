"""What a job requests from Slurm, checked before submission."""

import re
from dataclasses import dataclass

from tfgpu.errors import InputError, whole_number

OWN = {
    "array": "Submit one job per run.",
    "chdir": "The job runs where you submit it.",
    "error": "Use --logs.",
    "gpus-per-task": "Use --gpus-per-worker.",
    "nodes": "Use --nodes.",
    "no-requeue": "A preempted job continues only if it is requeued.",
    "ntasks": "Use -n.",
    "ntasks-per-node": "Use -n.",
    "open-mode": "Logs are appended, so a requeued job keeps its log.",
    "output": "Use --logs.",
    "parsable": "It is always set.",
    "requeue": "It is always set.",
    "signal": "Use --grace-period.",
    "wait": "Use --wait without --sbatch.",
    "wrap": "Give the script.",
}
"""Options of sbatch that the launch sets itself, and what to use instead."""
_NAME = re.compile(r"[A-Za-z0-9_.@+-]+(?:,[A-Za-z0-9_.@+-]+)*")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=([^\n]*))?")


@dataclass(frozen=True)
class Allocation:
    """What a job requests from Slurm.

    Args:
        nodes: number of machines.
        time: the limit in sbatch's format: minutes, `hours:minutes:seconds` or `days-hours:minutes:seconds`. None
            takes the partition's.
        partition: one or several, separated by commas; None takes the default.
        account: the account to charge; None takes the user's default.
        grace_period_s: whole seconds for the tasks to save before the time limit, or after a request to stop. Slurm may
            send its signal a minute early, so `time` must be longer by more than that.
        options: further options of sbatch in their long form, such as `"--qos=high"` or `"--cpus-per-task=8"`.

    Raises:
        InputError: a value is malformed, or the launch sets the option itself.

    Example:
        >>> Allocation(nodes=2, options=("--wait",))
        Traceback (most recent call last):
        tfgpu.errors.InputError: sbatch's --wait cannot be set here. Use --wait without --sbatch. Received: '--wait'.
    """

    nodes: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    grace_period_s: int = 60
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "grace_period_s"):
            whole_number(name, getattr(self, name), maximum=65535)
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise InputError(f"`{name}` must be a name as Slurm shows it, without spaces. Received: {value!r}.")
        for option in self.options:
            _check_option(option, given=[name for name in ("time", "partition", "account") if getattr(self, name)])


def _check_option(option: str, *, given: list[str]) -> None:
    match = _OPTION.fullmatch(option)
    if not match:
        raise InputError(f"sbatch options must be in their long form, such as '--qos=high'. Received: {option!r}.")
    if match[1] in OWN:
        raise InputError(f"sbatch's --{match[1]} cannot be set here. {OWN[match[1]]} Received: {option!r}.")
    if match[1] in given:
        raise InputError(f"--{match[1]} is given twice. Received: {option!r} as well.")
