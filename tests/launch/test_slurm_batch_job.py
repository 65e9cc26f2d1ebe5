"""How an attempt's ending is read from its tasks' records, and what follows."""

import os

import pytest

from tfgpu.launch import restarts
from tfgpu.launch.slurm import batch_job, task
from tfgpu.launch.slurm.batch_job import ending
from tfgpu.launch.slurm.task import Record

GOOD = Record(0, 20.0)


@pytest.mark.parametrize(
    ("records", "step_code", "code", "rank", "asked"),
    [
        ([GOOD, GOOD], 0, 0, None, False),
        # One failed; srun then ended the other, which had a checkpoint to save, or none, or was killed.
        ([Record(75, 11.0, asked=10.1), Record(3, 10.0)], 137, 3, 1, False),
        ([Record(143, 11.0, asked=10.1), Record(3, 10.0)], 3, 3, 1, False),
        ([None, Record(3, 10.0)], 137, 3, 1, False),
        # The first death, not that of the peers which it took along.
        ([Record(1, 10.4), Record(137, 10.0)], 137, 137, 1, False),
        ([Record(1, 10.4), Record(124, 10.0)], 124, 124, 1, False),
        # Wrong input, even where a clock is a little ahead.
        ([Record(1, 9.9), Record(2, 10.0)], 2, 2, 1, False),
        # Asked to leave: one that saved is enough.
        ([Record(75, 12.0, asked=10.0), Record(75, 11.0, asked=10.0)], 0, 75, 1, True),
        ([Record(143, 10.2, asked=10.0), Record(75, 11.0, asked=10.0)], 0, 75, 1, True),
        ([Record(143, 10.2, asked=10.0), Record(137, 70.0, asked=10.0)], 0, 143, 0, True),
        ([Record(75, 10.2, asked=10.0), None], 0, 75, 0, True),
        # Asked to stop while the last lines ran: it still counts as done.
        ([Record(0, 10.2, asked=10.0), GOOD], 0, 0, None, False),
        # One node was asked alone; the other task failed for want of its peer.
        ([Record(75, 10.2, asked=10.0), Record(1, 12.0)], 1, 75, 0, True),
        # Sent to the script alone, not by Slurm.
        ([Record(75, 10.0), Record(143, 10.3, asked=10.1)], 75, 75, 0, False),
        # Lost without a word: srun may even answer 0.
        ([GOOD, None], 0, 137, 1, False),
        ([Record(75, 11.0, asked=10.1), None], 137, 137, 1, False),
        ([None, None], 1, 1, 0, False),
        # srun itself failed.
        ([GOOD, GOOD], 4, 4, None, False),
    ],
)
def test_endings(records, step_code, code, rank, asked):
    found = ending(records, step_code)
    assert (found.code, found.member, found.asked) == (code, rank, asked)


def test_with_parameter_servers_the_chief_decides():
    servers = [Record(0, 10.0), Record(143, 15.0, asked=15.0), Record(143, 15.0, asked=15.0)]
    assert ending(servers, 0, chief_ends=True).code == 0
    assert ending([Record(3, 10.0), *servers[1:]], 3, chief_ends=True).code == 3


def test_an_incomplete_record_is_none(tmp_path):
    record = tmp_path / "0.json"
    assert task.read(record) is None
    for text in ("", '{"code": 3', "[]", '{"code": 3, "other": 1}'):
        record.write_text(text)
        assert task.read(record) is None
    record.write_text('{"code": 3, "ended": 1.5, "asked": null}')
    assert task.read(record) == Record(3, 1.5)


