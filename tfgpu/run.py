"""Runs an unmodified script with the Keras repairs: `tfgpu run script.py` or `python -m tfgpu.run script.py`.

In a cluster the processes meet first (`tfgpu.rendezvous`). Where TFGPU_HEARTBEAT is set, it sends a heartbeat.
"""

import contextlib
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from tfgpu import quiet, rendezvous
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError, no_script
from tfgpu.launch import heartbeat
from tfgpu.rendezvous import lost

OPTION = "--startup-timeout"
_CAUSED_S = 60.0
"""Seconds after Ctrl-C in which it counts as the cause of an error."""


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
        with _ending_by_ctrl_c():
            runpy.run_path(str(path), run_name="__main__")
    except Exception as error:
        lost.note(error, cluster)
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
        seconds = None if timeout is None else rendezvous.timeout_s({rendezvous.TIMEOUT: timeout})
        run(words[0], words[1:], startup_timeout_s=seconds)
    except (InputError, MachineError) as error:
        _tell(error)
        return 2 if isinstance(error, InputError) else 1
    except KeyboardInterrupt as interrupt:
        print(interrupted(interrupt, words[0]), file=sys.stderr)
        return 130
    return 0


@contextlib.contextmanager
def _ending_by_ctrl_c() -> Iterator[None]:
    """Raises KeyboardInterrupt in place of an error that Ctrl-C caused.

    Within a call of TensorFlow, a KeyboardInterrupt becomes another error. Workers that are interrupted together also
    see each other leave.
    """
    came_at: list[float] = []

    def note(number: int, frame: object) -> None:
        came_at.append(time.monotonic())
        signal.default_int_handler(number, frame)

    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield
    except Exception as error:
        if not came_at or time.monotonic() - came_at[-1] > _CAUSED_S:
            raise
        raise KeyboardInterrupt().with_traceback(error.__traceback__) from None
    finally:
        if signal.getsignal(signal.SIGINT) is note:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(interrupt: KeyboardInterrupt, script: str | Path) -> str:
    """What Ctrl-C interrupted, in one line instead of a traceback.

    Args:
        interrupt: as it left the script.
        script: the script.

    Example:
        >>> interrupted(KeyboardInterrupt(), "train.py")
        'Interrupted.'
    """
    frames = traceback.extract_tb(interrupt.__traceback__)
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
    import tensorflow as tf

    from tfgpu.compat.patch import wrap
    from tfgpu.compat.worker_devices import devices_initialized
    from tfgpu.core.randomness import data_order

    @wrap(tf.distribute.MultiWorkerMirroredStrategy, "__init__")
    def init(stock, self, *args, **kwargs):
        if not (args or "cluster_resolver" in kwargs or devices_initialized()):
            rendezvous.join(cluster, again=True, facts=data_order.facts())
        stock(self, *args, **kwargs)


def _tell(error: Exception) -> None:
    """Prints an error from before the script in one line, else with the script's traceback."""
    frames = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    if runpy.__file__ in frames or "<frozen runpy>" in frames:
        traceback.print_exception(error)
    else:
        print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
