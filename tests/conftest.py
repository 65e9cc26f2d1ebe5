"""Every test process gets four logical CPU devices, before TensorFlow starts: they stand for four GPUs."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import zlib

import hypothesis
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tensorflow as tf

hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no deadline")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


def pytest_addoption(parser):
    parser.addoption("--share", default="1/1", metavar="K/N", help="every N-th test, by its name's checksum: part K")


def pytest_collection_modifyitems(config, items):
    part, parts = map(int, config.getoption("--share").split("/"))
    chosen, others = [], []
    for item in items:
        (chosen if zlib.crc32(item.nodeid.encode()) % parts == part - 1 else others).append(item)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = chosen


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine at ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def run_together(
    script: str, jobs: dict[str, int], *arguments, wait_for: str = "", timeout: float = 180
) -> dict[str, dict]:
    """Runs `script` once a task, each with its TF_CONFIG; returns the JSON that `wait_for`'s tasks print last.

    `arguments` go to each script, with `{task}` in them made the task's name, such as `worker1`.
    """
    left = iter(free_addresses(sum(jobs.values())))
    cluster = {job: [next(left) for _ in range(count)] for job, count in jobs.items()}
    running = {}
    try:
        for job, count in jobs.items():
            for index in range(count):
                task = {"cluster": cluster, "task": {"type": job, "index": index}}
                running[f"{job}{index}"] = subprocess.Popen(
                    [sys.executable, "-c", script, *(str(a).format(task=f"{job}{index}") for a in arguments)],
                    env={**os.environ, "TF_CONFIG": json.dumps(task)},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
        answers = {}
        for name, process in running.items():
            if name.startswith(wait_for):
                out, err = process.communicate(timeout=timeout)
                assert process.returncode == 0, err[-3000:]
                answers[name] = json.loads(out.splitlines()[-1])
        return answers
    finally:
        for process in running.values():
            process.kill()
            process.communicate()


@pytest.fixture
def together():
    """`run_together`: a script in several real processes, each with its TF_CONFIG."""
    return run_together


@pytest.fixture
def addresses():
    """`free_addresses`: so many addresses of this machine."""
    return free_addresses
