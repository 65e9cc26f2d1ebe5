"""Runs an unmodified script with the Keras repairs: `tfgpu run script.py` or `python -m tfgpu.run script.py`.

In a cluster the processes meet first (`tfgpu.rendezvous`). Where TFGPU_HEARTBEAT is set, it sends a heartbeat.
"""

import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from tfgpu import quiet, rendezvous
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError, no_script
from tfgpu.launch import ending, heartbeat
from tfgpu.rendezvous.members import note_lost

OPTION = "--startup-timeout"
_INTERRUPTED = 130


def run(script: str | Path, arguments: Sequence[str] = (), *, startup_timeout_s: float | None = None) -> None:
    """Runs a script as `python script.py` would, in this process, after `tfgpu.repair_keras()`.

    In a cluster, TF_CONFIG is set from the launcher's variables, and the script starts when all processes have met.

    Args:
        script: the file to run.
        arguments: the script's `sys.argv[1:]`.
        startup_timeout_s: seconds to wait for the other processes, 0 for not at all; `None` takes
            TFGPU_STARTUP_TIMEOUT, or 60.

    Raises:
        InputError: there is no such file, the cluster's facts are malformed, or its processes differ.
        MachineError: a process of the cluster did not answer.

    Example:
        >>> run("train.py", ["--epochs", "3"])
        Traceback (most recent call last):
        tfgpu.errors.InputError: There is no script 'train.py'. Give the path of a Python file.
    """
    path = Path(script)
    if not path.is_file():
        raise no_script(str(script))
    if startup_timeout_s is not None:
        os.environ[rendezvous.TIMEOUT] = f"{startup_timeout_s:g}"
    heartbeat.beat()
    cluster = _enter(Cluster.from_environment())
    rendezvous.join(cluster, script=str(path))
    with quiet.starting():
        quiet.start_tensorflow()
        from tfgpu import repairs

        repaired = repairs.repair_keras()
    if repaired:
        _meet_at_strategies(cluster)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        with ending.heeded(_end_collectives):
            runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        note_lost(error, cluster)
        from tfgpu.core.workers import watch

        watch.note_error(error)
        raise


def main(words: Sequence[str]) -> int:
    """The command `python -m tfgpu.run`, which launchers start.

    Args:
        words: `--startup-timeout SECONDS`, optional; the script; its arguments.

    Returns:
        The exit code: 2 for wrong input, which no restart repairs, 1 for a failure that one may, 130 after Ctrl-C. The
        script's own exits and errors pass.
    """
    words, timeout = list(words), None
    if words and words[0].split("=")[0] == OPTION:
        name, _, value = words.pop(0).partition("=")
        timeout = value or (words.pop(0) if words else "")
    if not words:
        print(f"usage: python -m tfgpu.run [{OPTION} SECONDS] script.py [arguments]", file=sys.stderr)
        return 2
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # launchers block it while Python starts
        seconds = None if timeout is None else rendezvous.timeout_s({OPTION: timeout}, name=OPTION)
        run(words[0], words[1:], startup_timeout_s=seconds)
    except (InputError, MachineError) as error:
        _tell(error)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as error:
        print(interrupted(error, words[0]), file=sys.stderr)
        return _INTERRUPTED
    return 0


def interrupted(error: KeyboardInterrupt, script: str | Path) -> str:
    """What Ctrl-C interrupted, in one line instead of a traceback.

    Args:
        error: as it left the script.
        script: the script.

    Example:
        >>> interrupted(KeyboardInterrupt(), "train.py")
        'Interrupted.'
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if os.path.abspath(frame.filename) == os.path.abspath(script)]
    return f"Interrupted at {script}, line {own[-1].lineno}: {own[-1].line}" if own else "Interrupted."


def _enter(cluster: Cluster) -> Cluster:
    """Sets for TensorFlow and the script what only the launcher's variables contain."""
    if cluster.source not in ("none", "TF_CONFIG"):
        os.environ["TF_CONFIG"] = cluster.tf_config()
    if cluster.source == "Slurm":  # which leaves the variable out before the first requeue
        os.environ.setdefault(rendezvous.ATTEMPT, str(int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1))
    if cluster.gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(cluster.gpus)
    return cluster


def _meet_at_strategies(cluster: Cluster) -> None:
    """Lets the script's own `MultiWorkerMirroredStrategy()` meet the others once more, as `tfgpu.strategy()` does."""
    from tfgpu.compat.patch import wrap
    from tfgpu.compat.worker_devices import devices_initialized
    from tfgpu.core.randomness import data_order

    @wrap("tf.distribute.MultiWorkerMirroredStrategy.__init__")
    def init(stock, self, *args, **kwargs):
        if not (args or "cluster_resolver" in kwargs or devices_initialized()):
            rendezvous.join(cluster, again=True, facts=data_order.facts())
        stock(self, *args, **kwargs)


def _end_collectives() -> None:
    """Ends the collectives in which this process waits for others."""
    from tfgpu.core.workers import watch

    watch.end_collectives("Interrupted by Ctrl-C.")


def within_script(error: Exception) -> tuple[bool, TracebackType | None]:
    """Whether a script run by `runpy` failed, and its part of the traceback (None for a syntax error)."""
    found, is_run = error.__traceback__, False
    while found is not None:
        is_runpy = found.tb_frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>")
        if is_run and not is_runpy:
            return True, found
        is_run, found = is_run or is_runpy, found.tb_next
    return is_run, None


def show(error: Exception, lines: TracebackType | None) -> None:
    """Prints a script's error as Python does; of wrong input only the user's own lines, not those of libraries.

    Args:
        error: as it left the script.
        lines: its traceback, from the script on.
    """
    told = traceback.TracebackException(type(error), error, lines, compact=True)
    is_input = isinstance(error, InputError) and os.environ.get("TFGPU_DEBUG", "0") in ("", "0")
    if is_input:
        from tfgpu.core.workers.user_line import is_users

        told.stack = traceback.StackSummary.from_list([frame for frame in told.stack if is_users(frame.filename)])
    print("".join(told.format(chain=not is_input)), end="", file=sys.stderr)


def _tell(error: Exception) -> None:
    """Prints an error from before the script in one line, else with the script's traceback."""
    is_in_script, lines = within_script(error)
    if is_in_script:
        show(error, lines)
    else:
        print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code == _INTERRUPTED:
        ending.leave(code)  # to destroy all objects first takes seconds, in which other workers wait
    sys.exit(code)
