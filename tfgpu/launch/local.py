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
    "CUDA_VISIBLE_DEVICES": "Use --gpus-per-worker; the launch divides the variable's current value among the workers.",
    "TFGPU_ATTEMPT": "",
    "TFGPU_HEARTBEAT": "",
    "TFGPU_STARTUP_TIMEOUT": "Use --startup-timeout.",
}
"""Variables that a launch gives each process, and what to use instead."""
SUPERVISOR = (sys.executable, "-m", "tfgpu.launch.remote")


def launch(job: Job, *, grace_period_s: float = attempts.GRACE_S, runner: Sequence[str] = attempts.RUNNER) -> int:
    """Runs a job's processes on this machine until all have ended.

    Args:
        job: what to run.
        grace_period_s: seconds that processes get to save after a request to stop that no failure caused.
        runner: the command before the script; the default repairs Keras before it runs the script.

    Returns:
        The exit code: 0 if all is done; that of the process that failed first (128+n for signal n; 124 for a
        heartbeat timeout); 130 after Ctrl-C.

    Raises:
        InputError: the script does not exist, TF_CONFIG is already set, or there are too few GPUs.

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
        grace_period_s=grace_period_s,
        environ=dict(os.environ),
    )


def check(job: Job, *, script: bool = True) -> None:
    """Raises `InputError` for mistakes that show before any process starts.

    Args:
        script: whether the script must exist on this machine.
    """
    if script and not Path(job.script).is_file():
        raise no_script(job.script)
    if os.environ.get("TF_CONFIG", "").strip() not in ("", "{}"):
        raise InputError(
            "TF_CONFIG is set, so this process already belongs to a cluster; a launch would make another. "
            "Unset it, or run the script itself: tfgpu run SCRIPT."
        )
    for name in OURS:
        if name in job.environment:
            raise InputError(f"{name} cannot be set: the launch sets it for each process. {OURS[name]}")
