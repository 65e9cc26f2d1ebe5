"""Every test process gets four logical CPU devices, before TensorFlow starts: they stand in for four GPUs."""

import contextlib
import ctypes
import functools
import gc
import getpass
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from pathlib import Path

import hypothesis
import psutil
import pytest

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ["TFGPU_CACHE"] = "off"  # each test makes its own trials

import tensorflow as tf

ROOM = 50 * 2**20
"""Bytes by which tests may let a process grow before garbage is collected."""
hypothesis.settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("no deadline")
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
)


def pytest_addoption(parser):
    parser.addoption("--costs", metavar="FILE", help="append each test's CPU seconds to this file, as JSON lines")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    """Of the cases of a test that `sample` marks, all but those that it keeps are slow."""
    picked = any("::" in arg for arg in config.args)  # perhaps not every case of a test
    cases = {}
    for item in items:
        if (sample := item.get_closest_marker("sample")) and hasattr(item, "callspec"):
            cases.setdefault((item.path, item.originalname), (sample.args, []))[1].append(item)
    for kept, found in cases.values():
        if kept and isinstance(kept[0], int):
            step = len(found) / kept[0]
            fast = {found[int(at * step)] for at in range(kept[0])} if step > 1 else {*found}
        else:
            fast = {item for item in found if {item.callspec.id, *item.callspec.id.split("-")} & {*kept}}
        if not (fast or picked or found[0].get_closest_marker("slow")):
            raise pytest.UsageError(f"`sample` keeps no case of {found[0].nodeid}: name one, or mark the test slow.")
        for item in {*found} - fast:
            item.add_marker(pytest.mark.slow)


@functools.cache
def declared_patches() -> list[tuple[str, str]]:
    from tfgpu.compat import patch

    return patch.declared()


@pytest.fixture(autouse=True)
def no_strategy_waits():
    """A strategy of an earlier test that Python still keeps is none that a test has forgotten to use."""
    if "tfgpu.core.replication" in sys.modules:
        sys.modules["tfgpu.core.replication"].made.clear()


@pytest.fixture(autouse=True, scope="module")
def every_patch_is_declared():
    """Whatever features a module uses, `tfgpu doctor` could have listed what they wrap."""
    yield
    if (patch := sys.modules.get("tfgpu.compat.patch")) is None:
        return
    installed = {(each.target, each.by) for each in patch.installed() if each.by.startswith("tfgpu.")}
    assert [each for each in sorted(installed) if not is_declared(*each)] == []


def is_declared(target: str, by: str) -> bool:
    return any(by == module and fnmatchcase(target, name) for name, module in declared_patches())


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item):
    before = os.times()
    result = yield
    if path := item.config.getoption("--costs"):
        cost_s = sum(os.times()[:4]) - sum(before[:4])
        memory_mb = psutil.Process().memory_info().rss / 2**20
        said = {"test": item.nodeid, "slow": "slow" in item.keywords, "cpu_s": cost_s, "memory_mb": memory_mb}
        said["process"] = os.environ.get("PYTEST_XDIST_WORKER", "")
        with open(path, "a") as file:  # One write a line: two processes may append.
            file.write(json.dumps(said) + "\n")
    return result


def free_addresses(count: int) -> list[str]:
    """Addresses of this machine at ports that nothing listens on."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]


def run_together(
    script: str, jobs: dict[str, int], *arguments, wait_for: str = "", timeout: float = 550
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


@pytest.fixture(autouse=True)
def no_scope_is_left():
    """A test that is cut off within a strategy's scope, by a timeout, leaves nothing of it to those after it."""
    yield
    if tf.distribute.has_strategy():
        tf.compat.v1.reset_default_graph()


def pytest_collection():
    """Collects the tests without a search for garbage, which the imports hardly make: it takes seconds."""
    gc.disable()


def pytest_collection_finish():
    """Leaves what the imports have made out of each later search for garbage: half a second each."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def process_memory():
    """The bytes of this process when garbage was last collected."""
    return {"then": psutil.Process().memory_info().rss}


@pytest.fixture(scope="module", autouse=True)
def memory_is_given_back(process_memory):
    """Models and graphs of many modules do not stay in memory until the last one's end."""
    yield
    if psutil.Process().memory_info().rss - process_memory["then"] > ROOM and "keras" in sys.modules:
        sys.modules["keras"].backend.clear_session()  # collects garbage, too
        ctypes.CDLL(None).malloc_trim(0)
        process_memory["then"] = psutil.Process().memory_info().rss


@pytest.fixture
def stops_after():
    """`stops_after(n)`: a callback that ends a `fit` by an `InterruptedError` after `n` batches."""
    import keras

    class Stops(keras.callbacks.Callback):
        def __init__(self, after):
            super().__init__()
            self.left = after

        def on_train_batch_end(self, batch, logs=None):
            self.left -= 1
            if self.left == 0:
                raise InterruptedError

    return Stops


@pytest.fixture
def together():
    """`run_together`: a script in several real processes, each with its TF_CONFIG."""
    return run_together


@pytest.fixture
def addresses():
    """`free_addresses`: so many addresses of this machine."""
    return free_addresses


@pytest.fixture(scope="session")
def ssh_server(tmp_path_factory):
    """The `ssh` command that reaches this machine as node1 and node2, and does not as nowhere and stranger."""
    server = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if not server:
        pytest.skip("needs sshd (openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "own", "other"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    with socket.socket() as free, socket.socket() as closed:
        free.bind(("127.0.0.1", 0))
        closed.bind(("127.0.0.1", 0))
        port, unused = free.getsockname()[1], closed.getsockname()[1]
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/own.pub\n"
        "PidFile none\nStrictModes no\nUsePAM no\nPasswordAuthentication no\nKbdInteractiveAuthentication no\n"
        "PermitRootLogin yes\nMaxStartups 50\n"
    )
    (folder / "ssh_config").write_text(
        f"Host node1 node2\n  IdentityFile {folder}/own\n"
        f"Host stranger\n  IdentityFile {folder}/other\n"
        f"Host nowhere\n  Port {unused}\n"
        f"Host *\n  HostName 127.0.0.1\n  Port {port}\n  User {getpass.getuser()}\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n  GlobalKnownHostsFile /dev/null\n"
    )
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # Where a server that runs as root wants an empty folder.
    process = subprocess.Popen([server, "-D", "-e", "-f", folder / "sshd_config"], stderr=subprocess.PIPE)
    command = f"ssh -F {folder}/ssh_config"
    try:
        for _ in range(100):
            if subprocess.run([*command.split(), "node1", "true"], capture_output=True).returncode == 0:
                break
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.1)
        yield command
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Compiles C into a shared library of that name; returns its folder."""
    compiler = shutil.which("cc")
    if not compiler:
        pytest.skip("needs a C compiler (cc)")

    def make(name: str, code: str, folder: Path | None = None, *options: str) -> Path:
        folder = folder or tmp_path_factory.mktemp("library")
        source = folder / f"{name}.c"
        source.write_text(code)
        command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", folder / name, source, *options]
        subprocess.run(command, check=True, timeout=550)
        source.unlink()
        return folder

    return make


@pytest.fixture(scope="session")
def nvml(compiled):
    """The folder of a `libnvidia-ml.so.1` that stands in for NVIDIA's; LD_LIBRARY_PATH leads the real pynvml to it."""
    return compiled("libnvidia-ml.so.1", (Path(__file__).parent / "nvml.c").read_text())
