"""The cluster's checks with real names, addresses, ports, and doctors that connect, one with a shifted clock."""

import json
import os
import socket
import subprocess
import sys

import pytest

from tfgpu.doctor.facts import asking

MODULE = "tfgpu.doctor.facts.cluster"
# Goes before libc's: every clock that is told to people is ahead, those that measure are not.
LATE = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <time.h>
int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += atoi(getenv("AHEAD_S"));
  return result;
}
"""


def config(workers: list[str], index: int = 0) -> str:
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}})


@pytest.fixture
def ask(clean):
    def go(workers: list[str], index: int = 0, **environ) -> dict:
        environ = asking.with_tfgpu(clean(TF_CONFIG=config(workers, index), **environ))
        return asking.ask(MODULE, ["cluster"], environ=environ, seconds=60, meet_s=2.0)["cluster"]

    return go


@pytest.fixture
def judged(facts, by_name):
    """The checks of a process of a cluster."""

    def go(found: dict, **environ):
        facts["cluster"] = found
        return by_name(facts, **environ)

    return go


def together(workers: list[str], environs: list[dict]) -> list[dict]:
    """The results of doctors that run on several workers at the same time."""
    code = f"from tfgpu.doctor.facts import asking; asking.answer({MODULE!r}, ['cluster'], {{}})"
    running = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env=asking.with_tfgpu({**environ, "TF_CONFIG": config(workers, index)}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, environ in enumerate(environs)
    ]
    try:
        return [asking.answers(process.communicate(timeout=550)[0])["cluster"] for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_doctors_that_meet_compare_versions_and_clocks(addresses, clean, compiled, judged):
    late = clean(AHEAD_S="3600", LD_PRELOAD=str(compiled("late.so", LATE) / "late.so"), PYTHONHASHSEED="7")
    first, second = together(addresses(2), [clean(PYTHONHASHSEED="7"), late])
    assert first["reached"] == ["worker 1"] and second["reached"] == ["worker 0"]
    assert abs(first["clocks"]["worker 1"][0] - 3600) < 30 and abs(second["clocks"]["worker 0"][0] + 3600) < 30
    named = judged(first)
    assert named["Clocks"].status == "warning" and " s ahead" in named["Clocks"].found
    assert "timedatectl" in named["Clocks"].fix
    names = ("Cluster addresses", "Own address", "Own port", "Other workers")
    assert {named[name].status for name in names} == {"ok"}
    assert " s behind" in judged(second)["Clocks"].found


def test_doctors_of_processes_that_differ(addresses, clean, judged):
    found = together(addresses(2), [clean(TFGPU_SEED="1"), clean(TFGPU_SEED="2")])
    named = judged(found[0])
    assert named["Clocks"].status == "ok"
    assert named["Other workers"].status == "problem"
    assert "TFGPU_SEED differs: 1 on worker 0; 2 on worker 1" in named["Other workers"].found


def test_a_single_process_asks_nothing(clean, facts, by_name):
    environ = asking.with_tfgpu(clean())
    assert asking.ask(MODULE, ["cluster"], environ=environ, seconds=60)["cluster"] == {}
    facts["cluster"] = {}
    assert "Own port" not in by_name(facts) and by_name(facts)["Cluster"].found == "none: one process"


def test_a_port_that_another_program_has(addresses, ask, judged):
    own, other = addresses(2)
    with socket.create_server(("", int(own.rpartition(":")[2]))):
        found = ask([own, other])
    check = judged(found)["Own port"]
    assert check.status == "problem" and "in use" in check.found and f"(process {os.getpid()})" in check.found


def test_an_address_of_another_machine_and_a_name_that_nobody_knows(addresses, ask, judged):
    port = addresses(1)[0].rpartition(":")[2]
    found = ask([f"192.0.2.1:{port}", "no-such-host.invalid:2222"])  # RFC 5737: nobody's address
    named = judged(found)
    assert (
        named["Own address"].status == "problem" and "is 192.0.2.1, but this machine is" in named["Own address"].found
    )
    assert named["Cluster addresses"].found == "no address is known for worker 1 (no-such-host.invalid:2222)"
    assert named["Other workers"].found.startswith("0 of 1 answer")
    assert judged(found, KUBERNETES_SERVICE_HOST="10.0.0.1")["Own address"].status == "ok"


def test_a_waiting_training_does_not_mistake_the_doctor_for_a_worker(addresses, clean, ask):
    workers = addresses(2)
    code = "from tfgpu import rendezvous; rendezvous.join()"
    environ = asking.with_tfgpu(clean(TF_CONFIG=config(workers, 1), TFGPU_STARTUP_TIMEOUT="60"))
    waiting = subprocess.Popen([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, text=True)
    try:
        found = ask(workers)
        assert found["reached"] == [] and "worker 1" in found["clocks"]
        assert waiting.poll() is None, waiting.stderr.read()
    finally:
        waiting.kill()
        waiting.communicate()
