"""Nothing that others may read holds a secret: batch files, manifests, messages between processes, pages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tfgpu.launch.job import Job
from tfgpu.launch.kubernetes import KINDS, Kubernetes, render
from tfgpu.launch.slurm import submission
from tfgpu.launch.slurm.submission import Allocation
from tfgpu.recipes import report
from tfgpu.rendezvous import facts

SECRET = "correct-horse-7731"
ENVIRONMENT = {"WANDB_API_KEY": SECRET, "NCCL_DEBUG": "INFO"}


def in_bash(batch, **environ):
    head = batch.partition("# Starts the tasks")[0] + 'echo "$WANDB_API_KEY $NCCL_DEBUG"; env\n'
    environ = {"PATH": os.environ["PATH"], **environ}
    return subprocess.run(["bash", "-s"], input=head, env=environ, capture_output=True, text=True, timeout=550)


def test_a_batch_file_takes_secrets_from_the_environment_of_sbatch(tmp_path):
    batch = submission.batch_file(Job("train.py", logs=tmp_path, environment=ENVIRONMENT), Allocation(nodes=1))
    assert SECRET not in batch and "export NCCL_DEBUG=INFO" in batch
    done = in_bash(batch, WANDB_API_KEY=SECRET)
    assert done.stdout.startswith(f"{SECRET} INFO\n") and f"WANDB_API_KEY={SECRET}" in done.stdout
    done = in_bash(batch)
    assert done.returncode and "WANDB_API_KEY: is a secret" in done.stderr and "INFO" not in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_a_manifest_refers_to_a_secret(kind):
    job = Job("/app/train.py", gpus_per_worker=0, environment=ENVIRONMENT)
    text = render(job, Kubernetes(name="digits", image="a/b:1", claim="runs", kind=kind))
    assert SECRET not in text
    listed = {"name": "digits-secrets", "key": "WANDB_API_KEY"}
    assert json.dumps(listed) in json.dumps(list(yaml.safe_load_all(text)))


def test_the_command_line_says_what_to_do_about_secrets(tmp_path):
    (tmp_path / "train.py").write_text("")
    words = [
        "launch",
        "--kubernetes",
        "job",
        "--name",
        "digits",
        "--image",
        "a/b:1",
        "--claim",
        "runs",
        "--gpus-per-worker",
        "0",
    ]
    words += ["--namespace", "team", "--env", "WANDB_API_KEY", "train.py", "--api-key", SECRET]
    done = subprocess.run(
        [sys.executable, "-m", "tfgpu", *words],
        cwd=tmp_path,
        env={**os.environ, **ENVIRONMENT, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=550,
    )
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stderr
    assert "arguments seem to contain a secret" in done.stderr
    made = 'kubectl create secret generic digits-secrets --namespace=team --from-literal=WANDB_API_KEY="$WANDB_API_KEY"'
    assert made in done.stderr


def test_what_processes_tell_each_other_holds_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    told = facts.arguments(["--rank", "0", "--token", "abc", "--note", SECRET])
    assert told == "--rank 0 --token <removed> --note <removed>"
    settings = facts.of_settings({"epochs": 3, "model_options": {"api_key": "abcdef", "widths": [64]}})
    assert settings["recipe: epochs"] == "3" and "abcdef" not in str(settings) and "[64]" in str(settings)


def test_pages_hold_no_secret(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", SECRET)
    shown = {"model_options": "api_key=abcdef, widths=64", "data": "csv:https://me:swordfish@host/x.csv"}
    tested = {"accuracy": 0.9}
    page = report.render(report.Report("mlp", f"with {SECRET}", tested, rows=[{"loss": 0.1}], settings=shown))
    assert not [word for word in (SECRET, "abcdef", "swordfish") if word in page]
    assert "host/x.csv" in page and "<svg" in page
