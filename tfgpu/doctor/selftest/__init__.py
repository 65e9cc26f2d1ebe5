"""`tfgpu doctor --train`: measures the machine, and trains briefly with every strategy.

`speed.py` multiplies matrices and measures all-reduces; `training.py` trains in one process and in several, and also
repeats the measurements on other machines; `judge.py` judges the results. Each part runs in a
separate process with a time limit.
"""

import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tfgpu.doctor.check import Check
from tfgpu.doctor.facts import asking
from tfgpu.doctor.selftest import judge
from tfgpu.errors import InputError

PART_S, LAUNCH_S = 240.0, 300.0
"""Time limits in seconds of a part, and of a part in several processes; on an idle machine they take 10 to 30."""
PARTS = {"multiply": "speed", "sums": "speed", "training": "training"}
"""The parts that run on each machine: the names of their answers, and the modules of this package."""
LOCAL = ("localhost", "127.0.0.1", "::1")
_HERE = "tfgpu.doctor.selftest"
_WORDS = 300


def examine(
    facts: Mapping[str, dict],
    environ: Mapping[str, str],
    *,
    workers: Sequence[str] = (),
    ssh: str | None = None,
    on_check: Callable[[Check], None] = lambda check: None,
) -> list[Check]:
    """Measures and trains; takes a minute or two on an idle machine, and keeps all devices busy.

    Args:
        facts: the result of the doctor's `gather`.
        environ: the environment of the processes.
        workers: two or more machines to reach by ssh; `"localhost"` for each process on this machine. Each machine is
            measured alone, and all together. Empty means two processes here.
        ssh: the ssh command with options, such as `"ssh -i key"`.
        on_check: called with each check as soon as it is known.

    Returns:
        The checks; `figures` has their numbers.

    Raises:
        InputError: `workers` names fewer than two machines.
    """
    hosts = checked(workers)
    environ = {**asking.with_tfgpu(environ), "TF_CPP_MIN_LOG_LEVEL": "3"}
    environ.pop("TF_CONFIG", None)  # The self-test creates its own clusters.
    others = [host for host in dict.fromkeys(hosts) if host not in LOCAL]
    known = _Known(facts, hosts, others, on_check)
    parts(environ, on_part=known.add)
    gpus = len(facts["tensorflow"].get("gpus") or [])
    options = {"environ": environ, "gpus": gpus, "ssh": ssh}
    with asking.Askers(len(others) or 1) as pool:
        limits = {"seconds": PART_S * len(PARTS) + LAUNCH_S, "stop": pool.stop}
        asked = {host: pool.submit(launched, "machine", ["-n", "1"], [host], **limits, **options) for host in others}
        known.machines = {host: each.result() for host, each in asked.items()}
    known.add({})
    for kind, shape, there in (
        ("multi_worker", ["-n", str(len(hosts))], hosts),
        # One worker: several would train asynchronously, with a different result each time.
        ("parameter_server", ["-n", "1", "--ps", str(max(1, len(set(hosts)) - 1))], list(dict.fromkeys(hosts))),
    ):
        known.add({kind: launched(kind, shape, there, seconds=LAUNCH_S, **options)})
    return known.checks


class _Known:
    """The results of a self-test so far; reports each check once.

    Attributes:
        machines: the results of other machines, by host.
        checks: the checks so far.
    """

    def __init__(
        self, facts: Mapping[str, dict], hosts: Sequence[str], others: Sequence[str], on_check: Callable[[Check], None]
    ):
        self.machines: Mapping[str, dict] = {}
        self.checks: list[Check] = []
        self._facts, self._hosts, self._others, self._on_check = facts, hosts, others, on_check
        self._found: dict[str, dict] = {}
        self._told: list[Check] = []

    def add(self, answers: Mapping[str, dict]) -> None:
        self._found |= answers
        # The tolerance of the training depends on the devices of all machines.
        waits = ("training",) if self._others and not self.machines else ()
        found = {name: each for name, each in self._found.items() if name not in waits}
        self.checks = judge.judge(found, self._facts, self._hosts, self.machines)
        for check in self.checks:
            if check not in self._told:
                self._told.append(check)
                self._on_check(check)


def parts(environ: Mapping[str, str], *, on_part: Callable[[dict], object] = lambda answers: None) -> dict:
    """Measures this machine; returns the answers by name.

    Args:
        environ: the environment of the processes.
        on_part: called with the answers of each part as it ends.
    """
    found = {}
    for name, file in PARTS.items():
        answers = asking.ask(f"{_HERE}.{file}", [name], environ=environ, seconds=PART_S)
        found |= answers
        on_part(answers)
    return found


def checked(workers: Sequence[str]) -> list[str]:
    """The machines of a self-test; by default, two processes here.

    Raises:
        InputError: there are fewer than two names, or one is empty.
    """
    hosts = [each.strip() for each in workers]
    if not hosts:
        return ["localhost", "localhost"]
    if len(hosts) < 2 or not all(hosts):
        why = f"--hosts must list two or more machines, separated by commas. Received: {','.join(workers)!r}."
        raise InputError(f"{why} Write, for example, --hosts host1,host2, or --hosts localhost,localhost.")
    return hosts


def launched(
    kind: str,
    shape: Sequence[str],
    hosts: Sequence[str],
    *,
    environ: Mapping[str, str],
    gpus: int,
    ssh: str | None,
    seconds: float,
    stop: threading.Event | None = None,
) -> dict:
    """Runs `training.py` with `tfgpu launch`, here or by ssh; returns the answer of its chief.

    Args:
        kind: the strategy, or `"machine"` to measure one machine.
        shape: options of the launch for the number of processes.
        hosts: the machines.
        gpus: the number of GPUs that TensorFlow sees here.
        stop: ends the launch early.
    """
    words = ["launch", *shape, "--no-logs", "--startup-timeout", "60"]
    if not all(host in LOCAL for host in hosts):
        words += ["--hosts", ",".join(hosts), *(["--ssh", ssh] if ssh else [])]
    elif gpus < len(hosts) or kind == "parameter_server":
        words += ["--gpus-per-worker", "0"]  # Processes must not share a GPU.
    script = str(Path(__file__).with_name("training.py"))
    with tempfile.TemporaryDirectory(prefix="tfgpu-doctor-") as folder:
        command = [*asking.INTERPRETER, "-m", "tfgpu", *words, script, kind]
        ended = asking.run(command, environ=environ, seconds=seconds, directory=folder, stop=stop)
    found = asking.answers(ended.out).get(kind)
    if ended.code == 0 and found:
        return found
    told = [line for line in ended.err.splitlines() if line.strip()] or [ended.how]
    if ended.code is None:
        return {"error": ended.how}
    # The launcher's messages name the process and quote its last lines.
    why = [line.partition("| ")[2] or line for line in told if line.startswith("launch")] or told
    return {"error": " ".join(" ".join(why).split())[-_WORDS:] or ended.how}
