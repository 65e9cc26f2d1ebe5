"""The bundle contains all facts and no secrets, on a machine with secrets in many places."""

import json
import os
import stat
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from tfgpu.doctor import bundle, judge, script
from tfgpu.doctor.check import Check
from tfgpu.errors import InputError
from tfgpu.redact import Cleaner

SECRETS = {"WANDB_API_KEY": "b3f1c09f2a7e4d5580aa", "HF_TOKEN": "hf_Zq81LkPw02mNcVx77Rt"}
# In the form of the beginning of `nvidia-smi -q`, made up.
NVIDIA_SMI = """\
==============NVSMI LOG==============

Timestamp                                 : Tue Oct  8 10:11:12 2024
Driver Version                            : 550.127.05
CUDA Version                              : 12.4

Attached GPUs                             : 1
GPU 00000000:3B:00.0
    Product Name                          : NVIDIA H100 80GB HBM3
    Persistence Mode                      : Enabled
    MIG Mode
        Current                           : Disabled
    ECC Errors
        Volatile
            SRAM Uncorrectable Parity     : 0
"""


@pytest.fixture
def machine(tmp_path):
    """An environment with secrets, an `nvidia-smi`, and a run that has logged the secrets."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/nvidia-smi"
    (tmp_path / "recorded").write_text(NVIDIA_SMI)
    program.write_text(f'#!/bin/sh\n[ "$1" = -q ] || exit 9\ncat {tmp_path}/recorded\n')
    program.chmod(0o755)
    run = tmp_path / "runs/best"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text(
        "model: resnet\nepochs: 3\nmodel_options:\n  api_key: |\n    a secret of\n    two lines\n"
        f"data: csv:runs/best-{SECRETS['WANDB_API_KEY']}\n"
    )
    (run / "metrics.csv").write_text("epoch,loss\n1,0.5\n")
    (run / "model.keras").write_bytes(b"large")
    lines = "".join(f"step {index}\n" for index in range(60_000))
    (run / "worker-0.log").write_text(f"{lines}login as {SECRETS['HF_TOKEN']} in /home/ada/x by ada\nlast line\n")
    environ = {**SECRETS, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "TF_CONFIG": "{}", "MY_THING": "unseen"}
    environ |= {"NVIDIA_API_KEY": "1a2b3c4d", "NCCL_NET_URL": "https://me:swordfish@host", "SLURM_JOB_USER": "ada"}
    return environ, run


def unpacked(path: Path) -> dict[str, str]:
    with zipfile.ZipFile(path) as archive:
        return {name.removeprefix("tfgpu-doctor/"): archive.read(name).decode() for name in archive.namelist()}


def test_everything_but_the_secrets_is_included(machine, facts, tmp_path):
    environ, run = machine
    facts["tensorflow"]["loading"]["log"] = "Cannot dlopen some GPU libraries"
    facts["xid"]["lines"] = [{"gpu": "PCI:0000:3b:00", "number": 79, "text": "GPU has fallen off the bus."}]
    checks = judge(facts, environ)
    cleaner = Cleaner(environ, user="ada", home="/home/ada", host="analytical")
    path = bundle.write(tmp_path / "it.zip", checks, facts, environ=environ, run=run, cleaner=cleaner)
    texts = unpacked(path)
    assert {name for name in texts if not name.startswith("cpu")} == {
        *("doctor.json", "facts.json", "versions.txt", "system.txt", "environment.txt", "tensorflow.log"),
        *("nvidia-smi.txt", "xid.txt", "run/config.yaml", "run/metrics.csv", "run/worker-0.log", "left-out.txt"),
    }
    everything = "\n".join(texts.values())
    assert not [value for value in (*SECRETS.values(), "two lines", "1a2b3c4d", "swordfish") if value in everything]
    assert "unseen" not in everything and "/home/ada" not in everything and " ada\n" not in everything
    assert [each["name"] for each in json.loads(texts["doctor.json"])] == [check.name for check in checks]
    assert json.loads(texts["facts.json"])["machine"]["cores"] == 16
    assert texts["nvidia-smi.txt"] == NVIDIA_SMI and texts["run/metrics.csv"] == "epoch,loss\n1,0.5\n"
    assert "keras==" in texts["versions.txt"] and texts["tensorflow.log"] == "Cannot dlopen some GPU libraries"
    assert texts["xid.txt"] == "Xid 79 (PCI:0000:3b:00): GPU has fallen off the bus."
    assert "NVIDIA_API_KEY=<removed>\n" in texts["environment.txt"] and "TF_CONFIG={}" in texts["environment.txt"]
    assert texts["run/worker-0.log"].endswith("in ~/x by <user>\nlast line\n")
    assert texts["run/worker-0.log"].startswith("step ") and len(texts["run/worker-0.log"]) <= 256 * 1024
    settings = yaml.safe_load(texts["run/config.yaml"])
    assert settings["epochs"] == 3 and settings["model_options"] == {"api_key": "<removed>"}
    left_out = texts["left-out.txt"]
    assert "- environment.txt: the value of NVIDIA_API_KEY\n" in left_out
    assert "- run/worker-0.log: all but its last 256 KiB, of 633 KiB\n" in left_out
    assert "- run/config.yaml: value of a secret variable, 1 time(s)\n" in left_out
    assert "- nvidia-smi-topology.txt: `nvidia-smi topo -m`: the process ended with code 9" in left_out
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and not list(tmp_path.glob(".it*"))


def test_facts_are_an_allow_list(facts, with_gpus, a_gpu):
    with_gpus(a_gpu(), a_gpu())
    facts["machine"]["history"] = facts["history"] = {"of": "the shell"}
    found = bundle.named(facts)
    del facts["history"], facts["machine"]["history"], facts["xid"], facts["tensorflow"]["loading"]
    assert found == facts  # `xid` and what TensorFlow said while loading have files of their own


def test_what_is_missing_is_listed(facts, tmp_path):
    facts["xid"] = {"lines": [], "unread": "Operation not permitted"}
    path = bundle.write(tmp_path / "it.zip", [], facts, environ={"PATH": str(tmp_path)}, run=tmp_path)
    left_out = unpacked(path)["left-out.txt"]
    assert "nvidia-smi.txt: nvidia-smi is not installed" in left_out
    assert "xid.txt: the kernel's log cannot be read: Operation not permitted" in left_out
    assert "run/config.yaml: no such file" in left_out


def test_no_file_is_overwritten(facts, tmp_path):
    (tmp_path / "it.zip").write_text("mine")
    with pytest.raises(InputError, match="it.zip exists. Remove it, or give --output another name"):
        bundle.write(tmp_path / "it.zip", [], facts, environ={})
    assert (tmp_path / "it.zip").read_text() == "mine"
    with pytest.raises(InputError, match="There is no folder"):
        bundle.write(tmp_path / "new.zip", [], facts, environ={}, run=tmp_path / "none")
    with pytest.raises(InputError, match="There is no folder"):
        bundle.write(tmp_path / "none/new.zip", [], facts, environ={})


def test_the_script_runs_nothing_that_was_found(tmp_path):
    evil = "x\ntouch evil; $(touch evil)\r`touch evil`"
    checks = [
        Check("A", "warning", evil, command="export A=1"),
        Check("B", "problem", evil, f"By hand: {evil}"),
        Check("C", "problem", "once more", command="export A=1"),
        Check(evil, "ok", "well"),
    ]
    text = script(checks)
    done = subprocess.run(["sh"], input=text + "echo $A\n", cwd=tmp_path, capture_output=True, text=True, timeout=550)
    assert (done.stdout, done.stderr, list(tmp_path.iterdir())) == ("1\n", "", [])
    assert text.index("problem: B") < text.index("warning: A") and text.count("\nexport A=1") == 1
    assert "Nothing to fix." in script([Check("A", "ok", "well")])
