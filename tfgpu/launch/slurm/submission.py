"""Writes the batch file of a Slurm job, submits it, and shows how to follow it.

Example:
    >>> print(batch_file(Job("train.py", workers=2, logs=Path("/logs")), Allocation(nodes=2)))  # doctest: +ELLIPSIS
    #!/bin/bash
    ...
    #SBATCH --nodes=2
    ...

The file runs `tfgpu.launch.slurm.batch_job` on the job's first node, which starts a `tfgpu.launch.slurm.task` per task.
Inside a task of an `srun`, `launch` submits nothing and runs the script, as `tfgpu run` does.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tfgpu import atomic
from tfgpu.errors import InputError, MachineError, no_script, whole_number
from tfgpu.launch.job import Job
from tfgpu.redact import is_secret

_REPLACED = {"error": "--logs", "output": "--logs", "nodes": "--nodes", "ntasks": "-n", "ntasks-per-node": "-n"}
_REPLACED |= {"gpus-per-task": "--gpus-per-worker", "signal": "--grace-period", "wait": "--wait without --sbatch"}
OWN = {option: f"Use {ours}." for option, ours in _REPLACED.items()}
OWN |= {"array": "Submit one job per run.", "chdir": "The job runs where you submit it.", "wrap": "Give the script."}
OWN |= {"parsable": "It is always set.", "requeue": "It is always set."}
OWN["no-requeue"] = "A preempted job continues only if it is requeued."
OWN["open-mode"] = "Logs are appended, so a requeued job keeps its log."
"""Options of sbatch that the launch sets itself, and what to use instead."""
_NAME = re.compile(r"[A-Za-z0-9_.@+-]+(?:,[A-Za-z0-9_.@+-]+)*")
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=([^\n]*))?")
_PLAIN = re.compile(r"[A-Za-z0-9_.,:;/@%+=~^&*()\[\]|!-]+")
FINAL = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED"}
FINAL |= {"NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "TIMEOUT"}
"""Final states of a job."""
AWAY_S = 600.0
"""How long the controller may fail to answer during `wait`."""


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


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has accepted.

    Args:
        id: Slurm's number for it.
        file: the batch file.
        logs: the folder with the job's log, `job-ID.log`, and those of its tasks, `job-ID/task-N.log`.
    """

    id: str
    file: Path
    logs: Path

    def how_to_follow(self) -> str:
        """Returns instructions for the user."""
        log, first = self.logs / f"job-{self.id}.log", self.logs / f"job-{self.id}" / "task-0.log"
        return (
            f"Submitted job {self.id}.\n"
            f"  batch file: {self.file}\n"
            f"  follow it:  tail -F {shlex.quote(str(log))} {shlex.quote(str(first))}\n"
            f"  state:      squeue --job={self.id}\n"
            f"  end it:     scancel {self.id}"
        )

    def wait(self, *, look_s: float = 1.0, most_s: float = 15.0) -> int:
        """Waits until the job has finally ended, requeues included.

        Args:
            look_s: seconds between the first polls; the interval grows.
            most_s: the longest interval.

        Returns:
            The job's exit code; 128 + n if signal n ended it, 1 if Slurm did.

        Raises:
            MachineError: Slurm no longer knows the job, or has not answered for ten minutes.
        """
        answered = time.monotonic()
        while True:
            facts, complaint = _show(self.id)
            if facts:
                answered = time.monotonic()
            elif "Invalid job id" in complaint or time.monotonic() - answered > AWAY_S:
                raise MachineError(f"Slurm no longer reports job {self.id}: {complaint}. Ask `sacct -j {self.id}`.")
            if facts.get("JobState") in FINAL:
                code, signal = (int(number) for number in facts["ExitCode"].split(":"))
                return code or (128 + signal if signal else int(facts["JobState"] != "COMPLETED"))
            time.sleep(look_s)
            look_s = min(look_s * 1.2, most_s)


def batch_file(job: Job, allocation: Allocation) -> str:
    """Writes the batch file of a job.

    Args:
        job: what to run. `logs` must name a folder that all nodes share.
        allocation: what to request from Slurm.

    Returns:
        The text of a bash script for `sbatch`.

    Raises:
        InputError: a batch file cannot hold a path or a variable, there are fewer tasks than nodes, or the job has an
            evaluator.
    """
    if job.logs is None:
        raise InputError("A Slurm job needs a folder for its logs. Give one with --logs DIR.")
    if job.evaluator:
        raise InputError("A Slurm job has no task for an evaluator. Omit --evaluator, and submit it as a separate job.")
    logs = Path(job.logs).absolute()
    lines = ["#!/bin/bash", "# Written by `tfgpu launch --slurm`; submit it again with `sbatch`.", ""]
    lines += [_directive(option) for option in _options(job, allocation, logs)]
    lines += ["", *(_export(name, value) for name, value in _variables(job).items())]
    program = [sys.executable, "-m", "tfgpu.launch.slurm.batch_job", f"--logs={logs}"]
    options = [f"--max-restarts={job.max_restarts}", f"--grace-period={allocation.grace_period_s}"]
    options.append(f"--heartbeat-timeout={job.heartbeat_timeout_s:g}")
    lines += ["", "# Starts the tasks with srun, and restarts them after a failure or preemption."]
    lines += [f"exec {shlex.join(program)} \\", f"    {shlex.join(options)} \\"]
    lines.append(f"    {shlex.join((job.script, *job.arguments))}")
    return "\n".join(lines) + "\n"


