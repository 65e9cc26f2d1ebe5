"""Workers and servers wait for their chief, and the chief for them; they exit when asked to."""

import contextlib
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import tensorflow as tf

from tfgpu import environment, strategies
from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError
from tfgpu.rendezvous import peers
from tfgpu.sensors import table, view

PS = dict(workers=("localhost:1", "localhost:2"), parameter_servers=("localhost:3",), has_chief=True)
CHIEF = Cluster(**PS, rank=0, task_type="chief")


def test_a_peer_that_does_not_answer_is_named(monkeypatch):
    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "0.3")
    with pytest.raises(MachineError, match=r"parameter server 0 \(localhost:3\) did not answer: not started"):
        strategies.parameter_server(cluster=CHIEF)


def test_a_non_numeric_timeout_is_named(monkeypatch):
    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "soon")
    with pytest.raises(InputError, match="TFGPU_STARTUP_TIMEOUT must be a number of seconds.*Received: 'soon'"):
        strategies.parameter_server(cluster=CHIEF)


@pytest.fixture
def asked(monkeypatch):
    """What is asked of `tf.config` on a machine with two GPUs, before TensorFlow starts its devices."""
    gpus, found = [tf.config.PhysicalDevice(f"/physical_device:GPU:{index}", "GPU") for index in range(2)], []
    visible = {"GPU": gpus}

    def set_visible_devices(devices, kind):
        visible[kind] = devices
        found.append(("visible", kind, devices))

    monkeypatch.setattr(environment, "is_initialized", lambda: False)
    monkeypatch.setattr(tf.config, "set_visible_devices", set_visible_devices)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible[kind])
    monkeypatch.setattr(
        tf.config, "get_logical_device_configuration", lambda gpu: [1] if gpu.name.endswith("1") else None
    )
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, on: found.append(("growth", gpu.name, on))
    )
    return found


@pytest.mark.parametrize("task, rank", [("ps", -1), ("worker", 1), ("chief", 0)])
def test_a_server_sees_no_gpu_and_the_others_take_memory_as_they_need_it(asked, monkeypatch, task, rank):
    monkeypatch.setenv("TFGPU_STARTUP_TIMEOUT", "0.3")
    with pytest.raises(MachineError, match="did not answer"):
        strategies.parameter_server(cluster=Cluster(**PS, rank=rank, task_type=task))
    # The second GPU has a memory limit, which excludes growth.
    assert asked == ([("visible", "GPU", [])] if task == "ps" else [("growth", "/physical_device:GPU:0", True)])


DEVICES = """
import importlib, tensorflow as tf, tfgpu
parameter_server = importlib.import_module("tfgpu.strategies.parameter_server")
tfgpu.environment.set_logical_devices(3)
server = parameter_server._server(tfgpu.Cluster.from_environment())
alone = tf.compat.v1.ConfigProto(device_filters=["/job:ps"])  # the others do not run
print([device.device_type for device in tf.compat.v1.Session(server.target, config=alone).list_devices()])
"""


@pytest.mark.processes
@pytest.mark.slow
def test_a_server_has_the_devices_that_tf_config_shows(group):
    processes = group(DEVICES, chief=1, worker=1, ps=1)
    processes.start("ps0")
    assert processes.wait("ps0") == 0, processes.said("ps0")
    assert processes.said("ps0").count("'CPU'") == 3


@pytest.mark.processes
@pytest.mark.slow
def test_a_watched_server_exits_when_asked_to(group, tmp_path):
    script = "import sys, tfgpu\ntfgpu.strategy('parameter_server', watch=sys.argv[1])"
    processes = group(script, chief=1, worker=1, ps=1, startup_timeout=0)
    processes.start("ps0", tmp_path)
    processes.start("worker0", tmp_path)
    with standing_for(processes.cluster["chief"][0]):
        address = processes.cluster["ps"][0]
        while not peers.answers(address):
            assert processes.running["ps0"].poll() is None, processes.said("ps0")
            time.sleep(0.05)
        assert processes.end("ps0", signal.SIGTERM) == 75
    assert processes.wait("worker0", timeout=550) == 0
    for name in ("ps0", "worker1"):  # The chief is worker 0.
        rows = table.last(tmp_path / f"monitor-{name}.csv", 1)
        assert rows[0]["memory_bytes"] > 2**26 and rows[0]["step_time_s"] is None
    assert [each.number for each in view.workers(tmp_path)] == [1]


@contextlib.contextmanager
def standing_for(address):
    """A gRPC server at an address of this machine, as TensorFlow's is one."""
    server = grpc.server(ThreadPoolExecutor(1))
    server.add_insecure_port(address)
    server.start()
    try:
        yield
    finally:
        server.stop(None)


@pytest.mark.processes
def test_a_port_without_a_listener_does_not_answer_itself(addresses, monkeypatch):
    """TCP can connect a socket with itself, where Linux chooses for its near end the very port that is called."""
    address = addresses(1)[0]
    host, _, port = address.rpartition(":")

    class Own(socket.socket):
        def connect(self, place):
            self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.bind(place)
            super().connect(place)

    monkeypatch.setattr(socket, "socket", Own)
    with Own(socket.AF_INET) as near:
        near.connect(("127.0.0.1", int(port)))
        assert near.getsockname() == near.getpeername()  # So it happens here, too.
    assert not peers.answers(address) and not peers.serves(address)


@pytest.mark.processes
def test_a_meeting_before_the_start_is_no_server(addresses):
    """A worker that comes back early finds the others' meeting at the chief's port, and waits on."""
    grpc_at, meeting_at = addresses(2)
    host, _, port = meeting_at.rpartition(":")
    with standing_for(grpc_at), socket.create_server((host, int(port))):
        assert peers.answers(grpc_at) and peers.serves(grpc_at)
        assert peers.answers(meeting_at) and not peers.serves(meeting_at)
