"""`tfgpu launch` as a user types it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from tfgpu.cli import main

ROOT = Path(__file__).parents[2]
TRAIN = """
import json, os, sys
import numpy as np
import keras, tfgpu

assert sys.argv[1:] == ["-n", "7", "--nodes", "x"]
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(37, 6)).astype("float32"), rng.integers(0, 3, 37)
strategy = tfgpu.strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)])
    model.compile(
        keras.optimizers.Adam(0.01, clipnorm=0.5), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
model.fit(x, y, batch_size=8, epochs=2, verbose=0)
place = json.loads(os.environ.get("TF_CONFIG", '{"task": {"index": "alone"}}'))["task"]["index"]
np.savez(f"weights-{place}.npz", *model.get_weights())
print("replicas", strategy.num_replicas_in_sync)
"""
K8S = ["--name", "a", "--image", "i", "--claim", "c", "--gpus-per-worker", "0"]


def tfgpu(*words: str, cwd: Path, timeout: float = 300, **environ: str) -> subprocess.CompletedProcess:
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CONFIG", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-m", "tfgpu", *words],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb", **environ},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none.py", "--epochs", "3"], "There is no script 'none.py'. Give the path of a Python file."),
        (["-n", "0", "here.py"], "--workers must be a whole number of at least 1. Received: 0."),
        (["--ps", "-1", "here.py"], "--ps must be a whole number of at least 0. Received: -1."),
        (
            ["--gpus-per-worker", "-1", "here.py"],
            "--gpus-per-worker must be a whole number of at least 0. Received: -1",
        ),
        (["--startup-timeout", "0", "here.py"], "--startup-timeout must be above 0. Received: 0.0."),
        (["--heartbeat-timeout", "-1", "here.py"], "--heartbeat-timeout must be 0 (never) or more. Received: -1.0."),
        (["--slurm", "--partition", "a b", "here.py"], "--partition must be a name as Slurm shows it"),
        (["--slurm", "--grace-period", "0", "here.py"], "--grace-period must be a whole number from 1 to 65535."),
        (["--kubernetes", "job", *K8S, "--grace-period", "0", "here.py"], "--grace-period must be a whole number"),
        (
            ["--kubernetes", "job", *K8S, "--scheduling-timeout", "-1", "here.py"],
            "--scheduling-timeout must be a whole",
        ),
        (["--kubernetes", "job", *K8S, "--env", "TF_CONFIG=x", "here.py"], "--env must not set TF_CONFIG"),
        (["--kubernetes", "job", *K8S[:-2], "here.py"], "On Kubernetes, --gpus-per-worker is required"),
        (["--kubernetes", "job", *K8S, "--storage-class", "a", "here.py"], "set --claim-size too, or omit it."),
        (["--ssh", "ssh -4", "here.py"], "--ssh is an option of --hosts HOSTS. Add --hosts, or omit --ssh."),
        (["--wait", "here.py"], "--wait is an option of --slurm. Add --slurm, or omit --wait."),
        (["--claim-size", "1Gi", "here.py"], "--claim-size is an option of --kubernetes KIND. Add --kubernetes, or"),
        (["--slurm", "--nodes", "a,b", "here.py"], "--nodes is the number of machines, for --slurm. Received: 'a,b'."),
        (["--slurm", "--kubernetes", "job", "here.py"], "--slurm and --kubernetes cannot be combined."),
        (["--kubernetes", "job", "--name", "a", "here.py"], "Missing: --image"),
        (["--kubernetes", "jop", *K8S, "here.py"], "Unknown kind of manifest 'jop'. Did you mean 'job'?"),
        (["--kubernetes", "job", *K8S, "--label", "team", "here.py"], "A label must be KEY=VALUE. Received: 'team'."),
        (["--kubernetes", "job", *K8S, "--logs", "a", "here.py"], "--logs is not for Kubernetes"),
        (["--env", "NO_SUCH", "here.py"], "--env NO_SUCH: the variable is not set here. Write --env NO_SUCH=VALUE."),
        (["--logs", "a", "--no-logs", "here.py"], "--logs and --no-logs cannot be combined. Give one of them."),
        (["--hosts", "a,b", "-n", "1", "here.py"], "Every node needs a worker. Received: -n 1 and 2 nodes."),
        (["--hosts", "a,,b", "here.py"], "--hosts must be a list of names separated by commas. Received: 'a,,b'."),
        ([], "Missing argument 'SCRIPT'"),
    ],
)
def test_wrong_input_is_one_line_with_code_2(tmp_path, monkeypatch, capsys, words, said):
    (tmp_path / "here.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["launch", *words])
    out, err = capsys.readouterr()
    assert end.value.code == 2 and not out
    (line,) = err.splitlines()
    assert line.startswith("error: ") and said in line
    assert [path.name for path in tmp_path.iterdir()] == ["here.py"]


def test_help_shows_every_flag_with_its_default(tmp_path):
    text = re.sub(r"[\s│]+", " ", tfgpu("launch", "--help-all", cwd=tmp_path).stdout)
    for flag in ("-n", "--ps", "--max-restarts", "--startup-timeout", "--heartbeat-timeout", "--hosts", "--env"):
        assert f"{flag} " in text
    for default in ("[one on each]", "[an equal share]", "[tfgpu-logs/<time>-<script>]", "[as here]", "[default: 60]"):
        assert default in text


def test_kubernetes_prints_manifests_and_slurm_its_batch_file(tmp_path, monkeypatch, capsys):
    (tmp_path / "here.py").write_text("print('hello')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(["launch", "--kubernetes", "job", "-n", "3", *K8S, "--label", "team=x", "here.py", "-v"])
    out, _ = capsys.readouterr()
    assert end.value.code == 0
    manifests = {each["kind"]: each for each in yaml.safe_load_all(out)}
    assert manifests["Job"]["spec"]["completions"] == 3
    assert manifests["Job"]["metadata"]["labels"]["team"] == "x"
    assert "print('hello')" in str(manifests["ConfigMap"]["data"])
    with pytest.raises(SystemExit) as end:
        main(["launch", "--slurm", "--nodes", "2", "-n", "4", "--time", "30", "--dry-run", "here.py"])
    out, _ = capsys.readouterr()
    assert end.value.code == 0 and "#SBATCH --nodes=2\n#SBATCH --ntasks=4\n" in out and "#SBATCH --time=30\n" in out
    assert [path.name for path in tmp_path.iterdir()] == ["here.py"]


@pytest.mark.slow
@pytest.mark.processes
def test_two_processes_learn_what_one_learns(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    own = ["train.py", "-n", "7", "--nodes", "x"]
    together = tfgpu("launch", "-n", "2", "--startup-timeout", "200", *own, cwd=tmp_path)
    assert together.returncode == 0, together.stdout + together.stderr
    assert sorted(line for line in together.stdout.splitlines() if "replicas" in line) == [
        "worker 0| replicas 2",
        "worker 1| replicas 2",
    ]
    (folder,) = (tmp_path / "tfgpu-logs").iterdir()
    assert sorted(path.name for path in folder.iterdir()) == ["worker-0.log", "worker-1.log"]
    alone = tfgpu("launch", "--no-logs", *own, cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    expected = weights(tmp_path / "weights-alone.npz")
    for index in range(2):
        for mine, its in zip(weights(tmp_path / f"weights-{index}.npz"), expected, strict=True):
            np.testing.assert_allclose(mine, its, atol=2e-6)


def weights(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        return [file[name] for name in file.files]


FOREVER = """
import keras
import numpy as np
import tfgpu

class Began(keras.callbacks.Callback):
    every_batch = False
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 1:
            print("began", flush=True)

with tfgpu.strategy().scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((4, 2)), np.ones((4, 1)), epochs=10**6, verbose=0, callbacks=[Began()])
"""


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_leaves_one_line_of_each_worker(tmp_path):
    """The terminal's SIGINT goes to the launcher's group. TensorFlow's start leaves nothing on the screen either."""
    (tmp_path / "train.py").write_text(FOREVER)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TF_C", "FORCE_COLOR"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "tfgpu", "launch", "-n", "2", "--no-logs", "--startup-timeout", "550", "train.py"],
        cwd=tmp_path,
        env={**kept, "PYTHONPATH": str(ROOT), "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        began = [process.stdout.readline() for _ in range(2)]
        os.killpg(process.pid, signal.SIGINT)
        _, err = process.communicate(timeout=550)
    finally:
        process.kill()
    assert process.returncode == 130 and sorted(began) == ["worker 0| began\n", "worker 1| began\n"]
    lines = [line.partition(", line")[0] for line in err.splitlines()]
    assert sorted(line for line in lines if "Interrupted at" in line) == [
        f"worker {at}| Interrupted at train.py" for at in range(2)
    ]
    assert "Traceback" not in err and "Error:" not in err  # TensorFlow logs which collective it aborts


IN_A_COLLECTIVE = """
import json, os, signal, threading, time
import keras
import numpy as np
import tfgpu
from tfgpu.core.workers import ledger

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]

def press():
    # Ctrl-C for the first worker alone, which waits for the other in its fourth step.
    while (wait := ledger.current().wait) is None or wait.plan is None or wait.plan[0] < 3:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

class Third(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 2 and rank == 0:
            threading.Thread(target=press, daemon=True).start()
        while batch == 2 and rank == 1:
            time.sleep(1)

with tfgpu.strategy().scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((64, 2)), np.ones((64, 1)), batch_size=4, verbose=0, callbacks=[Third()])
"""


@pytest.mark.slow
@pytest.mark.processes
def test_ctrl_c_ends_a_worker_that_waits_for_one_that_does_not_end(tmp_path):
    (tmp_path / "train.py").write_text(IN_A_COLLECTIVE)
    done = tfgpu("launch", "-n", "2", "--no-logs", "--startup-timeout", "550", "train.py", cwd=tmp_path)
    assert done.returncode == 130, done.stderr
    assert "worker 0| Interrupted at train.py, line " in done.stderr and "Traceback" not in done.stderr
