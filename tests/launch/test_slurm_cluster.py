"""Real jobs on a real Slurm: a controller and two nodes on this machine (`slurm_cluster.sh`)."""

import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfgpu.errors import InputError, MachineError
from tfgpu.launch.slurm import submission, task

sys.path.insert(0, str(Path(__file__).parent))
import slurm_jobs
from slurm_jobs import ROOT, SET_UP, Run

pytestmark = slurm_jobs.MARKS
cluster = slurm_jobs.cluster


def test_to_start_the_cluster_again_changes_nothing(cluster):
    before = {path.name: path.read_text() for path in cluster.glob("*.pid")}
    assert len(before) == 3
    subprocess.run([SET_UP, "start", cluster], check=True, timeout=550)
    assert {path.name: path.read_text() for path in cluster.glob("*.pid")} == before


def test_two_tasks_count_and_the_job_is_done(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 5)
    assert run.wait() == 0
    assert run.facts()["JobState"] == "COMPLETED"
    assert [run.task(rank).count("counted") for rank in range(2)] == [1, 1]
    assert "done." in run.log()


def test_a_secret_reaches_the_tasks_of_every_attempt_and_no_file(cluster, tmp_path):
    tell = "import hashlib, os\nprint(hashlib.sha256(os.environ['HF_TOKEN'].encode()).hexdigest(), flush=True)\n"
    secret = "correct-horse-7731"
    script, given = tell + slurm_jobs.COUNT, {"HF_TOKEN": secret}
    run = Run(tmp_path, tmp_path, 10, 1, 5, 3, script=script, environment=given, job={"max_restarts": 1})
    assert run.wait() == 0
    told = hashlib.sha256(secret.encode()).hexdigest()
    assert [run.task(rank).count(told) for rank in range(2)] == [2, 2]
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and secret in path.read_text(errors="replace")]
    shown = subprocess.run(["scontrol", "write", "batch_script", run.id, "-"], capture_output=True, text=True).stdout
    assert "HF_TOKEN" in shown and secret not in shown


def test_a_task_that_fails_is_started_again_in_the_same_allocation(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 20, 1, 10, 3, job={"max_restarts": 1})
    assert run.wait() == 0
    facts = run.facts()
    assert (facts["JobState"], facts["Restarts"]) == ("COMPLETED", "0")
    assert "task 1 ended first, with exit code 3" in run.log()
    assert "restart 1 of 1" in run.log()
    assert "now" in run.log(), "the last lines of the guilty task are shown"
    failed, again = run.times("now", 1)[0], run.times("from", 1)[1]
    print(f"failure to restart: {again - failed:.1f} s")
    assert again - failed < 60
    assert run.task(0).count("from") == run.task(1).count("from") == 2


def test_the_jobs_exit_code_is_that_of_the_guilty_task(cluster, tmp_path):
    """The other one answers SIGTERM with a 75, and srun answers 137 where a task had to be killed."""
    run = Run(tmp_path, tmp_path, 200, 1, 10, 3)
    assert run.wait() == 3
    assert (run.facts()["JobState"], run.facts()["ExitCode"]) == ("FAILED", "3:0")
    assert "--max-restarts is 0" in run.log()
    assert not run.left_over()


def test_wrong_input_fails_at_once(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 200, 0, 3, 2, job={"max_restarts": 5})
    assert run.wait() == 2
    assert run.task(1).count("from") == 1
    assert "wrong input" in run.log()


@pytest.mark.parametrize(("fault", "code"), [("kill", 137), ("stop", 124)])
def test_a_task_that_is_killed_or_stopped_costs_a_restart(cluster, tmp_path, fault, code):
    run = Run(tmp_path, tmp_path, 20, 1, 10, fault, job={"max_restarts": 1, "heartbeat_timeout_s": 5.0})
    assert run.wait() == 0
    assert f"task 1 ended first, with exit code {code}" in run.log()
    assert run.facts()["Restarts"] == "0"
    assert not run.left_over()


