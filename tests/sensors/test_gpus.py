"""The real pynvml with a fake NVML library, whose answers are set by the environment."""

import json
import os
import subprocess
import sys

import pytest

ASK = """
import dataclasses, json, os, sys
from tfgpu.sensors.gpus import Gpus
told, everything, shown = json.loads(sys.argv[1])
for name, value in {"CUDA_VISIBLE_DEVICES": shown, **told[0][1]}.items():
    if value is not None:
        os.environ[name] = value
gpus, found = Gpus(everything=everything), []
for seconds, changes in told:
    os.environ.update(changes)
    found.append({"gpus": [dataclasses.asdict(each) for each in gpus.read(seconds)], "error": gpus.error})
print(json.dumps({"found": found, "processes": gpus.processes()}))
"""


@pytest.fixture
def ask(nvml):
    """Reads the GPUs at some times, changing the fake NVML before each."""

    def run(*told, everything=True, shown=None, library=nvml):
        away = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        done = subprocess.run(
            [sys.executable, "-c", ASK, json.dumps([told, everything, shown])],
            env={**away, "LD_LIBRARY_PATH": str(library)},
            capture_output=True,
            text=True,
            timeout=550,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    return run


def test_what_a_new_gpu_reports(ask):
    told = ask((0.0, {}), (2.0, {"ENERGY_MJ": "900000", "NVLINK_KIB": "4096"}))
    first, second = told["found"][0]["gpus"][0], told["found"][1]["gpus"][0]
    assert second == {
        "label": "0",
        "name": "NVIDIA H100 80GB HBM3",
        "uuid": "GPU-1f0c5a92",
        "utilization": 0.93,
        "memory_utilization": 0.51,
        "memory_bytes": 4 << 20,
        "memory_total_bytes": 81559 << 20,
        "power_w": 412.0,
        "power_limit_w": 700.0,
        "energy_j": 900.0,  # 900,000 mJ since the first reading
        "temperature_c": 34,
        "sm_clock_mhz": 1755,
        "memory_clock_mhz": 2619,
        "pcie_sent_bytes_per_s": 1000 * 1024,
        "pcie_received_bytes_per_s": 2_000_000 * 1024,
        "pcie_share": pytest.approx(2_000_000 * 1024 / (16 * 3.938e9)),  # generation 5, 16 lanes
        "nvlink_sent_bytes_per_s": 4096 * 1024 / 2,  # 4096 KiB in two seconds
        "nvlink_received_bytes_per_s": 4096 * 1024 / 2,
        "nvlink_share": pytest.approx(4096 * 1024 / 2 / (18 * 25e9)),  # 18 links are up
        "slowed_by": "",
    }
    assert first["energy_j"] == 0.0 and first["nvlink_sent_bytes_per_s"] is None
    assert told["found"][1]["gpus"][1]["utilization"] == 0.4


def test_what_an_old_gpu_does_not_report_is_none_and_energy_is_power_over_time(ask):
    old = {"OLD": "1", "POWER_MW": "100000"}
    found = ask((0.0, old), (2.0, old), (3.0, {**old, "POWER_MW": "300000"}))["found"]
    assert [each["gpus"][0]["energy_j"] for each in found] == [0.0, 200.0, 400.0]  # 2 s of 100 W; 1 s from 100 to 300 W
    last = found[-1]["gpus"][0]
    assert last["pcie_sent_bytes_per_s"] is last["nvlink_sent_bytes_per_s"] is last["pcie_share"] is None
    assert last["nvlink_share"] is None
    assert last["power_w"] == 300.0 and found[-1]["error"] == ""


@pytest.mark.parametrize(
    ("shown", "labels"),
    [(None, ["0", "1"]), ("1", ["1"]), ("GPU-2e7d", ["1"]), ("1,0", ["0", "1"]), ("", []), ("-1", []), ("7", [])],
)
def test_only_what_cuda_shows(ask, shown, labels):
    (found,) = ask((0.0, {}), everything=False, shown=shown)["found"]
    assert [each["label"] for each in found["gpus"]] == labels


def test_a_slice_of_a_gpu(ask):
    told = {"MIG": "1", "SLICES": "1"}
    (found,) = ask((0.0, told), everything=False, shown="MIG-77aa")["found"]
    whole, part = found["gpus"]
    assert (whole["label"], whole["utilization"], whole["power_w"]) == ("0", None, 412.0)
    assert (part["label"], part["uuid"], part["power_w"], part["energy_j"]) == ("0s0", "MIG-77aa", None, None)
    assert part["memory_total_bytes"] == 81559 << 20


@pytest.mark.parametrize(
    ("shown", "labels"), [(None, ["0", "2", "3"]), ("2,3", ["2", "3"]), ("0,1,2", ["0", "2"]), ("GPU-3b6a", ["2"])]
)
def test_a_gpu_that_was_lost_before_leaves_the_others_their_numbers(ask, shown, labels):
    told = {"GPUS": "4", "LOST": "1", "AT": "2", "PID": str(os.getpid())}
    answer = ask((0.0, told), everything=False, shown=shown)
    (found,) = answer["found"]
    assert [gpu["label"] for gpu in found["gpus"]] == labels and found["error"] == "GPU 1: GPU is lost"
    two = next(gpu for gpu in found["gpus"] if gpu["label"] == "2")
    assert (two["uuid"], two["utilization"]) == ("GPU-3b6a90c1", 0.93)
    assert [one["gpu"] for one in answer["processes"]] == ["2"]


def test_a_gpu_that_is_lost_under_way_hides_no_other(ask):
    found = ask((0.0, {}), (1.0, {"LOST_UNDER_WAY": "1"}), (2.0, {}))["found"]
    assert [[gpu["label"] for gpu in each["gpus"]] for each in found] == [["0", "1"], ["0"], ["0"]]
    assert found[1]["error"] == "GPU 1: GPU is lost"


def test_a_driver_that_goes_away_leaves_none_and_no_error(ask):
    found = ask((0.0, {}), (1.0, {"GONE": "1"}), (2.0, {"GONE": "1"}))["found"]
    assert [len(each["gpus"]) for each in found] == [2, 0, 0]
    assert "Uninitialized" in found[1]["error"]


def test_a_number_of_gpus_that_changes(ask):
    told = [(0.0, {"GPUS": "1"}), (1.0, {"GPUS": "2", "ENERGY_MJ": "5000"}), (2.0, {"GPUS": "1", "ENERGY_MJ": "9000"})]
    found = ask(*told)["found"]
    assert [[(gpu["label"], gpu["energy_j"]) for gpu in each["gpus"]] for each in found] == [
        [("0", 0.0)],
        [("0", 5.0), ("1", 0.0)],
        [("0", 9.0)],
    ]


def test_who_computes_on_a_gpu(ask):
    processes = ask((0.0, {"PID": str(os.getpid())}))["processes"]
    assert [(one["gpu"], one["pid"], one["bytes"]) for one in processes] == [("0", os.getpid(), 60 << 30)]
    assert processes[0]["name"]


@pytest.mark.parametrize(
    ("told", "words"), [({"INIT": "9"}, "Driver Not Loaded"), ({"INIT": "18"}, "version mismatch")]
)
def test_no_driver_is_no_gpu(ask, told, words):
    (found,) = ask((0.0, told))["found"]
    assert found["gpus"] == [] and words in found["error"]


def test_no_library_is_no_gpu(ask, tmp_path):
    (found,) = ask((0.0, {}), library=tmp_path)["found"]
    assert found["gpus"] == [] and found["error"]
