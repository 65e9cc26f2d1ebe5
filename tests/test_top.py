"""`tfgpu top` in a pipe, in a terminal, and on a run."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from tfgpu.cli.top import _console, drawn
from tfgpu.errors import InputError
from tfgpu.sensors import Gpu, Limit, Sample
from tfgpu.sensors.table import Table
from tfgpu.sensors.view import View, Worker, folder_of, workers


def command(*words):
    return [sys.executable, "-m", "tfgpu", "top", *map(str, words)]


def top(*words, **environ):
    return subprocess.run(
        command(*words),
        env={**os.environ, "COLUMNS": "100", **environ},
        capture_output=True,
        text=True,
        timeout=550,
    )


@pytest.fixture
def run(tmp_path):
    """A run of two workers, of which the second has been silent for an hour."""
    now = time.time()
    for number, then in ((0, now + 550), (1, now - 3600)):  # it counts as silent after 20 s: a command can take longer
        samples = Table(tmp_path / f"monitor-worker{number}.csv")
        for ago in range(20, -1, -1):
            wait = 0.1 if ago >= 10 else 0.5  # the last ten count
            row = {"time": then - ago, "seconds": 20 - ago, "epoch": 3, "step": 1000 - ago, "step_time_s": 0.02}
            row |= {"examples_per_s": 1600.0, "input_wait": wait, "cpu_share": 0.4, "memory_bytes": 2**30}
            samples.append(row)
        Table(tmp_path / f"monitor-epochs-worker{number}.csv").append(
            {"epoch": 2, "energy_j": 5000.0, "energy_per_example_j": 0.25}
        )
    return tmp_path


def test_one_look_without_a_gpu():
    done = top("--once")
    assert done.returncode == 0, done.stderr
    assert "CPU" in done.stdout and "No NVIDIA GPU here." in done.stdout and not done.stderr
    assert top().stdout.count("No NVIDIA GPU") == 1  # in a pipe it is one look, too


def test_gpus_and_who_holds_them(nvml):
    environ = {"LD_LIBRARY_PATH": str(nvml), "PID": str(os.getpid()), "USED_MIB": "60000", "CUDA_VISIBLE_DEVICES": "1"}
    lines = top("--once", **environ).stdout.splitlines()
    gpus = [line for line in lines if re.match(r"[01] +━", line)]
    assert len(gpus) == 2  # also what CUDA_VISIBLE_DEVICES hides
    assert all(each in gpus[0] for each in ("93%", "58.6 GiB", "412 W", "34 °C", "1755 MHz", "2.0 GB/s"))
    assert any(line.split()[:2] == ["0", str(os.getpid())] and "60.0 GiB" in line for line in lines)


def test_a_lost_gpu_leaves_the_others_their_numbers(nvml):
    environ = {"LD_LIBRARY_PATH": str(nvml), "GPUS": "4", "LOST": "1", "AT": "2", "PID": str(os.getpid())}
    text = top("--once", **environ).stdout
    assert re.findall(r"(?m)^(\d) +━", text) == ["0", "2", "3"]
    assert "GPU figures are missing: GPU 1: GPU is lost" in text
    assert any(line.split()[:2] == ["2", str(os.getpid())] for line in text.splitlines())


def test_a_run(run):
    done = top(run, "--once")
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if line.startswith("0 "))
    assert row.split() == ["0", "3", "1,000", "20.00", "ms", "1,600", "50%", "40%", "1.0", "GiB", "0.25"]
    assert "limited by input: the step waits for data 50% of the time  (worker 0)" in done.stdout
    assert "worker 1: no sample for 60 min: it has ended or hangs" in done.stdout
    view = json.loads(top(run, "--once", "--json").stdout)
    assert [worker["number"] for worker in view["workers"]] == [0, 1]
    assert view["workers"][0]["limit"]["resource"] == "input" and view["sample"]["cores"] > 0


def test_a_narrow_terminal_has_whole_figures(run):
    done = top(run, "--once", COLUMNS="40")
    row = next(line for line in done.stdout.splitlines() if line.startswith("0 "))
    assert row.split() == ["0", "1,000", "20.00", "ms", "50%"]
    assert re.search(r"CPU +[━─]{3} +\d+%", done.stdout) and max(map(len, done.stdout.splitlines())) <= 40


@pytest.mark.slow
def test_folders_that_are_no_run(tmp_path):
    done = top(tmp_path, "--once")
    assert done.returncode == 2 and "has no monitoring data" in done.stderr
    assert top(tmp_path / "none").returncode == 2
    assert top("--every", "0").returncode == 2
    (tmp_path / "config.yaml").write_text("epochs: 3\n")  # a run that has not begun
    assert folder_of(tmp_path) == tmp_path / "monitor" and workers(tmp_path / "monitor") == ()
    assert top(tmp_path, "--once").returncode == 0
    with pytest.raises(InputError):
        folder_of(tmp_path / "config.yaml")


@pytest.mark.parametrize("width", [40, 200])
def test_names_steer_no_terminal(width):
    wild = "[red]a[/]\x1b]0;title\x07\x1b[2J\u202e:smile:"
    gpu = Gpu("0", name=wild, power_w=70.0, slowed_by=wild)
    worker = Worker(1, {"step": wild}, {}, Limit(wild, wild), 3.0)
    process = {"gpu": wild, "pid": 1, "name": "[/]" + wild, "bytes": 2}
    view = View(wild, Sample(1.0, 2.0, 4.0, gpus=(gpu,), gpu_error=wild), (0.5,), 1.0, 5, (process,), (worker,))
    screen = io.StringIO()
    _console(file=screen, width=width).print(drawn(view, width=width))
    text = screen.getvalue()
    assert all(each.isprintable() for each in text.replace("\n", ""))
    assert "[red]a[/]" in text and all(len(line) <= width for line in text.splitlines())


class Terminal:
    """A terminal of 24 lines of 80 columns, and the program in it."""

    def __init__(self, words):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        environ = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            words, stdin=slave, stdout=slave, stderr=slave, env={**environ, "TERM": "xterm"}, start_new_session=True
        )
        self.text = ""

    def until(self, words, seconds=60):
        end = time.monotonic() + seconds
        while words not in self.text and time.monotonic() < end:
            if select.select([self.master], [], [], 0.2)[0]:
                self.text += os.read(self.master, 65536).decode(errors="replace")
        assert words in self.text, self.text[-2000:]

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.slave)
        os.close(self.master)


@pytest.mark.parametrize("how", ["q", signal.SIGINT, signal.SIGTERM])
def test_it_ends_and_gives_the_terminal_back(how, run):
    terminal = Terminal(command(run, "--every", "0.2"))
    try:
        terminal.until("limited by")
        terminal.until("\x1b[?1049h")  # the other screen
        if how == "q":
            os.write(terminal.master, b"q")
        else:
            os.kill(terminal.process.pid, how)
        terminal.until("\x1b[?1049l")
        assert terminal.process.wait(timeout=550) == 0
        assert termios.tcgetattr(terminal.slave) == terminal.before
        assert "Traceback" not in terminal.text
    finally:
        terminal.close()


def test_whoever_reads_may_stop():
    words = " ".join(command("--json", "--every", "0.1"))
    done = subprocess.run(f"{words} | head -n 1", shell=True, capture_output=True, text=True, timeout=550)
    assert json.loads(done.stdout)["sample"] and not done.stderr
