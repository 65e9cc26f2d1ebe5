"""The rendezvous of real processes on loopback."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tfgpu import rendezvous
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError
from tfgpu.rendezvous import facts, wire

# Joins, then takes its port as TensorFlow will: the port must be free at once.
JOIN = """
import json, os, socket, sys, time
from tfgpu import rendezvous
from tfgpu.errors import InputError, MachineError

try:
    rendezvous.join()
except (InputError, MachineError) as error:
    print(json.dumps({"kind": type(error).__name__, "said": str(error)}))
    sys.exit(2 if isinstance(error, InputError) else 1)
place = json.loads(os.environ["TF_CONFIG"])
port = int(place["cluster"][place["task"]["type"]][place["task"]["index"]].rpartition(":")[2])
with socket.create_server(("", port)):
    print(json.dumps({"kind": "met", "said": "", "tf": "tensorflow" in sys.modules}))
"""


# Each process runs a file of its own, as a console script's may be, and says at first that this is no matter.
AGAIN = """
import os, sys
path = os.path.join(os.environ["FOLDER"], f"{os.getpid()}.py")
with open(path, "w") as file:
    file.write(path)
sys.modules["__main__"].__file__ = path
""" + JOIN.replace(
    "rendezvous.join()", "rendezvous.join(facts={'script': 'train'}); [rendezvous.join(again=True) for _ in range(10)]"
)


def start(jobs: dict[str, list[str]], task: tuple[str, int], code: str = JOIN, **environ: str) -> subprocess.Popen:
    config = json.dumps({"cluster": jobs, "task": {"type": task[0], "index": task[1]}})
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "TF_CONFIG": config, "TFGPU_STARTUP_TIMEOUT": "60", **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answers(processes: list[subprocess.Popen], *, within_s: float = 300) -> list[dict]:
    try:
        said = [process.communicate(timeout=within_s) for process in processes]
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGCONT)
            process.kill()
            process.communicate()
    assert all(out.strip() for out, _ in said), said
    return [json.loads(out.strip().splitlines()[-1]) for out, _ in said]


def wait_until_it_listens(address: str) -> None:
    """Waits until a process accepts connections at a port."""
    host, _, port = address.rpartition(":")
    for _ in range(5000):
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)
    raise AssertionError(f"nobody listens at {address}")


def workers(addresses, count: int) -> dict[str, list[str]]:
    return {"worker": addresses(count)}


def everyone(jobs, **environ) -> list[subprocess.Popen]:
    return [start(jobs, (job, index), **environ) for job in jobs for index in range(len(jobs[job]))]


@pytest.mark.processes
def test_all_meet_and_their_ports_are_free_at_once(addresses):
    jobs = dict(zip(("chief", "worker", "ps"), ([a] for a in addresses(3)), strict=True))
    jobs["evaluator"] = addresses(1)  # It contacts no one, and no one waits for it.
    found = answers(everyone({name: jobs[name] for name in ("chief", "worker", "ps")}))
    assert [each["kind"] for each in found] == ["met"] * 3, found
    assert not any(each["tf"] for each in found)


@pytest.mark.processes
def test_they_meet_again_as_often_as_they_like_and_tell_the_same(addresses, tmp_path):
    jobs = workers(addresses, 3)
    found = answers([start(jobs, ("worker", index), AGAIN, FOLDER=str(tmp_path)) for index in range(3)])
    assert [each["kind"] for each in found] == ["met"] * 3, found


@pytest.mark.processes
@pytest.mark.slow
def test_a_late_process_is_waited_for(addresses):
    jobs = workers(addresses, 2)
    first = start(jobs, ("worker", 1))
    wait_until_it_listens(jobs["worker"][1])
    found = answers([start(jobs, ("worker", 0)), first])
    assert [each["kind"] for each in found] == ["met"] * 2, found


def at_the_deadline(begin, *, lacking: int = 1) -> list[dict]:
    """The answers of processes ended by the deadline, if all had started before it.

    Args:
        begin: starts the processes with that many seconds; a busy machine gets more of them.
        lacking: how many do not answer.
    """
    for seconds in ("6", "30", "120"):
        found = answers(begin(seconds), within_s=300)
        if all(each["said"].count("did not answer") <= lacking for each in found):
            break
    return found


@pytest.mark.processes
@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_missing_processes_are_named_by_every_waiting_process(addresses, missing):
    jobs = workers(addresses, 4)
    there = [index for index in range(4) if index != missing]
    found = at_the_deadline(
        lambda seconds: [start(jobs, ("worker", index), TFGPU_STARTUP_TIMEOUT=seconds) for index in there]
    )
    who = f"worker {missing} ({jobs['worker'][missing]}) did not answer: not started, wrong port, or firewall"
    for each in found:
        assert each["kind"] == "MachineError" and who in each["said"] and "connection refused" in each["said"]
        assert each["said"].count("did not answer") == 1


@pytest.mark.processes
def test_a_wrong_port_is_named_by_the_process_that_has_it_and_by_the_others(addresses):
    right = addresses(3)
    wrong = [right[0], right[1], addresses(1)[0]]
    found = at_the_deadline(
        lambda seconds: [
            start({"worker": right}, ("worker", 0), TFGPU_STARTUP_TIMEOUT=seconds),
            start({"worker": right}, ("worker", 1), TFGPU_STARTUP_TIMEOUT=seconds),
            start({"worker": wrong}, ("worker", 2), TFGPU_STARTUP_TIMEOUT=seconds),
        ]
    )
    assert found[2]["kind"] == "InputError" and "TF_CONFIG differs" in found[2]["said"]
    assert f"is worker 2 at {wrong[2]}" in found[2]["said"] and f"it is at {right[2]}" in found[2]["said"]
    for each in found[:2]:
        assert f"worker 2 ({right[2]}) did not answer" in each["said"]
    assert any(f"is worker 2 at {wrong[2]}" in each["said"] for each in found[:2])


@pytest.mark.processes
@pytest.mark.slow
def test_two_processes_of_one_task_are_named(addresses):
    jobs = workers(addresses, 3)
    first = start(jobs, ("worker", 1))
    wait_until_it_listens(jobs["worker"][1])
    found = answers([first, start(jobs, ("worker", 1)), start(jobs, ("worker", 0))])
    assert [each["kind"] for each in found] == ["InputError"] * 3, found
    for each in found:
        assert f"Two processes are worker 1 ({jobs['worker'][1]})" in each["said"]
        assert str(first.pid) in each["said"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_of_an_older_attempt_is_refused_by_name(addresses):
    jobs = workers(addresses, 2)
    old = start(jobs, ("worker", 1), TFGPU_ATTEMPT="3")
    wait_until_it_listens(jobs["worker"][1])
    found = answers([start(jobs, ("worker", 0), TFGPU_ATTEMPT="4", TFGPU_STARTUP_TIMEOUT="5"), old])
    assert found[1]["kind"] == "MachineError" and "of attempt '3'" in found[1]["said"]
    assert "of attempt '4'" in found[1]["said"] and "End the processes of the older attempt" in found[1]["said"]
    assert f"process {old.pid} on {socket.gethostname()}, of attempt '3'" in found[0]["said"]


@pytest.mark.processes
@pytest.mark.slow
def test_a_port_in_use_is_one_error_that_names_it_and_that_all_hear(addresses):
    jobs = workers(addresses, 2)
    port = int(jobs["worker"][1].rpartition(":")[2])
    with socket.create_server(("", port)):
        found = answers([start(jobs, ("worker", 0)), start(jobs, ("worker", 1))])
    assert [each["kind"] for each in found] == ["MachineError"] * 2
    assert f"Port {port} of this machine" in found[1]["said"] and "address already in use" in found[1]["said"]
    assert "worker 1" in found[0]["said"] and f"Port {port}" in found[0]["said"]


def pester(address: str, until: threading.Event) -> None:
    """Foreign connections: scanners, browsers, half-open connections, floods of bytes."""
    host, _, port = address.rpartition(":")
    held = []
    hello = wire.encode({"task": 99, "cluster": "x", "attempt": "", "process": ["?"], "name": {}, "id": 0})
    broken = wire.encode({"task": "one", "attempt": ""})
    words = [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 1000, b"[" * 60000 + b"\n", b"{}\n", hello, broken]
    while not until.is_set():
        for word in words:
            with contextlib.suppress(OSError):
                each = socket.create_connection((host, int(port)), timeout=1)
                each.settimeout(1)
                if len(held) < 200:
                    held.append(each)  # It stays open and silent.
                each.sendall(word)
        time.sleep(0.05)
    for each in held:
        each.close()


@pytest.mark.processes
def test_strangers_neither_break_nor_delay_the_rendezvous(addresses):
    jobs = workers(addresses, 3)
    until = threading.Event()
    threads = [threading.Thread(target=pester, args=(address, until)) for address in jobs["worker"]]
    for thread in threads:
        thread.start()
    try:
        waiting = [start(jobs, ("worker", index)) for index in (0, 1)]
        for address in jobs["worker"][:2]:
            wait_until_it_listens(address)
        time.sleep(1)  # The strangers keep sending.
        found = answers([*waiting, start(jobs, ("worker", 2))])
    finally:
        until.set()
        for thread in threads:
            thread.join()
    assert [each["kind"] for each in found] == ["met"] * 3, found


@pytest.mark.processes
@pytest.mark.slow
def test_a_stopped_process_is_named(addresses):
    jobs = workers(addresses, 3)
    stopped = start(jobs, ("worker", 1))
    wait_until_it_listens(jobs["worker"][1])
    stopped.send_signal(signal.SIGSTOP)
    try:
        found = answers([start(jobs, ("worker", index), TFGPU_STARTUP_TIMEOUT="10") for index in (0, 2)])
    finally:
        answers_nothing(stopped)
    for each in found:
        assert f"worker 1 ({jobs['worker'][1]})" in each["said"], found
    assert any("accepted the connection and did not answer" in each["said"] for each in found)


def answers_nothing(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


@pytest.mark.processes
@pytest.mark.slow
def test_a_process_that_dies_while_all_wait_is_named(addresses):
    jobs = workers(addresses, 3)
    dying = start(jobs, ("worker", 1))
    wait_until_it_listens(jobs["worker"][1])
    waiting = start(jobs, ("worker", 0), TFGPU_STARTUP_TIMEOUT="8")
    wait_until_it_listens(jobs["worker"][0])
    answers_nothing(dying)
    found = answers([waiting])[0]
    assert f"worker 1 ({jobs['worker'][1]})" in found["said"] and f"worker 2 ({jobs['worker'][2]})" in found["said"]


@pytest.mark.processes
def test_other_versions_seeds_and_scripts_are_named(addresses, tmp_path):
    old = tmp_path / "tensorflow-2.20.0.dist-info"
    old.mkdir()
    (old / "METADATA").write_text("Metadata-Version: 2.1\nName: tensorflow\nVersion: 2.20.0\n")
    jobs = workers(addresses, 3)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    found = answers(
        [
            start(jobs, ("worker", 0), TFGPU_SEED="1"),
            start(jobs, ("worker", 1), TFGPU_SEED="2"),
            start(jobs, ("worker", 2), TFGPU_SEED="1", PYTHONPATH=paths),
        ]
    )
    here = facts.gather()["TensorFlow"]
    for each in found:
        assert each["kind"] == "InputError", found
        assert f"TensorFlow differs: {here} on worker 0, worker 1; 2.20.0 on worker 2." in each["said"]
        assert "TFGPU_SEED differs: 1 on worker 0, worker 2; 2 on worker 1." in each["said"]
        assert "Keras differs" not in each["said"]


RUNNING = """
import json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import tensorflow as tf
place = json.loads(os.environ["TF_CONFIG"])
server = tf.distribute.Server(place["cluster"], job_name=place["task"]["type"], task_index=0, protocol="grpc")
print("up", flush=True)
server.join()
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_late_process_learns_that_tensorflow_runs_and_a_parameter_server_worker_may_rejoin(addresses):
    names = addresses(3)
    together = {"chief": names[:1], "worker": names[1:2]}
    servers = {"chief": names[:1], "worker": names[1:2], "ps": names[2:]}
    running = [start(servers, (job, 0), RUNNING) for job in ("chief", "ps")]
    try:
        assert [process.stdout.readline() for process in running] == ["up\n"] * 2
        late = answers([start(together, ("worker", 0), TFGPU_STARTUP_TIMEOUT="5")])[0]
        back = answers([start(servers, ("worker", 0), TFGPU_STARTUP_TIMEOUT="30")])[0]
    finally:
        for process in running:
            answers_nothing(process)
    assert "TensorFlow already runs there: this process is too late" in late["said"]
    assert back["kind"] == "met", back


