"""Samples of the machine, compared with psutil, the kernel and the sampled processes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tfgpu.sensors import Gpu, Sample, Sampler
from tfgpu.sensors.machine import Machine, cores

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""The kernel's unit of CPU time."""
# For each line on stdin, counts to a fixed number (about 0.4 s of processor time) and reports its own processor time.
BURNER = """
import sys, time
for line in sys.stdin:
    for _ in range(int(line)):
        pass
    print(time.process_time(), flush=True)
"""
# For each line on stdin, reads zeros until the kernel has worked so many seconds for it, and reports as above.
READER = """
import os, sys, time
zeros, space = os.open("/dev/zero", os.O_RDONLY), [bytearray(1 << 20)]
for line in sys.stdin:
    begun = os.times().system
    while os.times().system - begun < float(line) and time.process_time() < 60:
        os.readv(zeros, space)
    print(time.process_time(), os.times().system, flush=True)
"""
OPERATIONS = 20_000_000
HOLDER = "held = bytearray(b'1') * (200 << 20)\nwhile True: print(input(), flush=True)"


@contextlib.contextmanager
def running(code):
    """A Python process that reads from stdin."""
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def tell(process, line=""):
    """Sends a line and returns the answer."""
    process.stdin.write(f"{line}\n")
    process.stdin.flush()
    return process.stdout.readline()


def burn():
    """Runs a fixed number of operations; returns their CPU time."""
    begun = time.process_time()
    for _ in range(OPERATIONS):
        pass
    return time.process_time() - begun


def test_cpu_time_is_what_the_process_reports_of_itself():
    with running(BURNER) as child:
        before = float(tell(child, 0))
        machine = Machine(pid=child.pid)
        machine.read(0.0)
        used = float(tell(child, OPERATIONS)) - before
        found = machine.read(2.0)
    assert used > 5 * TICK_S
    assert found["cpu_cores"] * 2.0 == pytest.approx(used, abs=3 * TICK_S)
    assert found["cpu_share"] == pytest.approx(min(1, found["cpu_cores"] / machine.cores))


def test_the_kernel_s_work_for_a_process_is_its_cpu_time():
    with running(READER) as child:
        before, system = map(float, tell(child, 0).split())
        machine = Machine(pid=child.pid)
        machine.read(0.0)
        now, system_now = map(float, tell(child, 0.3).split())
        found = machine.read(2.0)
    if system_now - system < 0.3:
        pytest.skip("needs a kernel that tells its own time from the program's")
    assert found["cpu_cores"] * 2.0 == pytest.approx(now - before, abs=3 * TICK_S)


def test_cpu_time_of_children_is_added():
    with running(BURNER) as child:
        before = float(tell(child, 0))
        machine = Machine()
        machine.read(0.0)
        used = burn() + float(tell(child, OPERATIONS)) - before
        assert machine.read(4.0)["cpu_cores"] * 4.0 == pytest.approx(used, abs=6 * TICK_S)


def of_tree_without(pid):
    """The resident memory of this process and of children that other tests have left."""
    own = psutil.Process()
    return sum(each.memory_info().rss for each in [own, *own.children(recursive=True)] if each.pid != pid)


def test_memory_is_the_tree_s_resident_memory():
    with running(HOLDER) as child:
        tell(child)
        alone = Machine(pid=child.pid).read(0.0)["memory_bytes"]
        assert alone == psutil.Process(child.pid).memory_info().rss > 200 << 20
        machine = Machine()
        assert machine.read(0.0)["memory_bytes"] == pytest.approx(alone + of_tree_without(child.pid), abs=8 << 20)
    after = machine.read(20.0)  # The child has ended.
    assert after["memory_bytes"] == pytest.approx(of_tree_without(child.pid), abs=8 << 20)


def meminfo():
    with open("/proc/meminfo") as file:
        return {line.split(":")[0]: int(line.split()[1]) << 10 for line in file}


def test_the_machine_s_memory_is_what_the_kernel_reports():
    found = Machine().read(0.0)
    now = meminfo()
    assert found["machine_memory_total_bytes"] == now["MemTotal"]
    in_use = now["MemTotal"] - now["MemAvailable"]
    assert found["machine_memory_bytes"] == pytest.approx(in_use, abs=max(0.1 * now["MemTotal"], 256 << 20))


def cpu_ticks():
    """Total and idle CPU time from /proc/stat."""
    with open("/proc/stat") as file:
        user, nice, system, idle, iowait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return user + nice + system + idle + iowait + irq + softirq + steal, idle + iowait


def test_the_machine_s_cpu_share_is_what_the_kernel_reports():
    machine = Machine()
    machine.read(0.0)
    before = cpu_ticks()
    burn()
    passed, idle = (now - then for now, then in zip(cpu_ticks(), before, strict=True))
    assert machine.read(1.0)["machine_cpu_share"] == pytest.approx(1 - idle / passed, abs=0.1)
    assert 1 - idle / passed > 0.5 / os.cpu_count()  # One core was busy.


def test_cores_are_those_that_the_process_may_use():
    own = psutil.Process().cpu_affinity()
    without_quota = Path("/none")
    assert cores(without_quota) == len(own)
    code = f"import os; os.sched_setaffinity(0, [{own[0]}]); from tfgpu.sensors.machine import cores; print(cores())"
    assert float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, timeout=550).stdout) <= 1


