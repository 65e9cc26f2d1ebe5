"""Unmodified scripts: TensorFlow's multi-worker tutorial, which crashes with stock Keras 3, trains unchanged."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tfgpu import cli, quiet
from tfgpu.errors import InputError
from tfgpu.launch import ending
from tfgpu.run import main, run

TUTORIAL = """
import sys
import numpy as np
import tensorflow as tf

strategy = tf.distribute.MultiWorkerMirroredStrategy()
x = np.random.default_rng(0).normal(size=(60, 4)).astype("float32")
y = (x.sum(1) > 0).astype("int64")
data = tf.data.Dataset.from_tensor_slices((x, y)).repeat().batch(8)
tf.keras.utils.set_random_seed(0)
with strategy.scope():
    model = tf.keras.Sequential([tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(2)])
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(0.1),
        metrics=["accuracy"],
    )
history = model.fit(data, epochs=2, steps_per_epoch=7, verbose=0)
print(sys.argv[1], __name__, history.history["loss"])
"""


def environ(**changes):
    return {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", **changes}


@pytest.mark.slow
@pytest.mark.processes
def test_the_multi_worker_tutorial_trains_as_printed(tmp_path, addresses):
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    workers = addresses(2)
    places = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": i}} for i in range(2)]
    command = [sys.executable, "-m", "tfgpu.run", "tutorial.py", "argument"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    processes = [
        subprocess.Popen(command, env=environ(TF_CONFIG=json.dumps(place)), **pipes) for place in (*places, {})
    ]
    try:
        outputs = [process.communicate(timeout=550) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0, 0], outputs
    said = [out.strip().splitlines()[-1] for out, _ in outputs]
    assert all(line.startswith("argument __main__ [") for line in said)
    losses = [json.loads(line.split("__main__ ")[1]) for line in said]
    assert losses[0] == losses[1] == pytest.approx(losses[2], abs=1e-5)  # the third had no peers


@pytest.mark.slow
def test_the_command_hands_the_script_its_own_flags_and_its_exit_code(tmp_path):
    (tmp_path / "own.py").write_text("import sys\nprint(sys.argv, __name__)\nsys.exit(3)\n")
    command = [sys.executable, "-m", "tfgpu", "run", "own.py", "--epochs", "3", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=550, env=environ())
    assert (done.returncode, done.stdout.strip()) == (3, "['own.py', '--epochs', '3', '--help'] __main__")
    missing = [sys.executable, "-m", "tfgpu", "run", "nothing.py"]
    done = subprocess.run(missing, capture_output=True, text=True, cwd=tmp_path, timeout=550, env=environ())
    assert done.returncode == 2 and "There is no script 'nothing.py'" in done.stderr


def test_a_missing_script_is_named(tmp_path):
    command = [sys.executable, "-m", "tfgpu.run", "nothing.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=550)
    assert done.returncode != 0 and "There is no script 'nothing.py'" in done.stderr


def test_an_option_where_the_script_stands_is_named():
    with pytest.raises(InputError, match="'--dry-run' is not an option of this command"):
        run("--dry-run", ["train.py"])


REPORT = """
import os, sys
has_met = "tfgpu.rendezvous.meeting" in sys.modules
print(sys.argv[1:], os.environ.get("TF_CONFIG"), os.environ.get("CUDA_VISIBLE_DEVICES"), has_met)
"""
STEP = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
    "SLURM_DISTRIBUTION": "cyclic",
}


def step(addresses, index: int) -> dict[str, str]:
    """The variables of `srun -N2 -n2` on two nodes that are this machine, at two ports that are free."""
    port = str(max(10000, int(addresses(1)[0].rpartition(":")[2]) // 2))
    return {**STEP, "SLURM_PROCID": str(index), "TFGPU_HOSTS": "127.0.0.1,127.0.0.1", "TFGPU_PORT": port}


def command(*words, **changes) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=550, env=environ(**changes))


@pytest.mark.slow
@pytest.mark.parametrize("module", [["-m", "tfgpu", "run"], ["-m", "tfgpu.run"]])
def test_the_facts_of_another_launcher_become_tf_config(tmp_path, addresses, module):
    (tmp_path / "report.py").write_text(REPORT)
    facts = {**step(addresses, 1), "TFGPU_PORT": "23456"}
    done = command(*module, "--startup-timeout", "0", str(tmp_path / "report.py"), "--startup-timeout", "x", **facts)
    config = '{"cluster": {"worker": ["127.0.0.1:23456", "127.0.0.1:23457"]}, "task": {"type": "worker", "index": 1}}'
    assert done.stdout.strip() == f"['--startup-timeout', 'x'] {config}  False", done.stderr


@pytest.mark.slow
def test_several_tasks_of_a_node_share_its_gpus(tmp_path):
    (tmp_path / "report.py").write_text(REPORT)
    facts = {**STEP, "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_PROCID": "1"}
    facts |= {"SLURM_LOCALID": "1", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    done = command("-m", "tfgpu.run", "--startup-timeout=0", str(tmp_path / "report.py"), **facts)
    assert "} 2,3 False" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("facts", "attempt"),
    [({}, "1"), ({"SLURM_RESTART_COUNT": "2"}, "3"), ({"SLURM_RESTART_COUNT": "2", "TFGPU_ATTEMPT": "9"}, "9")],
)
def test_slurms_requeues_tell_which_start_it_is(tmp_path, facts, attempt):
    (tmp_path / "report.py").write_text("import os\nprint(os.environ['TFGPU_ATTEMPT'])\n")
    facts = {**STEP, "SLURM_PROCID": "1", "TFGPU_HOSTS": "127.0.0.1,127.0.0.1", **facts}
    done = command("-m", "tfgpu.run", "--startup-timeout=0", str(tmp_path / "report.py"), **facts)
    assert done.stdout.strip() == attempt, done.stderr


@pytest.mark.parametrize("module", [["-m", "tfgpu", "run"], ["-m", "tfgpu.run"]])
def test_a_missing_peer_is_named_before_tensorflow_starts(tmp_path, addresses, module):
    (tmp_path / "report.py").write_text(REPORT)
    config = json.dumps({"cluster": {"worker": addresses(2)}, "task": {"type": "worker", "index": 0}})
    done = command(*module, "--startup-timeout", "1", str(tmp_path / "report.py"), TF_CONFIG=config)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: The processes of the cluster did not connect within 1 s. worker 1 (127.0.0.1")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_exit_codes(tmp_path):
    (tmp_path / "report.py").write_text(REPORT)
    (tmp_path / "input.py").write_text("import tfgpu\nraise tfgpu.InputError('wrong')\n")
    (tmp_path / "other.py").write_text("raise KeyError('x')\n")
    (tmp_path / "preempted.py").write_text("raise SystemExit(75)\n")
    report = str(tmp_path / "report.py")
    assert command("-m", "tfgpu.run").returncode == 2
    bad = command("-m", "tfgpu.run", "--startup-timeout", "soon", report)
    assert bad.returncode == 2 and "Traceback" not in bad.stderr
    assert "--startup-timeout must be" in bad.stderr and "'soon'" in bad.stderr
    malformed = command("-m", "tfgpu.run", report, TF_CONFIG="{")
    assert malformed.returncode == 2 and malformed.stderr.startswith("error: TF_CONFIG is malformed")
    wrong = command("-m", "tfgpu.run", str(tmp_path / "input.py"))
    assert wrong.returncode == 2 and "InputError: wrong" in wrong.stderr and "Traceback" in wrong.stderr
    assert command("-m", "tfgpu.run", str(tmp_path / "other.py")).returncode == 1
    assert command("-m", "tfgpu.run", str(tmp_path / "preempted.py")).returncode == 75


@pytest.mark.slow
def test_a_heartbeat_is_sent_on_request(tmp_path):
    (tmp_path / "report.py").write_text(REPORT)
    done = command("-m", "tfgpu.run", str(tmp_path / "report.py"), TFGPU_HEARTBEAT=str(tmp_path / "heart"))
    assert done.returncode == 0 and (tmp_path / "heart").exists()


@pytest.mark.processes
@pytest.mark.slow
def test_two_tasks_of_slurm_train_together(tmp_path, addresses):
    (tmp_path / "tutorial.py").write_text(TUTORIAL)
    facts = step(addresses, 0)
    words = [sys.executable, "-m", "tfgpu", "run", "--startup-timeout", "100", "tutorial.py", "argument"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": tmp_path}
    processes = [
        subprocess.Popen(words, env=environ(**{**facts, "SLURM_PROCID": str(index)}), **pipes) for index in (0, 1)
    ]
    try:
        outputs = [process.communicate(timeout=550) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [out.strip().splitlines()[-1] for out, _ in outputs]
    assert lines[0] == lines[1] and lines[0].startswith("argument __main__ [")


@pytest.mark.processes
@pytest.mark.slow
def test_a_plain_script_meets_its_peers_too(tmp_path, addresses):
    (tmp_path / "plain.py").write_text("import tfgpu\nprint(tfgpu.strategy().num_replicas_in_sync)\n")
    place = {"cluster": {"worker": addresses(2)}, "task": {"type": "worker", "index": 0}}
    alone = command(str(tmp_path / "plain.py"), TF_CONFIG=json.dumps(place), TFGPU_STARTUP_TIMEOUT="2")
    assert alone.returncode == 1 and "worker 1 (127.0.0.1:" in alone.stderr and "did not answer" in alone.stderr


@pytest.mark.parametrize("how", [["run"], ["profile", "-o", "profiles"]])
@pytest.mark.parametrize(
    ("script", "code", "last"),
    [
        ("import json\njson.loads('{')\n", 1, "json.decoder.JSONDecodeError: Expecting property name"),
        ("def f():\n    return {}['x']\nf()\n", 1, "KeyError: 'x'"),
        ("import tfgpu\nraise tfgpu.InputError('wrong')\n", 2, "tfgpu.errors.InputError: wrong"),
        ("input()\n", 1, "EOFError"),
        ("def f(:\n", 1, "SyntaxError: "),
    ],
)
def test_a_script_that_fails_shows_its_own_lines(how, script, code, last, tmp_path, monkeypatch, capsys):
    """As Python shows them, from the script on; without them an error after hours has no place."""
    (tmp_path / "my script.py").write_text(script)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tfgpu"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    with pytest.raises(SystemExit) as ended:
        cli.main([*how, str(tmp_path / "my script.py")])
    lines = capsys.readouterr().err.strip().splitlines()
    assert ended.value.code == code and (lines[0] == "Traceback (most recent call last):" or "Syntax" in last)
    assert "my script.py" in "".join(lines) and lines[-1].startswith(last)
    assert not any("runpy" in line or "typer" in line for line in lines)


def test_wrong_input_shows_no_lines_of_libraries(tmp_path, monkeypatch, capsys):
    (tmp_path / "asks.py").write_text(
        "import tfgpu\n\ndef ask():\n    tfgpu.data.load('nowhere/', global_batch=8)\nask()\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tfgpu"])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delenv("TFGPU_DEBUG", raising=False)
    assert main(["asks.py"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(", ")[1] for line in lines if line.startswith("  File")] == ["line 5", "line 4"]
    assert lines[-1].startswith("tfgpu.errors.InputError: ") and "nowhere/" in lines[-1]
    monkeypatch.setenv("TFGPU_DEBUG", "1")
    assert main(["asks.py"]) == 2
    assert "raise InputError" in capsys.readouterr().err


def test_an_error_outside_a_script_is_one_line_with_its_type(monkeypatch, capsys):
    def fail(*_, **__):
        raise KeyError("x")

    monkeypatch.setattr(cli, "app", fail)
    monkeypatch.delenv("TFGPU_DEBUG", raising=False)
    with pytest.raises(SystemExit):
        cli.main(["doctor"])
    assert capsys.readouterr().err == "error: KeyError: 'x'. Set TFGPU_DEBUG=1 for a traceback.\n"


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder for a script that runs in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


LONG = "def fit():\n    raise KeyboardInterrupt\n\nfit()\n"


def test_an_error_that_ctrl_c_causes_is_its_one_line(here, capsys):
    """As of a call of TensorFlow, which makes a RuntimeError of it."""
    (here / "long.py").write_text(
        "import os, signal\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt:\n    1 / 0\n"
    )
    assert main(["long.py"]) == 130
    assert capsys.readouterr().err == "Interrupted at long.py, line 5: 1 / 0\n"
    (here / "long.py").write_text("1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(["long.py"])


def test_ctrl_c_that_python_drops_is_raised_again(here, capsys):
    (here / "long.py").write_text(
        "import signal, time\n\nclass Lost:\n    def __del__(self):\n        signal.raise_signal(signal.SIGINT)\n\n"
        "Lost()\nfor _ in range(60_000):\n    time.sleep(0.01)\n"
    )
    assert main(["long.py"]) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("Interrupted at long.py, line ")


IN_C = """
import ctypes, os, signal, threading, time
from tfgpu.launch import ending

library, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
library.pthread_mutex_lock(mutex)

def press():
    while mutex.raw[0] != 2:  # somebody waits for it
        time.sleep(0.001)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=press, daemon=True).start()
try:
    with ending.heeded(lambda: library.pthread_mutex_unlock(mutex)):
        library.pthread_mutex_lock(mutex)
        time.sleep(500)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_ctrl_c_ends_what_waits_in_a_call_that_python_cannot_interrupt():
    command = [sys.executable, "-c", IN_C]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, env=environ())
    assert (done.returncode, done.stdout, done.stderr) == (0, "interrupted\n", "")


WRITES = """
import signal, sys, threading, time
from tfgpu.launch import ending

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
threading.Thread(target=lambda: (time.sleep(float(sys.argv[1])), print("written"))).start()
threading.Timer(0.2, lambda: print("leaves", flush=True)).start()
ending.leave(130)
"""


@pytest.mark.parametrize(("writing_s", "gap_s", "written"), [(1, 0.0002, "written\n"), (500, 0.6, "")])
def test_a_thread_that_writes_is_waited_for_until_a_later_ctrl_c(writing_s, gap_s, written):
    command = [sys.executable, "-c", WRITES, str(writing_s)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environ(), **pipes) as process:
        assert process.stdout.readline() == "leaves\n"
        process.send_signal(signal.SIGINT)
        time.sleep(gap_s)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, written)
    assert err == "Files may still be written. Press Ctrl-C once more to end without them.\n"


