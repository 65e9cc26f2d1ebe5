"""The processes of trials, on this machine or in actors of a Ray cluster."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, required
from tfgpu.launch import machine, processes
from tfgpu.launch.screen import tail
from tfgpu.redact import printable
from tfgpu.sensors import nvml

_STOP_S = 10.0
_MOST = 500  # most characters of a trial's last line


class TrialProcess:
    """A trial's process; `stop` ends it.

    Args:
        task: the recipe, the run directory, whether to resume it, what to minimize.
        log: the file for its output.
        environment: environment variables in addition to this process's.
        module: the module to run, which answers with `trial.serve`.
    """

    def __init__(
        self, task: Mapping[str, Any], log: str, environment: Mapping[str, str], module: str = "tfgpu.tune.trial"
    ):
        self._end, inner = multiprocessing.Pipe()
        self._log = log
        try:
            with open(log, "ab") as output:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", module, str(inner.fileno())],
                    env={"TF_CPP_MIN_LOG_LEVEL": "2", **os.environ, **environment},
                    pass_fds=[inner.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # Ctrl-C reaches only the study, which ends its trials.
                )
        finally:
            inner.close()
        self.pid = self._process.pid
        self._send(task)

    def news(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """The messages since the last call; the last one has the key "end", however the process ended.

        Args:
            wait_s: seconds to wait for the first message.
        """
        found: list[dict[str, Any]] = []
        # Polled first: all its messages are then in the socket, which a forked process may keep open.
        has_ended = self._process.poll() is not None
        while self._end.poll(0 if found or has_ended else wait_s):
            try:
                found.append(json.loads(self._end.recv_bytes()))
            except (EOFError, OSError):
                has_ended = True
                break
        if has_ended and not any("end" in message for message in found):
            code = self._process.wait(_STOP_S)
            found.append({"end": "failed", "reason": describe(code, self._log), "input": False, "code": code})
        return found

    def answer(self, prune: bool) -> None:
        """Lets the trial continue after an epoch, or prunes it."""
        self._send({"prune": prune})

    def _send(self, message: Mapping[str, Any]) -> None:
        with contextlib.suppress(OSError):  # It has ended; `news` reports how.
            self._end.send_bytes(json.dumps(message).encode())

    def stop(self, grace_period_s: float = 0.0) -> None:
        """Ends the process, and waits for its end.

        Args:
            grace_period_s: seconds to save after SIGTERM.
        """
        if grace_period_s and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(grace_period_s)
        # Kills the whole session, including the trial's child processes.
        processes.send_to_group(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)
        self._end.close()


def describe(code: int, log: str) -> str:
    """Describes the end of a process that did not report it.

    Example:
        >>> describe(-9, "none.log")
        'The process was killed by SIGKILL (as the kernel does when memory runs out).'
    """
    if code < 0:
        more = " (as the kernel does when memory runs out)" if code == -signal.SIGKILL else ""
        return f"The process was {processes.described(code)}{more}."
    lines = [line.strip() for line in tail(Path(log)) if line.strip()]
    return f"The process ended with code {code}: {printable(lines[-1][-_MOST:]) if lines else 'no output'}"


class Local:
    """Trials on this machine.

    Args:
        devices: CUDA_VISIBLE_DEVICES for each slot; None keeps the current value.
        threads: TensorFlow's threads in each trial; None keeps the default.
    """

    def __init__(self, devices: tuple[str | None, ...], threads: int | None):
        self.slots = len(devices)
        self._devices, self._threads = devices, threads

    def start(self, slot: int, task: Mapping[str, Any], log: Path) -> TrialProcess:
        """Starts a trial in a slot."""
        return TrialProcess(task, str(log), _variables(self._devices[slot], self._threads))

    def close(self) -> None:
        """Does nothing."""


class OnRay:
    """Trials as actors of a Ray cluster whose machines share the study's folder.

    Args:
        slots: the number of concurrent trials.
        gpus: GPUs per trial.

    Raises:
        InputError: Ray is not installed.

    Source: https://docs.ray.io/en/latest/ray-core/actors.html
    """

    def __init__(self, slots: int, *, gpus: int):
        ray = required("ray", "Trials on Ray need Ray", "Run: pip install 'tfgpu[tune,ray]'")
        self.slots, self._gpus, self._ray = slots, gpus, ray
        self._joined = not ray.is_initialized()
        if self._joined:
            ray.init(log_to_driver=False)

    def start(self, slot: int, task: Mapping[str, Any], log: Path) -> "_Remote":
        """Starts a trial; Ray chooses the machine and its GPUs."""
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if not self._gpus:
            environment |= _variables("", 1)
        # Ray runs an actor's methods in threads; several allow `stop` during `news`.
        actor = self._ray.remote(TrialProcess).options(
            num_cpus=1, num_gpus=self._gpus, max_concurrency=4, runtime_env={"env_vars": environment}
        )
        return _Remote(self._ray, actor.remote(dict(task), str(log), environment))

    def close(self) -> None:
        """Disconnects from the cluster, if this object has connected to it."""
        if self._joined:
            self._ray.shutdown()


class _Remote:
    """A `TrialProcess` in an actor."""

    def __init__(self, ray: Any, actor: Any):
        self._ray, self._actor, self._asked = ray, actor, None

    def news(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        if self._asked is None:
            self._asked = self._actor.news.remote(1.0)
        ready, _ = self._ray.wait([self._asked], timeout=wait_s)
        if not ready:
            return []
        asked, self._asked = self._asked, None
        try:
            return self._ray.get(asked)
        except self._ray.exceptions.RayError as error:
            reason = (str(error).strip().splitlines() or ["no message"])[-1]
            return [{"end": "failed", "reason": f"Ray lost the trial: {reason}", "input": False}]

    def answer(self, prune: bool) -> None:
        self._actor.answer.remote(prune)

    def stop(self, grace_period_s: float = 0.0) -> None:
        try:
            self._ray.wait([self._actor.stop.remote(grace_period_s)], timeout=grace_period_s + _STOP_S)
        finally:
            self._ray.kill(self._actor)


def places(parallel: int, *, use_ray: bool) -> Local | OnRay:
    """Creates the slots for a study's trials.

    Args:
        parallel: the number of concurrent trials. Above 1, each gets its own GPU or, without GPUs, a share of the
            cores.
        use_ray: run on a Ray cluster instead of this machine.

    Raises:
        InputError: there are too few GPUs, or Ray is not installed.
    """
    gpus = visible_gpus()
    if use_ray:
        return OnRay(parallel, gpus=1 if _ray_has_gpus() else 0)
    if parallel == 1:
        return Local((None,), None)
    if gpus and parallel > len(gpus):
        raise InputError(
            f"`parallel` must be at most the number of GPUs: each trial gets one. Received: parallel={parallel}, "
            f"GPUs={len(gpus)}. Use {len(gpus)}."
        )
    if gpus:
        return Local(gpus[:parallel], None)
    return Local(("",) * parallel, max(1, len(os.sched_getaffinity(0)) // parallel))


def visible_gpus() -> tuple[str, ...]:
    """The GPUs that this process may use, as values for CUDA_VISIBLE_DEVICES; by UUID if that is not set.

    CUDA and the driver may number GPUs differently, and a lost GPU keeps its number.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(machine.gpus(os.environ))
    try:
        with nvml.opened() as driver:
            found = nvml.living(driver)
            if any(nvml.slices(driver, handle) for handle in found.values()):
                return tuple(map(str, found))  # CUDA takes the first MIG slice of a GPU, by number.
            return tuple(driver.nvmlDeviceGetUUID(handle) for handle in found.values())
    except Exception:  # pynvml has many error classes for a missing driver.
        return ()


def _ray_has_gpus() -> bool:
    try:
        import ray
    except ImportError:
        return False
    return bool(ray.is_initialized() and ray.cluster_resources().get("GPU", 0))


def _variables(devices: str | None, threads: int | None) -> dict[str, str]:
    found = {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices}
    if threads is not None:
        names = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
        found |= {name: str(threads) for name in names}
    return found
