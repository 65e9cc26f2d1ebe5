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
EARLY_S = 60
"""How many seconds early Slurm may send its signal."""
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
        grace_s: whole seconds for the tasks to save before the time limit, or after a request to stop.
        options: further options of sbatch in their long form, such as `"--qos=high"` or `"--cpus-per-task=8"`.

    Raises:
        InputError: a value is malformed, or the launch sets the option itself.

    Example:
        >>> Allocation(nodes=2, time="1:30")
        Traceback (most recent call last):
        tfgpu.errors.InputError: `time` must be more than 120 s: `grace_s` and the 60 s by which Slurm's signal may \
come early. Received: '1:30', which is 90 s. Increase `time`, or decrease `grace_s`.
    """

    nodes: int = 1
    time: str | None = None
    partition: str | None = None
    account: str | None = None
    grace_s: int = 60
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("nodes", "grace_s"):
            whole_number(name, getattr(self, name), maximum=65535)
        for name in ("partition", "account"):
            value = getattr(self, name)
            if value is not None and not _NAME.fullmatch(value):
                raise InputError(f"`{name}` must be a name as Slurm shows it, without spaces. Received: {value!r}.")
        self._check_time()
        for option in self.options:
            _check_option(option, given=[name for name in ("time", "partition", "account") if getattr(self, name)])

    def _check_time(self) -> None:
        limit = None if self.time is None else seconds(self.time)
        least = self.grace_s + EARLY_S
        if limit is not None and limit <= least:
            raise InputError(
                f"`time` must be more than {least} s: `grace_s` and the {EARLY_S} s by which Slurm's signal may come "
                f"early. Received: {self.time!r}, which is {limit} s. Increase `time`, or decrease `grace_s`."
            )


def seconds(limit: str) -> int | None:
    """Parses a time limit as sbatch does.

    Args:
        limit: such as `"90"` (minutes), `"90:00"`, `"1:30:00"`, `"2-12"` (days and hours), `"2-12:30"`, or
            `"UNLIMITED"`.

    Returns:
        Seconds; None for no limit.

    Raises:
        InputError: it has none of these forms.

    Example:
        >>> seconds("90"), seconds("1:30:00"), seconds("2-12")
        (5400, 5400, 216000)

    Source: https://slurm.schedmd.com/sbatch.html#OPT_time
    """
    if limit.lower() in ("unlimited", "infinite"):
        return None
    days, dash, rest = limit.rpartition("-")
    parts = rest.split(":")
    if not re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6}){0,2}", rest) or (dash and not re.fullmatch(r"[0-9]{1,5}", days)):
        raise InputError(f"`time` must look like '90' (minutes), '1:30:00' or '2-12:30:00'. Received: {limit!r}.")
    if not dash and len(parts) < 3:
        parts.insert(0, "0")  # Minutes come first.
    hours, minutes, rest_s = [int(part) for part in parts] + [0] * (3 - len(parts))
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + rest_s


def _check_option(option: str, *, given: list[str]) -> None:
    match = _OPTION.fullmatch(option)
    if not match:
        raise InputError(f"sbatch options must be in their long form, such as '--qos=high'. Received: {option!r}.")
    if match[1] in OWN:
        raise InputError(f"sbatch's --{match[1]} cannot be set here. {OWN[match[1]]} Received: {option!r}.")
    if match[1] in given:
        raise InputError(f"--{match[1]} is given twice. Received: {option!r} as well.")
