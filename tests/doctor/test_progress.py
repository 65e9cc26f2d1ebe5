"""The self-test shows each check as it ends, also before an interrupt. Its parts are fakes here."""

import functools
import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tfgpu.doctor import selftest
from tfgpu.doctor.facts import asking

# `tfgpu doctor` on a machine whose answers are known; each part of the self-test ends when its file appears.
COMMAND = """
import json, pathlib, sys, time
from tfgpu import cli, doctor
from tfgpu.doctor import selftest
from tfgpu.doctor.facts import asking
known = json.loads(pathlib.Path("known.json").read_text())
def held(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.02)
    return known["found"][name]
doctor.gather = lambda environ: known["facts"]
asking.ask = lambda module, names, **_: {name: held(name) for name in names}
selftest.launched = lambda kind, *_, **__: held(kind)
cli.main(["doctor", *sys.argv[1:]])
"""
PARTS = {
    "multiply": ["Matrix products"],
    "sums": ["All-reduce between devices"],
    "training": ["Training one_device", "Training mirrored", "Training averaging"],
    "multi_worker": ["All-reduce between workers", "Training multi_worker"],
    "parameter_server": ["Training parameter_server"],
}


@pytest.fixture
def started(tmp_path, facts, found, clean):
    """Starts the command, and ends its process after the test."""
    (tmp_path / "known.json").write_text(json.dumps({"facts": facts, "found": found}))
    running = []

    def start(*words: str) -> subprocess.Popen:
        # A shell's background job ignores SIGINT and hands that on: tests may run in one.
        heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environ = asking.with_tfgpu(clean(COLUMNS="200", TERM="dumb"))
        command = [sys.executable, "-c", COMMAND, *words]
        running.append(subprocess.Popen(command, cwd=tmp_path, env=environ, preexec_fn=heed, **pipes))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen) -> tuple[str, str]:
    """What is left of both streams: `communicate` would lose what `readline` has read ahead."""
    late = threading.Timer(550, process.kill)
    late.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            out, err = pool.map(lambda stream: stream.read(), (process.stdout, process.stderr))
        process.wait()
    finally:
        late.cancel()
    return out, err


def titles(stream, last: str) -> list[str]:
    """Reads lines up to this one; returns their first columns."""
    found = []
    while not (found and found[-1] == last):
        line = stream.readline()
        assert line, found
        found.append(line.split("  ")[0])
    return found


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [(), ("--json",), ("--fix",)])
def test_each_part_is_reported_before_the_next_begins(started, tmp_path, words):
    process = started("--train", *words)
    stream = process.stderr if words else process.stdout
    if not words:
        assert "TensorFlow" in titles(stream, "Patches")
    for name, expected in PARTS.items():
        (tmp_path / name).touch()
        assert titles(stream, expected[-1]) == expected
    out, err = ended(process)
    assert process.returncode == 0, err
    if words == ("--json",):
        names = [check["name"] for check in json.loads(out)]
        assert names[-8:] == [name for expected in PARTS.values() for name in expected]
    else:
        assert ("No problems found" in out) is (not words), out


@pytest.mark.sample(1)
@pytest.mark.parametrize("words", [(), ("--json", "--bundle", "--output", "it.zip")])
def test_an_interrupt_keeps_known_results(started, tmp_path, words):
    process = started("--train", *words)
    for name in ("multiply", "sums"):
        (tmp_path / name).touch()
    before = titles(process.stderr if words else process.stdout, "All-reduce between devices")
    process.send_signal(signal.SIGINT)
    out, err = ended(process)
    assert process.returncode == 130, err
    assert err == "error: Interrupted: the checks above are done; the rest of the self-test is not.\n"
    if words:
        assert [check["name"] for check in json.loads(out)][-2:] == ["Matrix products", "All-reduce between devices"]
    else:
        assert "TensorFlow" in before and out == ""
    assert not (tmp_path / "it.zip").exists()


def test_an_interrupt_ends_what_was_asked_at_once(clean, tmp_path):
    with pytest.raises(KeyboardInterrupt), asking.Askers() as pool:
        command = ["sh", "-c", f"echo $$ > {tmp_path}/pid; exec sleep 600"]
        asked = pool.submit(asking.run, command, environ=clean(), seconds=600, stop=pool.stop)
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
            threading.Event().wait(0.02)
        raise KeyboardInterrupt
    assert asked.result().code is None
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_training_is_judged_once_all_machines_are_known(facts, found, monkeypatch):
    """The tolerance depends on them."""
    found["machine"] = {"error": "no route"}
    told = []
    monkeypatch.setattr(asking, "ask", lambda module, names, **_: {name: found[name] for name in names})
    monkeypatch.setattr(selftest, "launched", lambda kind, *_, **__: found[kind])
    checks = selftest.examine(facts, {}, workers=["localhost", "b"], on_check=told.append)
    names = [check.name for check in told]
    expected = ["Matrix products", "All-reduce between devices", "Training one_device"]
    assert names[:3] == expected
    assert names[5] == "Machine b"
    assert sorted(names) == sorted(check.name for check in checks)
