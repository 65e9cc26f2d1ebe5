"""The launcher's small parts: frames, ports, the screen, GPUs, the process tree."""

import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfgpu.launch import link, machine, processes
from tfgpu.launch.machine import Ports
from tfgpu.launch.screen import Screen, default_folder

# Messages


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.fixed_dictionaries({"a": st.text(max_size=5)}), st.binary(max_size=40)), max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=5),
)
def test_messages_arrive_whole_however_they_are_cut(messages, sizes):
    stream = b"Welcome to host1\n" + link.MARK + b"\n" + b"".join(link.encode(*each) for each in messages)
    reader, found = link.Reader(marked=True), []
    for size in itertools.cycle(sizes):
        found += reader.feed(stream[:size])
        stream = stream[size:]
        if not stream:
            break
    assert [({"a": message["a"]}, raw) for message, raw in found] == messages
    assert reader.before == ["Welcome to host1"]


# Ports


def low_and_high():
    with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
        return tuple(map(int, file.read().split()))


def test_ports_lie_outside_the_range_that_the_kernel_gives_away_and_are_no_other_launchs():
    low, high = low_and_high()
    with Ports(50) as first, Ports(50) as second:
        assert len({*first.numbers, *second.numbers}) == 100
        assert not any(low <= number <= high for number in first.numbers)
        with socket.socket() as server:  # A server may listen there while it is marked.
            server.bind(("127.0.0.1", first.numbers[0]))
            server.listen()


def test_a_port_in_use_is_not_given(monkeypatch):
    with Ports(1) as ports, socket.socket() as server:
        server.bind(("127.0.0.1", ports.numbers[0]))
        server.listen()
        ports.close()
        monkeypatch.setattr("tfgpu.launch.machine._candidates", lambda: [ports.numbers[0]])
        with pytest.raises(RuntimeError, match="not have 1 free TCP ports"):
            Ports(1)


# The screen


def shown(capsys, *pieces):
    screen = Screen(["worker 0"], None)
    for piece in pieces:
        screen.output(0, 1, piece)
    screen.finish(0)
    return [line.removeprefix("worker 0| ") for line in capsys.readouterr().out.splitlines()], screen.last(0)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([b"one\ntwo\n"], ["one", "two"]),
        ([b"o", b"ne\nt", b"wo"], ["one", "two"]),
        ([b"10%\r20%\r30%\n"], ["30%"]),
        ([b"\r 1/2\b\b\b\b", b"\r 2/2\b\b\b\b", b"\r 2/2 done\n"], [" 1/2", " 2/2 done"]),  # Keras's
        ([b"windows\r\n"], ["windows"]),
        ([b"\n\n"], ["", ""]),
        ([b"gr\xc3", b"\xbcn \xff\n"], ["grün �"]),
        ([b"x" * 70000], ["x" * 70000]),
    ],
)
def test_lines_are_put_together(capsys, pieces, expected):
    assert shown(capsys, *pieces) == (expected, expected)


def test_a_progress_bar_is_shown_once_a_second(capsys):
    lines, _ = shown(capsys, *(b"%d%%\r" % number for number in range(0, 101, 5)), b"done\n")
    assert lines == ["0%", "done"] or lines[-1] == "done" and len(lines) < 5


