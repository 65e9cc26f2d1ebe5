"""Devices of several processes: one script, one training, what one device learns; and the deaths of its processes."""

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.parallel import Mesh, connect, pipeline

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).parent / "spread.py"
PARTS = runpy.run_path(str(SCRIPT))
PATIENCE_S = 800
ENVIRON = {"PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
BOUNDS = {"float32": 1e-5, "mixed_float16": 2e-3, "mixed_bfloat16": 3e-2}  # as of stages in one process
FIRST_OF_EACH, FIRST_FOUR = ("0/CPU:0", "1/CPU:0"), ("0/CPU:0", "0/CPU:1", "1/CPU:0", "1/CPU:1")
HOMES = {  # of weights and slots
    "tensor across": FIRST_OF_EACH,
    "tensor in the other process": ("1/CPU:2", "1/CPU:3"),
    "data x tensor across": FIRST_FOUR,
    "data across x tensor": FIRST_FOUR,
    "all axes, ZeRO 1": tuple(f"{process}/CPU:{at}" for process in range(2) for at in range(4)),
    "experts across": FIRST_OF_EACH,
    "data x experts across": FIRST_FOUR,
    "sequence across": ("0/CPU:0",),
    "ZeRO 2": FIRST_FOUR,
    "ZeRO 1 on the hosts": (*FIRST_OF_EACH, "0/CPU:3", "1/CPU:3"),
}
launched = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture
def start(tmp_path):
    """Starts a command in a folder of its own, whose output goes to `FOLDER/said`; ends what is left after the test."""
    running = []

    def run(words, name="run", **environ):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        with open(folder / "said", "ab") as said:
            running.append(
                subprocess.Popen(
                    [sys.executable, *(word.format(folder=folder) for word in words)],
                    env={**os.environ, **ENVIRON, **environ},
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                )
            )
        return running[-1], folder

    yield run
    for process in running:
        process.kill()
        process.wait()


@pytest.fixture
def launch(start):
    """Starts the script by `tfgpu launch` in two processes."""

    def run(*what, options=(), name="run", **environ):
        words = ["-m", "tfgpu", "launch", "-n", "2", "--no-logs", *options, str(SCRIPT), "{folder}", *what]
        return start(words, name, **environ)

    return run


@pytest.fixture
def by_hand(start, addresses):
    """Starts processes of the script with a TF_CONFIG each, without a launcher; only the given ones of two."""

    def run(*what, ranks=(0, 1), **environ):
        cluster, made = {"worker": addresses(2)}, []
        for rank in ranks:
            task = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
            made.append(start([str(SCRIPT), "{folder}", *what], TF_CONFIG=task, **environ))
        return [process for process, _ in made], made[0][1]

    return run


def said(folder: Path) -> str:
    return (folder / "said").read_text()


def ended(process, folder: Path, seconds: float = PATIENCE_S) -> int:
    with contextlib.suppress(subprocess.TimeoutExpired):
        return process.wait(seconds)
    raise AssertionError(said(folder)[-5000:])


def wait_for(words: str, process, folder: Path) -> None:
    until = time.monotonic() + PATIENCE_S
    while words not in said(folder):
        assert process.poll() is None and time.monotonic() < until, said(folder)[-5000:]
        time.sleep(0.02)


def send(folder: Path, rank: int, number: int) -> float:
    os.kill(int((folder / f"pid{rank}").read_text()), number)
    return time.monotonic()


@pytest.mark.slow
def test_in_one_process_the_same_script_runs():
    assert connect().size == 1
    model = pipeline(PARTS["make"](), 2, 3, cuts=["third"], mesh=Mesh(pipeline=2, devices=["CPU:0", "0/CPU:1"]))
    assert PARTS["devices_of"](model)["third"][0].endswith("CPU:1")
    with model.distribute_strategy.scope():
        model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.ones((8, 8), "float32"), np.ones((8, 4), "float32"), verbose=0)


def test_a_missing_process_is_reported():
    with pytest.raises(tfgpu.InputError, match=r"no process 1 for the device '1/CPU:0'. Found: one. .*launch -n 2"):
        pipeline(PARTS["make"](), 2, 3, cuts=["third"], devices=["0/CPU:0", "1/CPU:0"])


def test_bad_use(monkeypatch):
    cluster = tfgpu.Cluster(workers=("localhost:1", "localhost:2"))
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])  # TensorFlow has started
    with pytest.raises(tfgpu.MachineError, match="came too late"):
        connect(cluster)
    servers = tfgpu.Cluster(
        workers=("localhost:1", "localhost:2"), parameter_servers=("localhost:3",), has_chief=True, task_type="chief"
    )
    with pytest.raises(tfgpu.InputError, match="remove `--ps`"):
        connect(servers)
    monkeypatch.setenv("TF_CONFIG", cluster.tf_config())
    with pytest.raises(tfgpu.InputError, match="one of 2 processes, and each would train its own model"):
        pipeline(PARTS["make"](), 2, 3, cuts=["third"])


