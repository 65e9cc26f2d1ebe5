"""The processes of a job on this machine."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tfgpu.errors import InputError, no_script
from tfgpu.launch import attempts
from tfgpu.launch.job import Job
from tfgpu.launch.link import Link

OURS = {
    "TF_CONFIG": "Use -n and --ps.",
    "CUDA_VISIBLE_DEVICES": "Use --gpus-per-worker; its value before the launch is divided among the workers.",
    "TFGPU_ATTEMPT": "",
    "TFGPU_HEARTBEAT": "",
    "TFGPU_STARTUP_TIMEOUT": "Use --startup-timeout.",
}
"""Variables that a launch gives each process, and what to use instead."""
SUPERVISOR = (sys.executable, "-m", "tfgpu.launch.remote")


def launch(job: Job, *, grace_s: float = attempts.GRACE_S, runner: Sequence[str] = attempts.RUNNER) -> int:
    """Runs a job's processes on this machine until none of them is left.

    Args:
        job: what to run.
        grace_s: seconds that processes have to save when they are asked to end while all is well.
        runner: the command before the script; the default repairs Keras before it runs the script.

    Returns:
        The exit code: 0 done; that of the process that failed first (128+n for signal n; 124 for a
        heartbeat timeout); 130 after Ctrl-C.

    Raises:
        InputError: there is no such script, TF_CONFIG is set already, or the GPUs do not suffice.

    Example:
        >>> launch(Job("train.py", workers=2))
        Traceback (most recent call last):
        tfgpu.errors.InputError: There is no script 'train.py'. Give the path of a Python file.
    """
    check(job)
    return attempts.run(
        job,
        lambda: [Link("", SUPERVISOR)],
        [""],
        runner=runner,
        grace_s=grace_s,
        environ=dict(os.environ),
    )


def check(job: Job, *, script: bool = True) -> None:
    """Raises `InputError` for what can be seen before a process is started.

    Args:
        script: whether the script must lie on this machine.
    """
    if script and not Path(job.script).is_file():
        raise no_script(job.script)
    if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        raise InputError(
            "TF_CONFIG is set, so this process belongs to a cluster already; a launch would make another. "
            "Unset it, or run the script itself: tfgpu run SCRIPT."
        )
    for name in OURS:
        if name in job.environment:
            raise InputError(f"{name} cannot be given: the launch gives each process its own. {OURS[name]}")