@pytest.mark.parametrize(
    ("answer", "state", "requeues", "preempted"),
    [
        ("JobState=RUNNING Restarts=0 StartTime=2026-11-22T10:15:58 PreemptTime=None", "RUNNING", 0, False),
        ("JobState=RUNNING Restarts=2 StartTime=2026-11-22T10:15:58 PreemptTime=N/A", "RUNNING", 2, False),
        (
            "JobState=RUNNING Restarts=0 StartTime=2026-11-22T10:15:58 PreemptTime=2026-11-22T10:16:03",
            "RUNNING",
            0,
            True,
        ),
        # Preempted in an earlier start.
        (
            "JobState=RUNNING Restarts=1 StartTime=2026-11-22T10:18:00 PreemptTime=2026-11-22T10:16:03",
            "RUNNING",
            1,
            False,
        ),
        ("JobState=COMPLETING Reason=None Restarts=1 StartTime=Unknown", "COMPLETING", 1, False),
        ("", "RUNNING", None, False),  # A controller that is away ends no job.
    ],
)
def test_the_controllers_answers(tmp_path, monkeypatch, answer, state, requeues, preempted):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho 'JobId=7 Requeue=1 {answer} EligibleTime=2026-11-22T10:15:57'\n")
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert batch_job.job_facts("7") == batch_job.Facts(state, requeues, preempted)


def test_srun_gets_the_jobs_cpus_per_task():
    """https://slurm.schedmd.com/srun.html#OPT_cpus-per-task: since 22.05 only SRUN_CPUS_PER_TASK is read."""
    assert batch_job.step_environment({"SLURM_CPUS_PER_TASK": "8"})["SRUN_CPUS_PER_TASK"] == "8"
    mine = {"SLURM_CPUS_PER_TASK": "8", "SRUN_CPUS_PER_TASK": "4"}
    assert batch_job.step_environment(mine)["SRUN_CPUS_PER_TASK"] == "4"
    assert batch_job.step_environment({}) == {}


def test_the_last_lines_of_a_log(tmp_path):
    log = tmp_path / "log"
    assert batch_job.tail(log) == []
    log.write_text("".join(f"line {n}\n" for n in range(10000)))
    assert batch_job.tail(log) == [f"line {n}" for n in range(9980, 10000)]


# Each attempt of two tasks, in which the second fails with the code that `codes` has for it.
SRUN = """#!/bin/sh
for word; do case $word in --records=*) records=${word#--records=};; esac; done
echo "$TFGPU_ATTEMPT" >>attempts
code=$(sed -n "${TFGPU_ATTEMPT}p" codes)
echo '{"code": 0, "ended": 1.0}' >"$records/0.json"
echo "{\\"code\\": $code, \\"ended\\": 2.0}" >"$records/1.json"
exit "$code"
"""


@pytest.fixture
def allocation(tmp_path, monkeypatch):
    """An allocation of job 7 whose Slurm is two scripts, in a folder of its own."""
    for name, text in {"srun": SRUN, "scontrol": "#!/bin/sh\necho 'JobId=7 JobState=RUNNING Restarts=0'\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(batch_job.signal, "signal", lambda *_: None)
    monkeypatch.setattr(batch_job.Allocated, "_wait", lambda self, seconds: None)

    def supervise(*codes, most):
        (tmp_path / "codes").write_text("".join(f"{code}\n" for code in codes))
        return batch_job.Allocated(["train.py"], tmp_path / "logs", max_restarts=most).supervise()

    return supervise


def test_attempts_follow_each_other_with_one_budget_across_requeues(allocation, tmp_path, capsys):
    assert allocation(3, 4, 5, most=2) == 5
    said = capsys.readouterr().out
    assert "restarting in 1 s, restart 1 of 2." in said and "restarting in 2 s, restart 2 of 2." in said
    assert "no restart: all 2 are used." in said
    assert allocation(3, 4, 5, 6, most=2) == 6  # as after a requeue
    assert allocation(3, 4, 5, 6, 0, most=2) == 0
    assert (tmp_path / "attempts").read_text().split() == ["1", "2", "3", "4", "5"]


def test_the_back_off_starts_over_after_progress(allocation, monkeypatch, capsys):
    monkeypatch.setattr(restarts, "PROGRESS_S", 0.0)
    assert allocation(3, 3, 3, 0, most=9) == 0
    assert capsys.readouterr().out.count("restarting in 1 s") == 3