def test_a_task_that_saved_when_asked_to_stop_is_requeued_and_resumes(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 80)
    run.until_counting()
    time.sleep(1)
    subprocess.run(["scancel", "--signal=TERM", run.id], check=True)
    asked = time.time()
    assert run.wait() == 0
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("COMPLETED", "1")
    assert "has saved" in run.log() and "requeued" in run.log()
    assert re.findall(r"from (\d+)", run.task(0))[1] != "0"
    print(f"asked to leave until it counts again: {run.times('from', 0)[1] - asked:.1f} s")


def test_stopping_without_saving_uses_a_restart(cluster, tmp_path):
    script = "import time; print('from at', time.time(), flush=True); time.sleep(1000)"
    run = Run(tmp_path, script=script, job={"max_restarts": 1})
    for start in (1, 2):
        run.until_counting(start)
        subprocess.run(["scancel", "--signal=TERM", run.id], check=True)
    assert run.wait() == 143
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("FAILED", "1")
    assert "all 1 are used" in run.log()


def test_scancel_ends_it_for_good_and_leaves_nothing(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 2000, job={"max_restarts": 5})
    run.until_counting()
    subprocess.run(["scancel", run.id], check=True)
    assert run.wait() != 0
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("CANCELLED", "0")
    assert (tmp_path / "saved-0").exists(), "it saves before it goes"
    assert run.task(0).count("from") == 1
    run.until(lambda: not run.left_over())


def test_an_administrators_requeue(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 60)
    run.until_counting()
    subprocess.run(["scontrol", "requeue", run.id], check=True)
    run.until_counting(2)
    assert run.wait() == 0
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("COMPLETED", "1")


@pytest.mark.parametrize("partition", ["main", "hasty"])
def test_preemption_saves_yields_and_resumes(cluster, tmp_path, partition):
    run = Run(tmp_path, tmp_path, 80, partition=partition, options=("--exclusive",))
    run.until_counting()
    time.sleep(1)
    urgent = [
        "sbatch",
        "--wait",
        "-p",
        "urgent",
        "-N2",
        "--exclusive",
        "-o",
        tmp_path / "urgent",
        "--wrap",
        "date +%s.%N",
    ]
    asked = time.time()
    subprocess.run(urgent, check=True, timeout=550, stdout=subprocess.DEVNULL)
    assert run.wait() == 0
    began = float((tmp_path / "urgent").read_text())
    again = run.times("from", 0)[1]
    print(f"preempted on {partition}: urgent after {began - asked:.1f} s, requeued after {again - asked:.1f} s")
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("COMPLETED", "1")
    assert re.findall(r"from (\d+)", run.task(0))[1] != "0"


def test_preemption_of_a_script_that_saves_nothing_starts_over(cluster, tmp_path):
    script = "import time; print('from at', time.time(), flush=True); time.sleep(8); print('counted')"
    run = Run(tmp_path, script=script, options=("--exclusive",))
    run.until_counting()
    urgent = ["sbatch", "--wait", "-p", "urgent", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "true"]
    subprocess.run(urgent, check=True, timeout=550, stdout=subprocess.DEVNULL)
    assert run.wait() == 0
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("COMPLETED", "1")
    assert "exit code 143" in run.log()
    assert [run.task(rank).count("counted") for rank in range(2)] == [1, 1]


def test_the_time_limit_saves_and_resumes(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 1100, time="2", grace_period_s=30)
    assert run.wait(400) == 0
    assert run.facts()["JobState"] == "COMPLETED"
    assert int(run.facts()["Restarts"]) >= 1
    assert "TIMEOUT" not in run.log() and "DUE TO TIME LIMIT" not in run.log()


