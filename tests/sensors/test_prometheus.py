import socket
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.errors import InputError, MachineError
from tfgpu.sensors import Gpu, Sample
from tfgpu.sensors.prometheus import CONTENT_TYPE, Server, address, text


def parsed(content):
    parser = pytest.importorskip("prometheus_client.parser", reason="needs prometheus-client")
    return {family.name: family for family in parser.text_string_to_metric_families(content)}


GPUS = (Gpu("0", power_w=412.0, energy_j=1000.0, sm_clock_mhz=1755, utilization=0.9), Gpu("1", power_w=88.5))
ROW = {**Sample(1e9, 3.0, 2.0, cpu_share=0.5, gpus=GPUS).row(), "step": 17, "epoch": 2, "limit": "GPU compute"}


def test_prometheus_s_own_parser_reads_it():
    found = parsed(text(ROW, worker=3, uuids={"0": "GPU-a", "1": 'with "quotes" and \\'}))
    powers = {sample.labels["gpu"]: sample for sample in found["tfgpu_gpu_power_watts"].samples}
    assert (powers["0"].value, powers["1"].value) == (412.0, 88.5)
    assert powers["0"].labels == {"worker": "3", "gpu": "0", "uuid": "GPU-a"}
    assert powers["1"].labels["uuid"] == 'with "quotes" and \\'
    assert found["tfgpu_gpu_energy_joules"].type == "counter"
    assert found["tfgpu_gpu_energy_joules"].samples[0].name == "tfgpu_gpu_energy_joules_total"
    assert found["tfgpu_gpu_sm_clock_hertz"].samples[0].value == 1755e6
    assert found["tfgpu_gpu_utilization_ratio"].samples[0].value == 0.9
    assert found["tfgpu_cpu_ratio"].samples[0].labels == {"worker": "3"}
    assert found["tfgpu_steps"].samples[0].value == 17
    assert found["tfgpu_limit_info"].samples[0].labels["resource"] == "GPU compute"
    assert "tfgpu_time" not in found and all(family.documentation for family in found.values())


@given(st.dictionaries(st.sampled_from(sorted(ROW)), st.floats() | st.none() | st.integers()), st.text())
def test_whatever_the_figures_are_it_is_read(row, uuid):
    found = parsed(text(row, uuids={"0": uuid}))
    for sample in (sample for family in found.values() for sample in family.samples if "gpu" in sample.labels):
        assert sample.labels["uuid"] == (uuid if sample.labels["gpu"] == "0" else "")


def get(port, path="/metrics"):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def test_it_is_served_until_it_is_closed():
    newest = ["tfgpu_step 1\n"]
    server = Server(address(0), lambda: newest[0])
    assert get(server.port) == (CONTENT_TYPE, "tfgpu_step 1\n")
    newest[0] = "tfgpu_step 2\n"
    assert get(server.port, "/metrics?x=1")[1] == get(server.port, "/")[1] == "tfgpu_step 2\n"
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(server.port, "/etc/passwd")
    with pytest.raises(MachineError, match="Give another port"):
        Server(address(server.port), lambda: "")
    server.close()
    with pytest.raises(urllib.error.URLError):
        get(server.port)


def test_a_client_that_says_nothing_holds_nobody_up():
    server = Server(address(0), lambda: "")
    with socket.create_connection(("127.0.0.1", server.port)):
        assert get(server.port)[1] == ""
        server.close()


@pytest.mark.parametrize("value", ["port", "host:", "9400x", True, -1, 65536, "host:99999", 1.5])
def test_an_address_that_is_none(value):
    with pytest.raises(InputError, match="Use 9400"):
        address(value)
