"""CUDA_VISIBLE_DEVICES: parsed as CUDA does, with a warning if it hides usable GPUs."""

import json

import pytest

from tfgpu.doctor import Check
from tfgpu.doctor.checks.gpus import visible_gpus

H100 = {"name": "NVIDIA H100", "uuid": "GPU-aaaa-1"}
T4 = {"name": "NVIDIA T4", "uuid": "GPU-bbbb-2"}
ONLY = "export CUDA_VISIBLE_DEVICES"


@pytest.mark.parametrize(
    ("value", "shown", "stray"),
    [
        ("0", [0], None),
        ("1,0", [1, 0], None),
        (" 0 , 1 ", [0, 1], None),
        ("", [], None),
        ("-1", [], None),
        ("0,-1,1", [0], None),
        ("2", [], "2"),
        ("0,2,1", [0], "2"),
        ("0;1", [], "0;1"),
        ("gpu0", [], "gpu0"),
        ("0,0", [], "0"),
        ("GPU-bbbb", [1], None),
        ("GPU-aaaa-1,GPU-bbbb-2", [0, 1], None),
        ("GPU-cccc", [], "GPU-cccc"),
        ("GPU-", [], "GPU-"),
        ("0,", [0], ""),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_does(value, shown, stray):
    assert visible_gpus(value, [H100 | {"index": 0}, T4 | {"index": 1}]) == (shown, stray)


@pytest.mark.parametrize(
    ("value", "status", "fix"),
    [
        ("0,1", "ok", ""),
        ("1", "warning", "unset CUDA_VISIBLE_DEVICES  (unless the others are reserved for someone else)"),
        ("MIG-1", "ok", ""),
        ("", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("-1", "warning", "unset CUDA_VISIBLE_DEVICES"),
        ("5", "problem", "export CUDA_VISIBLE_DEVICES=GPU-aaaa-1,GPU-bbbb-2"),
        ("0,7", "problem", "export CUDA_VISIBLE_DEVICES=GPU-aaaa-1,GPU-bbbb-2"),
    ],
)
def test_hidden_gpus_are_told(facts, by_name, with_gpus, value, status, fix):
    named = by_name(with_gpus(H100, T4), CUDA_VISIBLE_DEVICES=value)
    assert (named["CUDA_VISIBLE_DEVICES"].status, named["CUDA_VISIBLE_DEVICES"].fix) == (status, fix)


def two_workers(*hosts) -> str:
    """TF_CONFIG of the first of two workers."""
    workers = [f"{host}:{port}" for port, host in enumerate(hosts, start=2222)]
    return json.dumps({"cluster": {"worker": workers}, "task": {"type": "worker", "index": 0}})


@pytest.mark.parametrize(
    ("environ", "status", "words"),
    [
        ({}, "warning", "'2', shows 1 of 4 GPU(s): GPU 0, 1, 3 stays unused"),
        ({"TFGPU_HEARTBEAT": "/run/heart"}, "ok", "shows 1 of 4 GPU(s), by tfgpu's launcher"),
        ({"TFGPU_HEARTBEAT": "/run/heart", "CUDA_VISIBLE_DEVICES": ""}, "ok", "shows 0 of 4 GPU(s), by tfgpu's"),
        ({"SLURM_JOB_ID": "7"}, "ok", "shows 1 of 4 GPU(s), by Slurm"),
        ({"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": ""}, "warning", "training runs on the CPU"),
        ({"PBS_JOBID": "7.host"}, "ok", "by PBS"),
        ({"TF_CONFIG": two_workers("a", "a")}, "ok", "by the share of one of several workers (TF_CONFIG)"),
        ({"TF_CONFIG": two_workers("a", "b")}, "warning", "GPU 0, 1, 3 stays unused"),
        ({"TF_CONFIG": "{"}, "warning", "GPU 0, 1, 3 stays unused"),
        ({"CUDA_VISIBLE_DEVICES": "GPU-2,GPU-0,GPU-3,GPU-1"}, "ok", "shows 4 of 4 GPU(s)"),
    ],
)
def test_a_variable_that_hides_gpus_is_told_but_where_somebody_shares_them_out(
    environ, status, words, by_name, with_gpus, a_gpu
):
    gpus = [a_gpu(uuid=f"GPU-{index}") for index in range(4)]
    check = by_name(with_gpus(*gpus), **{"CUDA_VISIBLE_DEVICES": "2", **environ})["CUDA_VISIBLE_DEVICES"]
    assert check.status == status and words in check.found and bool(check.fix) == (status != "ok"), check
    assert ("Slurm" in check.fix) == (status == "warning" and not check.command)


@pytest.mark.parametrize("mine", ["0", "GPU-0"])
def test_gpus_that_are_hidden_for_a_reason_stay_hidden(mine, by_name, with_gpus, a_gpu):
    full = a_gpu(uuid="GPU-1", used_bytes=60 * 2**30)
    bad = a_gpu(uuid="GPU-2", ecc={"enabled": True, "corrected": 0, "uncorrected": 3, "pending": True, "failed": False})
    cut = a_gpu(uuid="GPU-3", mig={"enabled": True, "pending": True, "slices": ["MIG-1"]})
    facts = with_gpus(a_gpu(uuid="GPU-0"), full, bad, cut)
    check = by_name(facts, CUDA_VISIBLE_DEVICES=mine)["CUDA_VISIBLE_DEVICES"]
    assert check.status == "ok" and check.found.endswith("shows 1 of 4 GPU(s); the hidden ones are in use or faulty")
    facts = with_gpus(a_gpu(uuid="GPU-0"), full, a_gpu(uuid="GPU-2"))
    check = by_name(facts, CUDA_VISIBLE_DEVICES=mine)["CUDA_VISIBLE_DEVICES"]
    assert (check.status, check.command) == ("warning", f"{ONLY}=GPU-0,GPU-2")
    # What the check of memory advises, this one finds right.
    advised = by_name(facts)["GPU memory"].command
    value = advised.removeprefix(f"{ONLY}=")
    assert value and by_name(facts, CUDA_VISIBLE_DEVICES=value)["CUDA_VISIBLE_DEVICES"].status == "ok"


def test_a_neighbors_gpu_is_neither_blamed_nor_advised(by_name, with_gpus, a_gpu):
    full = {"used_bytes": 60 * 2**30, "processes": [{"pid": 77, "name": "python", "bytes": 59 * 2**30}]}
    facts = with_gpus(a_gpu(uuid="GPU-0"), a_gpu(uuid="GPU-1", **full), a_gpu(uuid="GPU-2"))
    share = {"SLURM_JOB_ID": "7"}
    assert by_name(facts, CUDA_VISIBLE_DEVICES="0", **share)["GPU memory"].status == "ok"
    check = by_name(facts, CUDA_VISIBLE_DEVICES="1", **share)["GPU memory"]
    assert check.command == "" and "ps -o user,etime,args -p 77" in check.fix


def test_a_lost_gpu_stays_hidden(told, facts, by_name):
    facts |= told(GPUS="4", LOST="1")
    check = by_name(facts, CUDA_VISIBLE_DEVICES="3")["CUDA_VISIBLE_DEVICES"]
    assert check.command == f"{ONLY}=GPU-1f0c5a92,GPU-3b6a90c1,GPU-4c51d7e8"
    assert "shows 1 of 3 GPU(s): GPU 0, 2 stays unused" in check.found


def test_hidden_gpus_are_no_fault_of_tensorflow(facts, by_name, with_gpus):
    named = by_name(with_gpus(H100, T4, seen=[]), CUDA_VISIBLE_DEVICES="")
    assert named["GPUs"] == Check("GPUs", "ok", "CUDA_VISIBLE_DEVICES hides all: training runs on the CPU")


@pytest.mark.parametrize(
    ("value", "shown"), [("0,1,2,3", 3), ("3", 1), ("1", 0), ("GPU-4c51", 1), ("1,GPU-3b6a90c1", 1)]
)
def test_numbers_that_cuda_is_shown_count_the_lost_gpu(value, shown, told, facts, by_name):
    facts |= told(GPUS="4", LOST="1")
    assert f"shows {shown} of 3 GPU(s)" in by_name(facts, CUDA_VISIBLE_DEVICES=value)["CUDA_VISIBLE_DEVICES"].found