SIZE = 32 << 20


def write(path):
    with open(path, "wb") as file:
        file.write(os.urandom(SIZE))
        file.flush()
        os.fsync(file.fileno())


def read(path):
    """Reads a file from the disk: the kernel forgets its pages first."""
    with open(path, "rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while file.read(1 << 20):
            pass


@pytest.mark.parametrize(
    ("act", "field", "count"),
    [(read, "disk_read_bytes_per_s", "read_bytes"), (write, "disk_written_bytes_per_s", "write_bytes")],
)
def test_a_file_that_is_read_or_written_is_counted(tmp_path, act, field, count):
    """Two psutil readings lie between our two readings, and a file of known size is read or written in between."""
    path = tmp_path / "file"
    write(path)
    outer = psutil.disk_io_counters()
    if outer is None:
        pytest.skip("needs disks that the kernel counts")
    machine = Machine()
    machine.read(0.0)
    inner = psutil.disk_io_counters()
    act(path)
    least = getattr(psutil.disk_io_counters(), count) - getattr(inner, count)
    found = machine.read(4.0)[field] * 4
    most = getattr(psutil.disk_io_counters(), count) - getattr(outer, count)
    assert least <= found <= most
    if least < SIZE:
        pytest.skip("needs a temporary folder on a disk that the kernel counts")


def files(root, contents):
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


GROUP = {
    "proc/self/cgroup": "0::/job\n",
    "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/job/memory.max": f"{8 << 30}\n",
    "sys/fs/cgroup/job/memory.current": f"{3 << 30}\n",
    "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {1 << 30}\n",
}


def test_limits_of_the_control_group(tmp_path):
    root = files(tmp_path, GROUP)
    assert cores(root) == min(1.5, cores(tmp_path / "none"))
    found = Machine(root=root).read(0.0)
    assert (found["memory_limit_bytes"], found["group_memory_bytes"]) == (8 << 30, 2 << 30)  # without droppable pages


TRAFFIC = """
import json, os, socket, subprocess
from tfgpu.sensors.machine import Machine
for words in ("link add left type veth peer name right", "link set left up", "link set right up",
              "address add 10.9.8.1/24 dev left", "neigh add 10.9.8.2 lladdr 02:00:00:00:00:01 dev left"):
    subprocess.run(["ip", *words.split()], check=True)
machine = Machine()
machine.read(0.0)
before = int(open("/sys/class/net/left/statistics/tx_bytes").read())
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    for _ in range(2000):
        sender.sendto(bytes(1400), ("10.9.8.2", 9))
found = machine.read(2.0)
sent = int(open("/sys/class/net/left/statistics/tx_bytes").read()) - before
print(json.dumps([sent, found["network_share"], found["network_sent_bytes_per_s"]]))
"""


def test_network_traffic_as_a_share_of_the_interface_s_speed():
    alone = ["unshare", "--net", "--mount", "--map-root-user"]
    can = ["sh", "-c", "mount -t sysfs none /sys && ip link add left type veth peer name right"]
    if not shutil.which("ip") or not shutil.which("unshare") or subprocess.run([*alone, *can]).returncode:
        pytest.skip("needs `ip` and a network namespace")
    command = [*alone, "sh", "-c", 'mount -t sysfs none /sys && exec "$0" -c "$1"', sys.executable, TRAFFIC]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    sent, share, rate = json.loads(done.stdout)
    assert sent >= 2000 * 1400
    # Both ends of the pair count, one as sent and one as received; veth reports a speed of 10 Gb/s.
    assert share == pytest.approx(sent / 2 / (10e9 / 8), rel=0.05) and rate == pytest.approx(sent / 2, rel=0.05)


def test_two_samples_at_the_same_time_have_no_rates():
    machine = Machine()
    machine.read(1.0)
    found = machine.read(1.0)
    assert found.get("cpu_cores") is None and found["cpu_share"] is None and found["machine_cpu_share"] is None


def test_rates_do_not_depend_on_the_wall_clock(monkeypatch):
    ticks = iter([100.0, 101.0, 103.0])
    with Sampler(clock=lambda: next(ticks)) as sampler:
        first = sampler.read()
        monkeypatch.setattr(time, "time", lambda: 5.0)  # The wall clock jumps back by years.
        used = burn()
        second = sampler.read()
    assert (first.seconds, second.seconds, second.time) == (1.0, 3.0, 5.0)
    assert second.cpu_cores * 2.0 == pytest.approx(used, abs=6 * TICK_S)


def test_a_row_has_the_columns_of_each_gpu():
    sample = Sample(1.0, 2.0, 4.0, gpus=(Gpu("0", power_w=70.0, energy_j=5.0), Gpu("1", energy_j=7.0), Gpu("1s0")))
    row = sample.row()
    assert (row["gpu0_power_w"], row["gpu1_power_w"], sample.gpu_energy_j) == (70.0, None, 12.0)
    assert "gpu0_name" not in row and "gpus" not in row and "gpu1s0_memory_bytes" in row
    assert Sample(1.0, 2.0, 4.0).gpu_energy_j is None
