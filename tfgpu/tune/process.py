"""The study's side of a trial: its process on this machine, or in an actor of a Ray cluster."""

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

from tfgpu.errors import InputError
from tfgpu.launch import machine
from tfgpu.redact import printable
from tfgpu.sensors import nvml

_STOP_S = 10.0
_TAIL_BYTES = 1 << 16
_MOST = 500
"""Characters of a line that a trial has ended with."""


class TrialProcess:
    """A trial's process, which this object owns: `stop` ends it.

    Args:
        task: the recipe, the run directory, whether to resume it, what is minimised.
        log: the file for what it prints.
        environment: variables besides this process's own.
        module: what runs in it, which answers by `trial.serve`.
    """

    def __init__(
        self,
        task: Mapping[str, Any],
        log: str,
        environment: Mapping[str, str],
        module: str = "tfgpu.tune.trial",
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
                    start_new_session=True,  # Ctrl-C is for the study, which then ends its trials.
                )
        finally:
            inner.close()
        self.pid = self._process.pid
        try:
            self._end.send_bytes(json.dumps(task).encode())
        except OSError:  # It has died; `news` will say how.
            pass

    def news(self, wait_s: float = 0.0) -> list[dict[str, Any]]:
        """What it has told since the last call; the last message has the key "end", however the process ended.

        Args:
            wait_s: seconds to wait for the first message.
        """
        found: list[dict[str, Any]] = []
        # Asked first: what it told before it ended is in the socket by then. What it has forked may hold that open.
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
        """Lets it go on after an epoch, or ends it there."""
        try:
            self._end.send_bytes(json.dumps({"prune": prune}).encode())
        except OSError:  # It has died; `news` will say how.
            pass

    def stop(self, grace_s: float = 0.0) -> None:
        """Ends the process, and returns when it has ended.

        Args:
            grace_s: seconds to let it save, after SIGTERM.
        """
        if grace_s and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(grace_s)
            except subprocess.TimeoutExpired:
                pass
        # Its whole session: what the trial has started ends with it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(_STOP_S)
        self._end.close()


def describe(code: int, log: str) -> str:
    """Says how a process ended that did not say so itself.

    Example:
        >>> describe(-9, "none.log")
        'The process was killed by SIGKILL (the system does so where memory is used up).'
    """
    if code < 0:
        known = -code in signal.Signals.__members__.values()
        name = signal.Signals(-code).name if known else f"signal {-code}"
        more = " (the system does so where memory is used up)" if code == -signal.SIGKILL else ""
        return f"The process was killed by {name}{more}."
    lines = [line.strip() for line in _tail(log).splitlines() if line.strip()]
    return f"The process ended with code {code}: {printable(lines[-1][-_MOST:]) if lines else 'it said nothing'}"


def _tail(log: str) -> str:
    """The end of a file, which may be large."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


class Local:
    """Trials on this machine.

    Args:
        devices: what CUDA_VISIBLE_DEVICES is for each slot; None leaves it.
        threads: of TensorFlow's in each; None leaves them.
    """

    def __init__(self, devices: tuple[str | None, ...], threads: int | None):
        self.slots = len(devices)
        self._devices, self._threads = devices, threads

    def start(self, slot: int, task: Mapping[str, Any], log: Path) -> TrialProcess:
        """Starts a trial in a slot."""
        return TrialProcess(task, str(log), _variables(self._devices[slot], self._threads))

    def close(self) -> None:
        """Nothing is kept between trials."""


class OnRay:
    """Trials as actors of a Ray cluster, whose machines all see the study's folder.

    Args:
        slots: trials at a time.
        gpus: of each trial.
        cpus: of each trial.

    Raises:
        InputError: Ray is not installed.

    Source: https://docs.ray.io/en/latest/ray-core/actors.html
    """

    def __init__(self, slots: int, *, gpus: int, cpus: float = 1):
        try:
            import ray
        except ImportError as error:
            raise InputError("Trials on Ray need Ray. Run: pip install 'tfgpu[tune,ray]'") from error
        self.slots, self._gpus, self._cpus, self._ray = slots, gpus, cpus, ray
        self._joined = not ray.is_initialized()
        if self._joined:
            ray.init(log_to_driver=False)

    def start(self, slot: int, task: Mapping[str, Any], log: Path) -> "_Remote":
        """Starts a trial; Ray chooses the machine and its GPUs."""
        environment = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        if not self._gpus:
            environment |= _variables("", max(1, int(self._cpus)))
        # As many times as it takes to read and to stop at once: Ray runs an actor's methods in threads.
        actor = self._ray.remote(TrialProcess).options(
            num_cpus=self._cpus, num_gpus=self._gpus, max_concurrency=4, runtime_env={"env_vars": environment}
        )
        return _Remote(self._ray, actor.remote(dict(task), str(log), environment))

    def close(self) -> None:
        """Leaves the cluster, where this object has joined it."""
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

    def stop(self, grace_s: float = 0.0) -> None:
        try:
            self._ray.wait([self._actor.stop.remote(grace_s)], timeout=grace_s + _STOP_S)
        finally:
            self._ray.kill(self._actor)


def places(parallel: int, *, use_ray: bool) -> Local | OnRay:
    """Where a study's trials run.

    Args:
        parallel: trials at a time. Above 1, each gets a GPU of its own, or without GPUs its share of the cores.
        use_ray: on a Ray cluster instead of this machine.

    Raises:
        InputError: there are fewer GPUs, or Ray is not installed.
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
    """The GPUs that this process may use, as CUDA_VISIBLE_DEVICES names them: by UUID where nobody has named them yet.

    CUDA's numbers need not be the driver's, and a GPU that is lost has a number but cannot be used.
    """
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return tuple(machine.gpus(os.environ))
    try:
        with nvml.opened() as driver:
            found = nvml.living(driver)
            if any(nvml.slices(driver, handle) for handle in found.values()):
                return tuple(map(str, found))  # Of one that is cut into slices CUDA takes the first, by the number.
            return tuple(driver.nvmlDeviceGetUUID(handle) for handle in found.values())
    except Exception:  # No driver is no GPU; pynvml has a class for each way to say so.
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