def test_two_signals_of_one_ctrl_c_interrupt_once():
    done = []
    with contextlib.suppress(KeyboardInterrupt), ending.heeded(lambda: None):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            done.append("what the script does at its end")
    assert done


def test_ctrl_c_is_one_line_that_names_the_place(here, capsys):
    (here / "long.py").write_text(LONG)
    assert main(["long.py"]) == 130
    out, err = capsys.readouterr()
    assert (out, err) == ("", "Interrupted at long.py, line 2: raise KeyboardInterrupt\n")
    with pytest.raises(SystemExit) as end:
        cli.main(["run", "long.py"])
    assert end.value.code == 130
    assert capsys.readouterr().err == "error: Interrupted at long.py, line 2: raise KeyboardInterrupt\n"


NOISE = (
    "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n"
    "I0000 00:00:1795673769.524377   18090 port.cc:153] oneDNN custom operations are on.\n"
    "To enable the following instructions: AVX2 FMA, rebuild TensorFlow.\n"
    "E0000 00:00:1795673809.448251   18090 cuda_platform.cc:52] failed call to cuInit: INTERNAL: CUDA error\n"
    "2026-11-29 08:36:33.1: I tensorflow/core/port.cc:153] oneDNN custom operations are on.\n"  # TensorFlow 2.20
    "2026-11-29 08:36:33.1: E external/local_xla/cuda_platform.cc:51] failed call to cuInit: INTERNAL: CUDA error\n"
    "W0000 00:00:1795673769.524377   18090 computation_placer.cc:177] computation placer already registered.\n"
    "2026-11-29 08:42:13.3: E external/local_xla/cuda_fft.cc:485] Unable to register cuFFT factory: Attempting\n"
)
WARNINGS = "W0000 00:00:1.0 1 gpu_device.cc:1] Cannot dlopen.\n2026-11-29 08:42:1.2: E gpu_device.cc:1] No dlopen.\n"