@pytest.mark.parametrize("value", ["soon", "-1", "nan", "inf", "1e9", "60s"])
def test_a_malformed_timeout_is_quoted(value):
    with pytest.raises(InputError, match="TFGPU_STARTUP_TIMEOUT") as caught:
        rendezvous.timeout_s({"TFGPU_STARTUP_TIMEOUT": value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(("value", "seconds"), [("", 60), (" ", 60), ("0", 0), ("2.5", 2.5), ("1e2", 100)])
def test_the_timeout_in_seconds(value, seconds):
    assert rendezvous.timeout_s({"TFGPU_STARTUP_TIMEOUT": value}) == seconds


def test_one_process_an_evaluator_and_a_timeout_of_zero_meet_nobody(monkeypatch, addresses):
    jobs = workers(addresses, 2)
    rendezvous.join(Cluster())
    rendezvous.join(Cluster(workers=tuple(jobs["worker"][:1])))
    evaluator = Cluster(workers=tuple(jobs["worker"]), rank=-1, task_type="evaluator")
    rendezvous.join(evaluator)
    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "0")
    rendezvous.join(Cluster(workers=tuple(jobs["worker"])))
    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "2")
    with pytest.raises(MachineError, match="worker 1"):
        rendezvous.join(Cluster(workers=tuple(jobs["worker"])))