def submit(job: Job, allocation: Allocation) -> Submitted:
    """Writes the batch file beside the logs and submits it.

    Raises:
        InputError: the script does not exist, or Slurm refuses the job.
        MachineError: there is no `sbatch`, or Slurm does not answer.
    """
    text = batch_file(job, allocation)
    if not Path(job.script).is_file():
        raise no_script(job.script)
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        raise MachineError(
            "`sbatch` was not found. Run this where Slurm's commands are (a login node), or add --dry-run and "
            "submit what it prints yourself."
        )
    logs = Path(job.logs).absolute()
    logs.mkdir(parents=True, exist_ok=True)
    file = logs / f"{Path(job.script).stem}.sbatch"
    atomic.write_text(file, text)
    secrets = {name: value for name, value in job.environment.items() if is_secret(name)}
    environment = {**os.environ, **secrets}
    done = subprocess.run([sbatch, "--parsable", str(file)], env=environment, capture_output=True, text=True)
    if done.returncode:
        kind = MachineError if "ontact" in done.stderr and "controller" in done.stderr else InputError
        raise kind(f"Slurm rejected {file}: {' '.join(done.stderr.split())}")
    return Submitted(done.stdout.strip().split(";")[0], file, logs)


def launch(
    job: Job, allocation: Allocation, *, dry_run: bool = False, wait: bool = False, say: Callable[[str], object] = print
) -> int:
    """Submits a job.

    Args:
        job: what to run.
        allocation: what to request from Slurm.
        dry_run: shows the batch file without submitting it.
        wait: waits until the job has ended.
        say: shows a text to the user.

    Returns:
        The exit code for the command line: with `wait`, the job's; otherwise 0.

    Raises:
        InputError: as `batch_file` and `submit`; or this is a task of an `srun`, each of which would submit a job.
        MachineError: as `submit`.
    """
    if dry_run:
        say(batch_file(job, allocation).rstrip("\n"))
        return 0
    if in_step():
        raise InputError("This already runs inside an `srun`. Omit --slurm and its options: `srun tfgpu run SCRIPT`.")
    submitted = submit(job, allocation)
    say(submitted.how_to_follow())
    if not wait:
        return 0
    try:
        code = submitted.wait()
    except KeyboardInterrupt:
        say(f"Job {submitted.id} continues. Cancel it with `scancel {submitted.id}`.")
        return 130
    say(f"Job {submitted.id} ended with exit code {code}.")
    return code


def in_step() -> bool:
    """Whether `srun` started this process as a task; not true of a batch script or a shell of `salloc`."""
    step = os.environ.get("SLURM_STEP_ID", "")
    return "SLURM_PROCID" in os.environ and step.isdecimal() and int(step) < 0xFFFFFFF0


def _options(job: Job, allocation: Allocation, logs: Path) -> list[str]:
    # With parameter servers there is a chief besides the workers.
    tasks = job.workers + (job.parameter_servers + 1 if job.parameter_servers else 0)
    nodes = allocation.nodes
    if tasks < nodes:
        raise InputError(f"{nodes} nodes need at least as many processes. Received: {tasks}. Use -n {nodes}.")
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", Path(job.script).stem)
    options = [f"--job-name={name}", f"--nodes={nodes}", f"--ntasks={tasks}"]
    if tasks % nodes == 0:
        options.append(f"--ntasks-per-node={tasks // nodes}")
    if job.gpus_per_worker:
        options.append(f"--gpus-per-task={job.gpus_per_worker}")
    for name in ("time", "partition", "account"):
        if getattr(allocation, name):
            options.append(f"--{name}={getattr(allocation, name)}")
    if "\\" in str(logs):
        raise InputError(f"Slurm's log folder must not contain a backslash. Received: {str(logs)!r}. Rename it.")
    log = str(logs).replace("%", "%%")
    options += [f"--chdir={Path.cwd()}", f"--output={log}/job-%j.log", "--open-mode=append"]
    options += ["--requeue", f"--signal=TERM@{allocation.grace_period_s}"]
    return options + list(allocation.options)


def _directive(option: str) -> str:
    """A line for sbatch, whose quoting differs from the shell's."""
    name, equals, value = option.partition("=")
    if "\n" in value or ('"' in value and "'" in value):
        raise InputError(f"sbatch cannot read a value with both kinds of quotes or a newline. Received: {option!r}.")
    if equals and not _PLAIN.fullmatch(value):
        quote = "'" if '"' in value else '"'
        value = f"{quote}{value}{quote}"
    return f"#SBATCH {name}{equals}{value}"


def _export(name: str, value: str) -> str:
    """Exports a variable; secrets come from sbatch's environment, since others may read the file."""
    if is_secret(name):
        return f': "${{{name}?is a secret, which no batch file holds: export it before sbatch}}"\nexport {name}'
    return f"export {name}={shlex.quote(value)}"


def _variables(job: Job) -> dict[str, str]:
    variables = {"TFGPU_STARTUP_TIMEOUT": f"{job.startup_timeout_s:g}"}
    if job.parameter_servers:
        variables["TFGPU_PARAMETER_SERVERS"] = str(job.parameter_servers)
    if job.gpus_per_worker == 0:
        variables["CUDA_VISIBLE_DEVICES"] = ""
    for name in job.environment:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise InputError(f"A variable's name must be letters, digits and '_'. Received: {name!r}.")
    return variables | job.environment


def _show(id: str) -> tuple[dict[str, str], str]:
    """Slurm's fields of a job; or no fields, and Slurm's error message."""
    done = subprocess.run(["scontrol", "--oneliner", "show", "job", id], capture_output=True, text=True)
    return dict(re.findall(r"(?:^| )(JobState|ExitCode)=(\S+)", done.stdout)), " ".join(done.stderr.split())