def test_a_name_in_color_keeps_its_width(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    screen = Screen(["worker 0", "worker 10"], None)
    screen.output(0, 1, b"hello\n")
    assert capsys.readouterr().out == "\033[36mworker 0 |\033[0m hello\n"


def test_log_files_are_never_overwritten(tmp_path):
    for _ in range(2):
        screen = Screen(["worker 0"], tmp_path / "logs")
        screen.output(0, 2, b"once\n")
        screen.close()
    assert (tmp_path / "logs" / "worker-0.log").read_text() == "once\nonce\n"


def test_default_folders_are_fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folders = []
    for _ in range(3):
        folders.append(default_folder("some/train.py"))
        folders[-1].mkdir(parents=True)
    assert len(set(folders)) == 3 and all("train" in folder.name for folder in folders)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_log_file_and_not_the_run(tmp_path, capsys):
    (tmp_path / "worker-0.log").symlink_to("/dev/full")
    screen = Screen(["worker 0"], tmp_path)
    screen.output(0, 1, b"one\n")
    screen.output(0, 1, b"two\n")
    said = capsys.readouterr()
    assert said.out == "worker 0| one\nworker 0| two\n"
    assert said.err.count("gets no more lines: No space left on device. Training continues.") == 1


# The machine


@pytest.mark.parametrize(
    ("value", "expected"),
    [("", []), ("0", ["0"]), ("0, 1", ["0", "1"]), ("-1", []), ("1,-1,0", ["1"]), ("GPU-a,MIG-b", ["GPU-a", "MIG-b"])],
)
def test_visible_gpus_are_read_as_cuda_reads_them(value, expected):
    assert machine.gpus({"CUDA_VISIBLE_DEVICES": value}) == expected


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("nvidia-smi"), reason="needs an NVIDIA GPU")
def test_installed_gpus_are_counted():
    found = machine.gpus({})
    assert len(found) == len(set(found)) == len(list(Path("/dev").glob("nvidia[0-9]*"))) > 0


# What `nvidia-smi -L` writes, and what CUDA_VISIBLE_DEVICES is shared out of.
LISTED = {
    "two": (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa-1)\nGPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb-2)\n",
        ["GPU-aa-1", "GPU-bb-2"],
    ),
    "one is lost": (
        "GPU 0: NVIDIA H100 PCIe (UUID: GPU-aa-1)\n"
        "Unable to determine the device handle for gpu 0000:3B:00.0: GPU is lost.  Reboot the system.\n"
        "GPU 2: NVIDIA H100 PCIe (UUID: GPU-cc-3)\n",
        ["GPU-aa-1", "GPU-cc-3"],
    ),
    "slices": (
        "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aa-1)\n"
        "  MIG 3g.20gb     Device  0: (UUID: MIG-77)\n"
        "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bb-2)\n",
        ["0", "1"],
    ),
    "no UUID": ("GPU 0: Tesla K80\n", ["0"]),
    "none": ("No devices were found\n", []),
}


@pytest.mark.parametrize("case", LISTED)
def test_installed_gpus_are_named_by_uuid(case, tmp_path, monkeypatch):
    text, expected = LISTED[case]
    (tmp_path / "said").write_text(text)
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n[ $1 = -L ] && cat {tmp_path}/said\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert machine.gpus({}) == expected


def test_cpus_are_those_that_this_process_may_use():
    assert 1 <= machine.cpus() <= len(os.sched_getaffinity(0))


# Processes


def test_descendants_are_found_and_zombies_are_not():
    child = "import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', 'input()']); print(p.pid); input()"
    process = subprocess.Popen([sys.executable, "-c", child], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        grandchild = int(process.stdout.readline())
        assert {process.pid, grandchild} <= set(processes.descendants(os.getpid()))
    finally:
        process.kill()
    for _ in range(500):
        if process.pid not in processes.descendants(os.getpid()):
            break
        time.sleep(0.01)
    assert process.pid not in processes.descendants(os.getpid()) and process.returncode is None
    process.communicate()


def test_ends_are_described():
    assert [processes.described(code) for code in (0, 3, -15, -64)] == [
        "exit code 0",
        "exit code 3",
        "killed by SIGTERM",
        "killed by SIGRTMAX",
    ]
    assert processes.as_exit_code(-9) == 137


# The supervisor by itself


@pytest.mark.processes
def test_a_supervisor_without_messages_ends_its_processes(tmp_path):
    (tmp_path / "given").mkdir()
    command = [sys.executable, "-m", "tfgpu.launch.remote", "--grace-period=0", tmp_path / "given"]
    node = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    task = {"id": 0, "command": ["sleep", "300"], "environment": {}}
    node.stdin.write(link.encode({"do": "start", "tasks": [task], "lost_s": 1.0}))
    node.stdin.flush()
    try:
        assert node.wait(500) == 0  # Its standard input is open all the time.
        assert not (tmp_path / "given").exists()
    finally:
        node.kill()
        node.communicate()
