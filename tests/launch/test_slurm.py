"""The batch file, what is refused before Slurm is asked, and what Slurm's refusal looks like."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu.errors import InputError, MachineError
from tfgpu.launch.job import Job
from tfgpu.launch.slurm import submission
from tfgpu.launch.slurm.submission import Allocation

ODD = ("--epochs", "3", "a b", "it's", '"q"', "$HOME `id`", "a\\b", "x\ny", "*", "", "-n", "#no", "ü")


def text(tmp_path, *, allocation=None, **fields) -> str:
    job = Job(**{"script": "train.py", "workers": 2, "logs": tmp_path / "logs", **fields})
    return submission.batch_file(job, allocation or Allocation(nodes=2))


def directives(batch: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in batch.splitlines() if line.startswith("#SBATCH")]


def test_the_whole_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    allocation = Allocation(
        nodes=2,
        time="1-12",
        partition="gpu,big",
        account="lab",
        grace_period_s=90,
        options=("--qos=high", "--exclusive"),
    )
    batch = text(
        Path("/shared"),
        allocation=allocation,
        arguments=("--epochs", "3"),
        workers=8,
        gpus_per_worker=1,
        max_restarts=4,
        heartbeat_timeout_s=30.0,
        environment={"NCCL_DEBUG": "INFO"},
    )
    assert (
        batch
        == f"""#!/bin/bash
# Written by `tfgpu launch --slurm`; submit it again with `sbatch`.

#SBATCH --job-name=train
#SBATCH --nodes=2
#SBATCH --ntasks=8
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-task=1
#SBATCH --time=1-12
#SBATCH --partition=gpu,big
#SBATCH --account=lab
#SBATCH --chdir={tmp_path}
#SBATCH --output=/shared/logs/job-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@90
#SBATCH --qos=high
#SBATCH --exclusive

export TFGPU_STARTUP_TIMEOUT=60
export NCCL_DEBUG=INFO

# Starts the tasks with srun, and restarts them after a failure or preemption.
exec {shlex.quote(sys.executable)} -m tfgpu.launch.slurm.batch_job --logs=/shared/logs \\
    --max-restarts=4 --grace-period=90 --heartbeat-timeout=30 \\
    train.py --epochs 3
"""
    )


def test_bash_hands_over_every_argument_and_variable_as_it_was(tmp_path):
    batch = text(tmp_path, script="my script.py", arguments=ODD, environment={"ODD": "a 'b' \"c\" $d\n`e`"})
    show = tmp_path / "show"
    show.write_text(f"#!{sys.executable}\nimport json, os, sys; print(json.dumps([sys.argv, os.environ['ODD']]))\n")
    show.chmod(0o755)
    batch = batch.replace(shlex.quote(sys.executable), str(show))
    done = subprocess.run(["bash", "-c", batch], capture_output=True, text=True, timeout=550, check=True)
    words, variable = json.loads(done.stdout)
    assert words[-len(ODD) - 1 :] == ["my script.py", *ODD]
    assert variable == "a 'b' \"c\" $d\n`e`"


@pytest.mark.parametrize("checker", [["bash", "-n"], ["shellcheck"]], ids=lambda each: each[0])
def test_a_shell_checker_finds_nothing(tmp_path, checker):
    if not shutil.which(checker[0]):
        pytest.skip(f"no {checker[0]}")
    file = tmp_path / "batch.sh"
    file.write_text(text(tmp_path / "a folder", arguments=("a b", "it's"), environment={"A": "b c"}))
    for script in (file, Path(__file__).with_name("slurm_cluster.sh")):
        done = subprocess.run([*checker, script], capture_output=True, text=True, timeout=550)
        assert done.returncode == 0, done.stdout + done.stderr


def test_paths_are_quoted_for_sbatch_and_percent_signs_are_kept(tmp_path):
    lines = directives(text(tmp_path / "it's 100% #1"))
    assert f'--output="{tmp_path}/it\'s 100%% #1/logs/job-%j.log"' in lines
    lines = directives(text(tmp_path / 'a "b"'))
    assert f"--output='{tmp_path}/a \"b\"/logs/job-%j.log'" in lines


def test_tasks_and_gpus(tmp_path):
    uneven = directives(text(tmp_path, workers=5))
    assert "--ntasks=5" in uneven and not [line for line in uneven if "ntasks-per-node" in line]
    servers = text(tmp_path, workers=2, parameter_servers=1)
    assert "--ntasks=4" in directives(servers), "a chief, two workers and a parameter server"
    assert "export TFGPU_PARAMETER_SERVERS=1" in servers
    assert "export CUDA_VISIBLE_DEVICES=''" in text(tmp_path, gpus_per_worker=0)
    assert "--gpus" not in text(tmp_path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"nodes": 0}, "`nodes` must be a whole number from 1 to 65535"),
        ({"nodes": True}, "`nodes`"),
        ({"nodes": "2"}, "`nodes`"),
        ({"grace_period_s": 0}, "`grace_period_s`"),
        ({"grace_period_s": 1.5}, "`grace_period_s`"),
        ({"partition": "a b"}, "`partition` must be a name"),
        ({"partition": ""}, "`partition` must be a name"),
        ({"account": "lab; rm"}, "`account` must be a name"),
        ({"options": ("-C a100",)}, "long form"),
        ({"options": ("qos=high",)}, "long form"),
        ({"options": ("--comment=a\nb",)}, "long form"),
        ({"options": ("--output=x",)}, "Use --logs"),
        ({"options": ("--array=1-3",)}, "Submit one job per run"),
        ({"options": ("--no-requeue",)}, "requeued"),
        ({"time": "10", "options": ("--time=20",)}, "given twice"),
    ],
)
def test_what_is_refused_before_slurm_is_asked(fields, words):
    with pytest.raises(InputError) as caught:
        Allocation(**fields)
    assert words in str(caught.value)


def test_what_a_batch_file_cannot_hold(tmp_path, monkeypatch):
    with pytest.raises(InputError, match="--logs DIR"):
        text(tmp_path, logs=None)
    with pytest.raises(InputError, match="Omit --evaluator"):
        text(tmp_path, evaluator=True)
    with pytest.raises(InputError, match="3 nodes need at least as many processes. Received: 2"):
        text(tmp_path, allocation=Allocation(nodes=3))
    with pytest.raises(InputError, match="backslash"):
        text(tmp_path / "a\\b")
    with pytest.raises(InputError, match="both kinds of quotes"):
        text(tmp_path / "a'b\"c")
    with pytest.raises(InputError, match="letters, digits"):
        text(tmp_path, environment={"A-B": "c"})


def test_a_machine_without_sbatch_and_a_missing_script_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job = Job("train.py", workers=2, logs=tmp_path / "logs")
    with pytest.raises(InputError, match="There is no script 'train.py'"):
        submission.submit(job, Allocation(nodes=2))
    (tmp_path / "train.py").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="`sbatch` was not found"):
        submission.submit(job, Allocation(nodes=2))
    assert not (tmp_path / "logs").exists()


def test_a_dry_run_shows_the_file_and_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = []
    job = Job("train.py", workers=2, logs=tmp_path / "logs")
    assert submission.launch(job, Allocation(nodes=2), dry_run=True, say=said.append) == 0
    assert said == [submission.batch_file(job, Allocation(nodes=2)).rstrip("\n")]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("environ", "inside"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0"}, False),  # a batch script
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, True),
        ({"SLURM_JOB_ID": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967290"}, False),  # a shell of salloc
    ],
)
def test_only_a_task_of_an_srun_runs_the_script_itself(monkeypatch, environ, inside):
    for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert submission.in_step() is inside