class TestLaunched:
    pytestmark = launched

    def test_the_training_is_one_devices(self, launch):
        process, folder = launch(*PARTS["CASES"])
        assert ended(process, folder) == 0, said(folder)[-5000:]
        found = json.loads((folder / "found.json").read_text())
        about = found.pop("about")
        assert (about["strategy"], about["workers"], about["rows"]) == ("one_device", 1, PARTS["ROWS"])
        assert about["assigned too late"] == 0
        assert about["everywhere"] == list(PARTS["NAMES"])
        tasks = {name: devices[0].partition("task:")[2] for name, devices in about["devices"].items()}
        assert tasks == {
            "first": "0/device:CPU:0",
            "second": "0/device:CPU:1",
            "third": "1/device:CPU:0",
            "last": "1/device:CPU:1",
        }
        print(json.dumps(found))
        for name, numbers in found.items():
            bound = BOUNDS[PARTS["CASES"][name][1].get("policy", "float32")]
            assert max(numbers.values()) < bound, (name, numbers)

    def test_layers_in_parts_and_sharded_optimizers_are_one_devices(self, launch):
        process, folder = launch(*PARTS["PARTS"], DEVICES="4")
        assert ended(process, folder) == 0, said(folder)[-5000:]
        found = json.loads((folder / "found.json").read_text())
        print(json.dumps(found))
        for name, (numbers, sizes) in found.items():
            bound = BOUNDS[PARTS["PARTS"][name].get("policy", "float32")]
            for key, number in numbers.items():
                assert number < bound * (10 if key == "predict" else 1), (name, numbers)
            assert set(sizes) == set(HOMES[name]), (name, sizes)
        assert "Skipping variable loading" not in said(folder)
        slots = {name: {device: held["optimizer"] for device, held in found[name][1].items()} for name in found}
        numbers, counters = 756, 8 + 4  # of the model; the step, and the learning rate
        cut = 16 * 16 + 16 + 16 * 4  # the third kernel and its bias, the last kernel
        assert slots["tensor across"] == {
            "0/CPU:0": 3 * 4 * (numbers - cut // 2) + counters,
            "1/CPU:0": 3 * 4 * cut // 2,
        }
        assert set(slots["ZeRO 2"].values()) == {4 * 4 * numbers // 4 + counters}
        hosts = slots["ZeRO 1 on the hosts"]
        assert hosts["0/CPU:0"] == hosts["1/CPU:0"] == 2 * 4 * numbers // 2
        assert hosts["0/CPU:3"] == hosts["1/CPU:3"] == counters

    def test_a_killed_stage_starts_all_again_which_end_in_the_same_bytes(self, launch):
        process, folder = launch("goes", name="whole")
        assert ended(process, folder) == 0, said(folder)[-5000:]
        again, broken = launch("goes", name="broken", options=["--max-restarts", "1"])
        wait_for("ended epoch 7", again, broken)
        send(broken, 1, signal.SIGKILL)
        assert ended(again, broken) == 0, said(broken)[-5000:]
        assert "worker 1: killed by SIGKILL" in said(broken) and "Attempt 2 starts" in said(broken)
        assert said(broken).count("ended epoch 0\n") == 1  # it resumed, and did not start over
        with np.load(folder / "end.npz") as one, np.load(broken / "end.npz") as other:
            assert one.files == other.files
            for name in one.files:
                assert one[name].tobytes() == other[name].tobytes(), name

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_fit_names_a_stage_that_is_lost(self, number, by_hand):
        (chief, served), folder = by_hand("goes", EPOCHS="100000")
        wait_for("ended epoch 3", chief, folder)
        at = send(folder, 1, number)
        assert ended(chief, folder) == 1
        print(json.dumps({signal.Signals(number).name: round(time.monotonic() - at, 1)}))
        assert "MachineError: Lost: process 1 (127.0.0.1:" in said(folder)
        assert ", 1/CPU:0, 1/CPU:1). It has ended, is stopped, or has lost its network" in said(folder)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
    def test_the_others_end_when_the_first_one_is_lost(self, number, by_hand):
        (chief, served), folder = by_hand("goes", EPOCHS="100000")
        wait_for("ended epoch 3", chief, folder)
        at = send(folder, 0, number)
        assert ended(served, folder) == 0
        print(json.dumps({signal.Signals(number).name: round(time.monotonic() - at, 1)}))

    def test_a_process_that_is_asked_to_stop_stays_until_the_first_one_has_saved(self, by_hand):
        (chief, served), folder = by_hand("goes", EPOCHS="100000")
        wait_for("ended epoch 3", chief, folder)
        send(folder, 1, signal.SIGTERM)
        time.sleep(3)
        assert served.poll() is None
        send(folder, 0, signal.SIGTERM)
        assert ended(chief, folder) == 75, said(folder)[-3000:]
        assert ended(served, folder) == 75

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_process_that_never_starts_is_named(self, rank, by_hand):
        (process,), folder = by_hand("goes", ranks=[rank], TFGPU_STARTUP_TIMEOUT="8")
        assert ended(process, folder) == 1
        assert f"worker {1 - rank} (127.0.0.1:" in said(folder) and "did not answer" in said(folder)

    @pytest.mark.parametrize(
        ("what", "code", "words"),
        [
            ("mesh", 2, "There is no process 3 for the device '3/CPU:0'. Found: 0 to 1. Start 4"),
            ("alone", 2, "Call `tfgpu.parallel.connect()` at the top of the script"),
            ("late", 1, "came too late: TensorFlow has started the devices"),
        ],
    )
    def test_wrong_use_ends_all(self, what, code, words, launch):
        process, folder = launch(what)
        assert ended(process, folder) == code
        assert words in said(folder)
