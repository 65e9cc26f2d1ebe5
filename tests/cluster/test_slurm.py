"""Clusters from Slurm's variables, as set by `srun`, `sbatch` and `salloc`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError

# `srun -N2 -n3` inside `sbatch`, as a task sees it.
STEP = {
    "SLURM_JOB_ID": "22902023",
    "SLURM_JOB_NODELIST": "gpu[01-02]",
    "SLURM_NODELIST": "gpu[01-02]",
    "SLURM_TASKS_PER_NODE": "2,1",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEPID": "0",
    "SLURM_STEP_NODELIST": "gpu[01-02]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
    "SLURM_LAUNCH_NODE_IPADDR": "10.19.0.68",
    "SLURM_MPI_TYPE": "pmix",
    "TFGPU_PORT": "2222",
}
# In a batch script outside `srun`: the job's tasks are to come, this is none of them.
BATCH = {
    "SLURM_JOB_ID": "8652",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_NODELIST": "n[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
}
# The shell of `salloc` with `use_interactive_step`: a step of one task with a number of its own.
INTERACTIVE = {
    **BATCH,
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NODELIST": "n1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def task(procid: int, node: int, local: int, **changes) -> Cluster:
    place = {"SLURM_PROCID": str(procid), "SLURM_NODEID": str(node), "SLURM_LOCALID": str(local)}
    environ = {**STEP, **place, **{name: value for name, value in changes.items()}}
    return Cluster.from_environment({name: value for name, value in environ.items() if value is not None})


def test_a_task_of_a_step():
    cluster = task(2, 1, 0)
    assert cluster.workers == ("gpu01:2222", "gpu01:2223", "gpu02:2224")
    assert (cluster.rank, cluster.size, cluster.source, cluster.is_chief) == (2, 3, "Slurm", False)
    assert (cluster.local_rank, cluster.local_size) == (0, 1)
    assert (task(1, 0, 1).local_rank, task(1, 0, 1).local_size) == (1, 2)
    assert len({task(p, n, t).workers for p, n, t in ((0, 0, 0), (1, 0, 1), (2, 1, 0))}) == 1


@pytest.mark.parametrize(
    "environ",
    [
        BATCH,
        INTERACTIVE,
        {name: value for name, value in BATCH.items() if name != "SLURM_PROCID"},  # salloc on the login node
        {**BATCH, "SLURM_STEP_NODELIST": "m[1-2]", "SLURM_STEP_NUM_TASKS": "2"},  # sbatch inside another job's step
        {**STEP, "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu01", "SLURM_PROCID": "0"},
        {**STEP, "SLURM_PROCID": "1", "TF_CONFIG": "{}"},
    ],
)
def test_one_process(environ):
    assert Cluster.from_environment(environ) == Cluster()


@pytest.mark.parametrize(
    ("nodes", "counts", "distribution", "expected"),
    [
        ("n[1-2]", "2(x2)", "block", "n1 n1 n2 n2"),
        ("n[1-2]", "2(x2)", "block:cyclic", "n1 n1 n2 n2"),
        ("n[1-2]", "2(x2)", None, "n1 n1 n2 n2"),
        ("n[1-2]", "2(x2)", "cyclic", "n1 n2 n1 n2"),
        ("n[1-2]", "2(x2)", "cyclic:block,Pack", "n1 n2 n1 n2"),
        ("n[1-3]", "3,1,2", "cyclic", "n1 n2 n3 n1 n3 n1"),
        ("n[1-2]", "4(x2)", "plane=2", "n1 n1 n2 n2 n1 n1 n2 n2"),
        ("r[1-2]n[01-02]", "1(x4)", "cyclic", "r1n01 r1n02 r2n01 r2n02"),
        ("n[1-4]", "2(x3),1", "block", "n1 n1 n2 n2 n3 n3 n4"),
    ],
)
def test_where_the_tasks_are(nodes, counts, distribution, expected):
    hosts = expected.split()
    changes = {
        "SLURM_STEP_NODELIST": nodes,
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NUM_TASKS": str(len(hosts)),
        "SLURM_DISTRIBUTION": distribution,
        "SLURM_DIST_PLANESIZE": "2",
    }
    cluster = task(0, 0, 0, **changes)
    assert [address.partition(":")[0] for address in cluster.workers] == hosts
    assert len({address.partition(":")[2] for address in cluster.workers}) == len(hosts)  # nodes may be one machine


def test_without_a_tasks_list_they_are_spread_evenly():
    changes = {"SLURM_STEP_TASKS_PER_NODE": None, "SLURM_TASKS_PER_NODE": None, "SLURM_STEP_NUM_TASKS": "4"}
    assert [address[:5] for address in task(3, 1, 1, **changes).workers] == ["gpu01", "gpu01", "gpu02", "gpu02"]


def ports(environ) -> list[int]:
    return [int(address.rpartition(":")[2]) for address in Cluster.from_environment(environ).workers]


def test_the_ports_follow_from_job_and_step():
    base = {**STEP, "SLURM_PROCID": "0", "TFGPU_PORT": ""}
    found = ports(base)
    assert found == ports(dict(base)) and len(set(found)) == 3
    assert all(10240 <= port < 32768 for port in found)  # below the ephemeral ports
    assert found != ports({**base, "SLURM_STEP_ID": "1"}) != ports({**base, "SLURM_JOB_ID": "22902024"})
    assert ports({**base, "TFGPU_PORT": "5000"}) == [5000, 5001, 5002]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30))
def test_the_tasks_of_a_node_have_ports_of_their_own(counts):
    from tfgpu.cluster.values import FIRST_PORT, ports

    found = ports(FIRST_PORT, counts)
    assert [len(set(each)) for each in found] == counts
    first = [port for each in found for port in each][:16]
    if len(set(counts)) == 1 and counts[0] <= 16 and 16 % counts[0] == 0:
        assert len(set(first)) == len(first)


def test_other_host_names_and_parameter_servers():
    cluster = task(1, 0, 1, TFGPU_HOSTS="10.0.0.[1-2]", TFGPU_PARAMETER_SERVERS="1")
    assert cluster.workers == ("10.0.0.1:2222", "10.0.0.1:2223") and cluster.parameter_servers == ("10.0.0.2:2224",)
    assert (cluster.task_type, cluster.task_index, cluster.has_chief, cluster.rank) == ("worker", 0, True, 1)
    assert task(2, 1, 0, TFGPU_PARAMETER_SERVERS="1").task_type == "ps"
    assert task(0, 0, 0, TFGPU_PARAMETER_SERVERS="1").is_chief


@pytest.mark.parametrize(
    ("local", "changes", "gpus"),
    [
        (0, {}, None),
        # --gpus-per-node=4: every task sees all four.
        (0, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("0", "1")),
        (1, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("2", "3")),
        (1, {"SLURM_GPUS_ON_NODE": "2"}, ("1",)),
        (1, {"SLURM_STEP_GPUS": "6,7"}, ("1",)),
        (1, {"SLURM_STEP_GPUS": "6,7", "CUDA_VISIBLE_DEVICES": "6,7"}, ("7",)),
        (1, {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}, ("1",)),
        (1, {"SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS_PER_TASK": "gres/gpu:a100:2"}, ("2", "3")),
        # Slurm has bound the tasks to their own.
        (1, {"SLURM_GPUS_ON_NODE": "2", "SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, None),
        (1, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "2,3"}, None),
        # One GPU for both, or hidden on purpose.
        (1, {"SLURM_GPUS_ON_NODE": "1", "CUDA_VISIBLE_DEVICES": "0"}, None),
        (1, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}, None),
        (1, {"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "-1"}, None),
    ],
)
def test_the_gpus_of_a_task(local, changes, gpus):
    assert task(local, 0, local, **changes).gpus == gpus


def test_a_task_alone_on_its_node_keeps_all_gpus():
    assert task(2, 1, 0, SLURM_GPUS_ON_NODE="4", CUDA_VISIBLE_DEVICES="0,1,2,3").gpus is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_STEP_NODELIST": "gpu[01-"}, "SLURM_STEP_NODELIST is malformed"),
        ({"SLURM_JOB_NODELIST": "(null)"}, "SLURM_JOB_NODELIST is malformed"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x"}, "'2(x' is not a task count"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x99999999)"}, "is not a task count"),
        ({"SLURM_STEP_TASKS_PER_NODE": "0,3"}, "'0' is not a task count"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2"}, "the number of tasks on each of 2 nodes, 3 in total"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, "the number of tasks on each of 2 nodes, 3 in total"),
        ({"SLURM_STEP_NUM_TASKS": "three"}, "SLURM_STEP_NUM_TASKS is malformed"),
        ({"SLURM_PROCID": "3"}, "from 0 to 2"),
        ({"SLURM_PROCID": "-1"}, "SLURM_PROCID is malformed"),
        ({"SLURM_LOCALID": "1"}, "SLURM_LOCALID contradicts"),
        ({"SLURM_NODEID": "0"}, "SLURM_NODEID contradicts"),
        ({"SLURM_DISTRIBUTION": "cyclic", "SLURM_NODEID": "1", "SLURM_LOCALID": "0"}, "--distribution=block"),
        ({"SLURM_DISTRIBUTION": "arbitrary"}, "--distribution=block"),
        ({"SLURM_DISTRIBUTION": "plane"}, "SLURM_DIST_PLANESIZE is malformed: it is not set"),
        ({"TFGPU_HOSTS": "a,b,c"}, "one host for each of the step's 2 nodes"),
        ({"TFGPU_PORT": "http"}, "TFGPU_PORT is malformed"),
        ({"TFGPU_PORT": "65535"}, "from 1 to 65535"),
        ({"TFGPU_PARAMETER_SERVERS": "2"}, "Start 4 or more"),
    ],
)
def test_a_malformed_value_is_quoted_beside_the_right_form(changes, words):
    with pytest.raises(InputError) as caught:
        task(2, 1, 0, **changes)
    message = str(caught.value)
    assert words in message and "\n" not in message
    assert "Expected" in message or "Start" in message or "got" in message


def test_gpus_per_task_is_quoted():
    with pytest.raises(InputError, match="SLURM_GPUS_PER_TASK is malformed.*'two'"):
        task(1, 0, 1, SLURM_GPUS_ON_NODE="2", SLURM_GPUS_PER_TASK="two")
