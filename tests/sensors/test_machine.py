import json
import shutil
import subprocess
import sys
import time

import pytest

from tfgpu.sensors import Gpu, Sample, Sampler
from tfgpu.sensors.machine import Machine, cores


def test_a_busy_thread_is_one_core_of_those_there_are():
    machine = Machine()
    machine.read(0.0)
    begun, busy = time.monotonic(), time.process_time()
    while time.process_time() - busy < 0.3:
        pass
    passed = time.monotonic() - begun
    found = machine.read(passed)
    assert found["cpu_cores"] * passed == pytest.approx(0.3, abs=0.1)  # the kernel counts hundredths of seconds
    assert found["cpu_share"] == pytest.approx(min(1, found["cpu_cores"] / machine.cores))
    assert 0 <= found["machine_cpu_share"] <= 1
    assert found["memory_bytes"] > 2**23 and found["machine_memory_bytes"] < found["machine_memory_total_bytes"]


def test_children_count_too():
    code = "held = bytearray(b'1') * (200 << 20); print(1, flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        child.stdout.readline()
        alone = Machine(pid=child.pid).read(0.0)["memory_bytes"]
        assert alone > 200 << 20
        machine = Machine()
        both = machine.read(0.0)["memory_bytes"]
        assert both > alone
        child.communicate(b"\n", timeout=30)
        after = machine.read(20.0)  # one that is gone is no error
        assert after["memory_bytes"] < both
    finally:
        child.kill()
        child.communicate()


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


def test_a_control_group_s_limits(tmp_path):
    root = files(tmp_path, GROUP)
    assert cores(root) == min(1.5, cores(tmp_path / "none"))
    found = Machine(root=root).read(0.0)
    assert (found["memory_limit_bytes"], found["group_memory_bytes"]) == (8 << 30, 2 << 30)  # less what can be dropped


def test_the_energy_of_processors_whose_counters_wrap(tmp_path):
    package = "sys/class/powercap/intel-rapl:{}/"
    full = {"energy_uj": "9000000", "max_energy_range_uj": "10000000"}
    contents = {package.format(number) + name: text for number in (0, 1) for name, text in full.items()}
    contents["sys/class/powercap/intel-rapl:0:0/energy_uj"] = "5"  # a part of package 0, which counts it already
    root = files(tmp_path, contents)
    machine = Machine(root=root)
    assert machine.read(0.0)["cpu_energy_j"] == 0.0
    files(root, {package.format(0) + "energy_uj": "9500000", package.format(1) + "energy_uj": "2000000"})
    assert machine.read(1.0)["cpu_energy_j"] == pytest.approx(0.5 + 3.0)  # 2 - 9 + 10
    (root / package.format(1) / "energy_uj").unlink()
    assert machine.read(2.0)["cpu_energy_j"] == pytest.approx(3.5)
    assert Machine(root=tmp_path / "none").read(0.0)["cpu_energy_j"] is None


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


def test_traffic_against_an_interface_s_speed():
    alone = ["unshare", "--net", "--mount", "--map-root-user"]
    can = ["sh", "-c", "mount -t sysfs none /sys && ip link add left type veth peer name right"]
    if not shutil.which("ip") or not shutil.which("unshare") or subprocess.run([*alone, *can]).returncode:
        pytest.skip("needs `ip` and a network of its own")
    command = [*alone, "sh", "-c", 'mount -t sysfs none /sys && exec "$0" -c "$1"', sys.executable, TRAFFIC]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    sent, share, rate = json.loads(done.stdout)
    assert sent >= 2000 * 1400
    # Both ends count: one has sent, the other received. A pair of them is as fast as 10 Gb/s, it says.
    assert share == pytest.approx(sent / 2 / (10e9 / 8), rel=0.05) and rate == pytest.approx(sent / 2, rel=0.05)


def test_a_clock_that_stands_still_divides_by_nothing():
    machine = Machine()
    machine.read(1.0)
    found = machine.read(1.0)
    assert found.get("cpu_cores") is None and found["cpu_share"] is None and found["machine_cpu_share"] is None


def test_the_clock_of_the_day_is_for_reading_alone(monkeypatch):
    ticks = iter([100.0, 101.0, 103.0])
    with Sampler(clock=lambda: next(ticks)) as sampler:
        first = sampler.read()
        monkeypatch.setattr(time, "time", lambda: 5.0)  # it leaps back by years
        second = sampler.read()
    assert (first.seconds, second.seconds, second.time) == (1.0, 3.0, 5.0)
    assert second.disk_read_bytes_per_s is None or second.disk_read_bytes_per_s >= 0


def test_a_row_has_the_columns_of_each_gpu():
    sample = Sample(1.0, 2.0, 4.0, gpus=(Gpu("0", power_w=70.0, energy_j=5.0), Gpu("1", energy_j=7.0), Gpu("1s0")))
    row = sample.row()
    assert (row["gpu0_power_w"], row["gpu1_power_w"], sample.gpu_energy_j) == (70.0, None, 12.0)
    assert "gpu0_name" not in row and "gpus" not in row and "gpu1s0_memory_bytes" in row
    assert Sample(1.0, 2.0, 4.0).gpu_energy_j is None