def test_inside_an_event_loop_too(monkeypatch, addresses):
    import asyncio

    async def cell() -> None:
        rendezvous.join(Cluster(workers=tuple(addresses(2))))

    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "1")
    with pytest.raises(MachineError, match="did not answer"):
        asyncio.run(cell())


def test_an_unresolvable_name_is_named(monkeypatch, addresses):
    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "3")
    with pytest.raises(
        MachineError, match=r"worker 1 \(nowhere\.invalid:5\) did not answer.*\(.*(name|resolution|no answer)"
    ):
        rendezvous.join(Cluster(workers=(*addresses(1), "nowhere.invalid:5")))


def test_differences_name_who_has_what():
    found = facts.differences(
        {
            "chief": {"Keras": "3.15.1", "script": "aa"},
            "worker 0": {"Keras": "3.15.1", "script": "bb"},
            "worker 1": {"Keras": "3.14.0"},
        }
    )
    assert found == [
        "Keras differs: 3.15.1 on chief, worker 0; 3.14.0 on worker 1. Install the same version everywhere.",
        "script differs: aa on chief; bb on worker 0; none on worker 1. Give every process the same file.",
    ]
    assert facts.differences({"a": {"Keras": "1"}, "b": {"Keras": "1"}}) == []
    many = facts.differences({f"worker {index}": {"Keras": str(index % 2)} for index in range(40)})
    assert "and 12 more" in many[0]


def test_the_facts_change_with_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("1")
    one = facts.gather(script)
    script.write_text("2")
    two = facts.gather(script)
    assert {name for name in one if one[name] != two[name]} == {"script"}
    assert facts.gather(tmp_path / "gone.py")["script"] == "none"