def test_start_up_messages_are_hidden_and_others_stay(monkeypatch, capfd):
    monkeypatch.delenv(quiet.LEVEL)
    with quiet.starting():
        os.write(2, (NOISE + WARNINGS).encode())
        assert os.environ[quiet.LEVEL] == "1"
    assert capfd.readouterr().err == WARNINGS
    with quiet.starting():  # set by now; only 0 asks for them
        os.write(2, NOISE.encode())
    assert capfd.readouterr().err == ""
    monkeypatch.setenv(quiet.LEVEL, "0")
    with quiet.starting():
        os.write(2, NOISE.encode())
    assert capfd.readouterr().err == NOISE
    monkeypatch.delenv(quiet.LEVEL)
    with pytest.raises(ImportError), quiet.starting():
        os.write(2, NOISE.encode())
        raise ImportError
    assert capfd.readouterr().err == NOISE


@pytest.mark.slow
def test_a_script_that_trains_has_a_clean_screen(tmp_path):
    (tmp_path / "train.py").write_text(
        "import keras, numpy as np\nmodel = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])\n"
        "model.compile('sgd', 'mse')\nmodel.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)\nprint('trained')\n"
    )
    clean = {name: value for name, value in environ().items() if name != quiet.LEVEL}
    command = [sys.executable, "-m", "tfgpu", "run", "train.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=550, env=clean)
    assert (done.returncode, done.stdout, done.stderr) == (0, "trained\n", "")