def test_a_task_that_does_not_exit_is_killed_after_its_grace_period(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 1000, 1, 3, "deaf", grace_period_s=20, job={"heartbeat_timeout_s": 0})
    run.until(lambda: run.task(1).count("now") == 1)
    subprocess.run(["scancel", "--signal=TERM", run.id], check=True)
    run.until(lambda: "requeued" in run.log())
    subprocess.run(["scancel", run.id], check=True)
    saved, deaf = (task.read(run.logs / f"job-{run.id}" / "records" / "1" / f"{rank}.json") for rank in range(2))
    assert (saved.code, deaf.code) == (75, 137)
    assert deaf.ended - deaf.asked >= 20
    assert run.wait() != 0 and run.facts()["JobState"] == "CANCELLED"
    run.until(lambda: not run.left_over())


def test_a_lost_node_costs_no_restart(cluster, tmp_path):
    run = Run(tmp_path, tmp_path, 100)
    run.until_counting()
    for pid in processes_of_node_2(cluster, run):
        os.kill(pid, signal.SIGKILL)
    run.until(lambda: run.facts()["Restarts"] == "1")
    subprocess.run([SET_UP, "node", cluster, "2"], check=True, timeout=550)
    assert run.wait() == 0
    assert (run.facts()["JobState"], run.facts()["Restarts"]) == ("COMPLETED", "1")
    assert run.log().count("done.") == 1


def processes_of_node_2(cluster: Path, run: Run) -> list[int]:
    """Its slurmd, the managers of its steps, and the tasks."""
    found = {int((cluster / "slurmd-127.0.0.2.pid").read_text())}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (path / "cmdline").read_text(), (path / "environ").read_bytes()
            parent = int(re.search(r"PPid:\s+(\d+)", (path / "status").read_text())[1])
        except OSError:
            continue
        if str(run.folder) in words and b"SLURMD_NODENAME=127.0.0.2" in variables:
            found |= {int(path.name), parent}
    return sorted(found)


def test_slurms_refusal_names_the_file(cluster, tmp_path):
    with pytest.raises(InputError, match=r"rejected .*count it\.sbatch: .*invalid partition"):
        Run(tmp_path, partition="nowhere")
    with pytest.raises(MachineError, match="no longer reports job 4000000: .*Invalid job id"):
        submission.Submitted("4000000", tmp_path, tmp_path).wait()


def test_a_controller_that_is_away_is_named(cluster, tmp_path, monkeypatch):
    away = re.sub(r"SlurmctldPort=\d+", "MessageTimeout=2\nSlurmctldPort=1", (cluster / "slurm.conf").read_text())
    (tmp_path / "slurm.conf").write_text(away)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    with pytest.raises(MachineError, match="Unable to contact slurm controller"):
        Run(tmp_path)


def test_a_task_of_an_srun_submits_nothing(cluster, tmp_path):
    program = (
        "import sys; from pathlib import Path; from tfgpu.launch.slurm.submission import Allocation; "
        "from tfgpu.launch.slurm.submission import launch; "
        "from tfgpu.launch.job import Job; "
        "sys.exit(launch(Job('who.py', workers=2, logs=Path('logs')), Allocation(nodes=2)))"
    )
    command = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode != 0 and "srun tfgpu run SCRIPT" in done.stderr and not (tmp_path / "logs").exists()


def test_the_chiefs_end_ends_the_parameter_servers(cluster, tmp_path):
    script = """
import os, sys, time
print("from at", time.time(), os.environ["TFGPU_PARAMETER_SERVERS"], flush=True)
time.sleep(2 if os.environ["SLURM_PROCID"] == "0" else 1000)
"""
    job = {"workers": 1, "parameter_servers": 1}
    run = Run(tmp_path, script=script, light=True, nodes=1, job=job)
    assert run.wait() == 0
    assert [len(re.findall(r"^from at \S+ 1$", run.task(rank), re.MULTILINE)) for rank in range(3)] == [1, 1, 1]
    assert not run.left_over()
