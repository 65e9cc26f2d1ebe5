"""What the sensors tell: a machine's own figures held against psutil, and GPUs of a stand-in for NVIDIA's driver."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nvml import NVML

from tfgpu import sensors
from tfgpu.sensors.gpus import visible_of

READ = """
import json
from dataclasses import asdict
from tfgpu import sensors
with sensors.Sensors() as machine:
    print(json.dumps({"gpus": asdict(machine.read())["gpus"], "why": machine.why_no_gpus}))
"""


@pytest.fixture(scope="module")
def driver(compiled):
    """The environment in which nvidia-ml-py finds the stand-in."""
    folder = compiled("libnvidia-ml.so.1", NVML)

    def environ(**changes):
        clean = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
        return clean | {"LD_LIBRARY_PATH": str(folder)} | {name: str(value) for name, value in changes.items()}

    return environ


def read(environ):
    ran = subprocess.run([sys.executable, "-c", READ], env=environ, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_the_figures_of_gpus(driver):
    first, second = read(driver(REASONS=0x20, PID=os.getpid(), USED_MIB=40000))["gpus"]
    assert first["name"] == "NVIDIA H100 80GB HBM3" and (first["index"], second["index"]) == (0, 1)
    assert (first["utilization"], first["memory_utilization"]) == (0.97, 0.61)
    assert (first["memory_used_bytes"], first["memory_bytes"]) == (40000 << 20, 81559 << 20)
    assert (first["power_w"], first["power_limit_w"], first["energy_j"]) == (652.34, 700.0, 123956.0)
    assert (first["temperature_c"], first["clock_mhz"], first["clock_max_mhz"]) == (34, 1755, 1980)
    assert (first["pcie_read_bytes_s"], first["pcie_write_bytes_s"]) == (2048000, 512000)
    assert first["nvlink_bytes"] == (4096 + 1024) * 1024
    assert first["slowed_by"] == ["heat (software)"] and second["slowed_by"] == []
    assert first["processes"] == [{"pid": os.getpid(), "bytes": 60 << 30}]


def test_what_a_gpu_does_not_tell_is_none(driver):
    first, _ = read(driver(NO_POWER=1, NO_NVLINK=1))["gpus"]
    assert first["power_w"] is first["energy_j"] is first["nvlink_bytes"] is None
    assert first["utilization"] == 0.97


def test_a_lost_gpu_hides_no_other_and_only_visible_ones_count(driver):
    assert [gpu["index"] for gpu in read(driver(LOST=1))["gpus"]] == [0]
    assert [gpu["index"] for gpu in read(driver(CUDA_VISIBLE_DEVICES="1"))["gpus"]] == [1]
    assert [gpu["index"] for gpu in read(driver(CUDA_VISIBLE_DEVICES="GPU-2e7,0"))["gpus"]] == [1, 0]
    none = read(driver(CUDA_VISIBLE_DEVICES=""))
    assert none["gpus"] == [] and "names none" in none["why"]


def test_without_a_driver_there_are_none_and_no_error(driver):
    assert read(driver(INIT=9))["gpus"] == []
    with sensors.Gpus({}) as gpus:
        found = gpus.read()
    assert found == () and "NVML" in gpus.why or found


def test_the_processors_memory_and_this_process():
    with sensors.Sensors() as machine:
        began = time.monotonic()
        held = bytearray(os.urandom(1)) * (200 << 20)
        while time.monotonic() - began < 0.6:
            sum(range(1000))
        sample = machine.read()
    host = sample.host
    assert 0.02 < host.process_cores < 2.5 and 0 < host.cpu <= 1  # one thread was busy, on a machine that may be too
    assert host.process_memory_bytes > len(held)
    assert host.memory_used_bytes <= host.memory_bytes <= psutil.virtual_memory().total
    assert 0 < host.cores <= os.cpu_count()


def test_children_count_too_and_may_end(tmp_path):
    sensor = sensors.HostSensor()
    code = "import time\nend = time.time() + 0.8\nwhile time.time() < end: sum(range(1000))"
    child = subprocess.Popen([sys.executable, "-c", code])
    time.sleep(0.6)
    busy = sensor.read().process_cores
    child.wait(timeout=30)
    assert busy > 0.02
    assert sensor.read().process_cores >= 0  # its time has gone with it


def test_what_is_written_to_a_disk_is_seen(tmp_path):
    sensor = sensors.HostSensor()
    with open(tmp_path / "file", "wb") as file:
        file.write(os.urandom(8 << 20))
        file.flush()
        os.fsync(file.fileno())
    found = sensor.read()
    assert found.disk_write_bytes_s is None or found.disk_write_bytes_s >= 0


@given(st.text(max_size=20) | st.lists(st.sampled_from(["0", "1", "GPU-a", "GPU-b", "7", "-1", ""])).map(",".join))
def test_visible_devices_are_some_of_those_there(text):
    found = visible_of(text, {0: "GPU-aa", 1: "GPU-bb"})
    assert set(found) <= {0, 1} and len(found) == len(set(found))


def tfgpu(*words, cwd, environ=None):
    command = [sys.executable, "-m", "tfgpu", "top", *words]
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=60)


def test_top_shows_gpus_once(driver, tmp_path):
    shown = tfgpu("--once", cwd=tmp_path, environ=driver(PID=os.getpid(), COLUMNS=160)).stdout
    assert "H100" in shown and "97%" in shown and "652 W of 700 W" in shown and "1755 of 1980 MHz" in shown
    assert str(os.getpid()) in shown and "60.0 GiB" in shown


def test_top_without_gpus_and_with_a_run(tmp_path, driver):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("model: mlp")
    shown = tfgpu("run", "--once", cwd=tmp_path, environ=driver(INIT=9))
    assert shown.returncode == 0 and "No GPU:" in shown.stdout and "no epoch is done yet" in shown.stdout
    (tmp_path / "run" / "metrics.csv").write_text("epoch,loss,step_time_s\n1,0.5,0.01\n2,0.25,0.02\n")
    done = json.loads(tfgpu("run", "--once", "--json", cwd=tmp_path, environ=driver(INIT=9)).stdout)
    assert done["run"] == {"epoch": 2.0, "loss": 0.25, "step_time_s": 0.02} and done["gpus"] == []
    assert "is no run directory" in tfgpu("nowhere", "--once", cwd=tmp_path).stderr


def test_top_ends_by_an_interrupt_with_code_0(tmp_path):
    import signal

    command = [sys.executable, "-m", "tfgpu", "top", "--json", "--every", "0.2"]
    running = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    try:
        assert json.loads(running.stdout.readline())["host"]["cores"] >= 1
        running.send_signal(signal.SIGINT)
        running.communicate(timeout=30)
    finally:
        running.kill()
    assert running.returncode == 0
