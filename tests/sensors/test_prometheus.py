"""The exported metrics, read by Prometheus's own parser, and the server."""

import socket
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from tfgpu.errors import InputError, MachineError
from tfgpu.sensors import Gpu, Sample
from tfgpu.sensors.prometheus import Metrics, Server, address

GPUS = (Gpu("0", power_w=412.0, energy_j=1000.0, sm_clock_mhz=1755, utilization=0.9), Gpu("1", power_w=88.5))
ROW = {**Sample(1e9, 3.0, 2.0, cpu_share=0.5, gpus=GPUS).row(), "step": 17, "epoch": 2, "limit": "GPU compute"}
# Dashboards and alerts depend on these names and types.
NAMES = {
    "tfgpu_cores": "gauge",
    "tfgpu_cpu_ratio": "gauge",
    "tfgpu_epoch": "gauge",
    "tfgpu_gpu_energy_joules": "counter",
    "tfgpu_gpu_power_watts": "gauge",
    "tfgpu_gpu_sm_clock_hertz": "gauge",
    "tfgpu_gpu_utilization_ratio": "gauge",
    "tfgpu_limit_info": "gauge",
    "tfgpu_steps": "counter",
}


def parsed(row, *, worker=0, uuids=None):
    metrics = Metrics(worker=worker)
    metrics.update(row, uuids=uuids)
    return {family.name: family for family in text_string_to_metric_families(metrics.text())}


def test_names_types_and_values():
    found = parsed(ROW, worker=3, uuids={"0": "GPU-a", "1": 'with "quotes" and \\'})
    assert {name: family.type for name, family in found.items()} == NAMES
    assert all(family.documentation for family in found.values())
    powers = {sample.labels["gpu"]: sample for sample in found["tfgpu_gpu_power_watts"].samples}
    assert (powers["0"].value, powers["1"].value) == (412.0, 88.5)
    assert powers["0"].labels == {"worker": "3", "gpu": "0", "uuid": "GPU-a"}
    assert powers["1"].labels["uuid"] == 'with "quotes" and \\'
    assert found["tfgpu_gpu_energy_joules"].samples[0].name == "tfgpu_gpu_energy_joules_total"
    assert found["tfgpu_gpu_sm_clock_hertz"].samples[0].value == 1755e6
    assert found["tfgpu_gpu_utilization_ratio"].samples[0].value == 0.9
    assert found["tfgpu_cpu_ratio"].samples[0].labels == {"worker": "3"}
    assert found["tfgpu_steps"].samples[0].value == 17
    assert found["tfgpu_limit_info"].samples[0].labels == {"worker": "3", "resource": "GPU compute"}


@given(st.dictionaries(st.sampled_from(sorted(ROW)), st.floats() | st.none() | st.integers()), st.text())
def test_any_value_can_be_parsed(row, uuid):
    found = parsed(row, uuids={"0": uuid})
    for sample in (sample for family in found.values() for sample in family.samples if "gpu" in sample.labels):
        assert sample.labels["uuid"] == (uuid if sample.labels["gpu"] == "0" else "")


def get(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=550) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_the_newest_sample_is_served_until_close():
    metrics = Metrics()
    metrics.update({"step": 1})
    server = Server(address(0), metrics)
    assert get(server.port) == ("text/plain; version=0.0.4; charset=utf-8", metrics.text())
    metrics.update({"step": 2})
    assert 'tfgpu_steps_total{worker="0"} 2.0\n' in get(server.port)[1]
    with pytest.raises(MachineError, match="Give another port"):
        Server(address(server.port), metrics)
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server.port)


def test_a_silent_client_blocks_neither_others_nor_close():
    server = Server(address(0), Metrics())
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server.port)[1] == ""
        server.close()


@pytest.mark.parametrize("value", ["port", "host:", "9400x", True, -1, 65536, "host:99999", 1.5])
def test_an_invalid_address_is_rejected(value):
    with pytest.raises(InputError, match="Use 9400"):
        address(value)
