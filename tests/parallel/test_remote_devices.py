"""Connections to a lost process are shut down, and nothing else is."""

import contextlib
import os
import socket

import psutil
import pytest

from tfgpu.parallel import remote_devices


@pytest.fixture
def server():
    """An address, and a function that connects to it; returns both ends."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))

        def connect() -> tuple[socket.socket, socket.socket]:
            mine = stack.enter_context(socket.create_connection(listener.getsockname()))
            theirs = stack.enter_context(listener.accept()[0])
            theirs.settimeout(20)
            return mine, theirs

        yield f"127.0.0.1:{listener.getsockname()[1]}", connect


def test_all_connections_to_the_address_are_shut_down(server):
    address, connect = server
    (one, its_end), (other, other_end) = connect(), connect()
    files = len(os.listdir("/proc/self/fd"))
    remote_devices._disconnect(address)
    assert its_end.recv(1) == other_end.recv(1) == b""
    assert one.recv(1) == other.recv(1) == b""
    assert len(os.listdir("/proc/self/fd")) == files


@pytest.mark.parametrize("kind", ["socket", "file"])
def test_a_reused_file_descriptor_is_left_alone(server, kind, monkeypatch, tmp_path):
    address, connect = server
    number = connect()[0].detach()
    listed = psutil.Process().net_connections("tcp")
    monkeypatch.setattr(psutil.Process, "net_connections", lambda self, kind: listed)
    with socket.create_server(("127.0.0.1", 0)) as elsewhere, contextlib.ExitStack() as stack:
        if kind == "socket":
            innocent = stack.enter_context(socket.create_connection(elsewhere.getsockname()))
            stack.enter_context(elsewhere.accept()[0]).sendall(b"x")
        else:
            innocent = stack.enter_context(open(tmp_path / "innocent", "w+"))
        os.dup2(innocent.fileno(), number)
        stack.callback(os.close, number)
        files = len(os.listdir("/proc/self/fd"))
        remote_devices._disconnect(address)
        assert len(os.listdir("/proc/self/fd")) == files
        if kind == "socket":
            innocent.settimeout(20)
            assert innocent.recv(1) == b"x"
            innocent.sendall(b"y")
        else:
            innocent.write("still open")
