"""Clusters from the variables of `mpirun`, by launcher; real launchers if installed."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError

# `mpirun -np 4` of Open MPI 4.1 on two hosts with two slots each, as rank 2 sees it.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "0",
    "OMPI_UNIVERSE_SIZE": "4",
    "PMIX_RANK": "2",
    "PMIX_NAMESPACE": "1321336833",
    "PMIX_HOSTNAME": "b",
    "TFGPU_PORT": "2222",
}
MPICH = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2", "TFGPU_PORT": "2222"}
CRAY = {"PMI_RANK": "2", "PMI_SIZE": "4", "PMI_LOCAL_RANK": "0", "PMI_LOCAL_SIZE": "2", "TFGPU_PORT": "2222"}
MVAPICH = {name.replace("OMPI_", "MV2_"): value for name, value in OPEN_MPI.items() if "PMIX" not in name}
BARE = {"PMI_RANK": "2", "PMI_SIZE": "4", "TFGPU_PORT": "2222"}
PMIX = {"PMIX_RANK": "2", "PMIX_NAMESPACE": "prterun-a-1234@1", "TFGPU_PORT": "2222"}
HERE = {"OMPI_COMM_WORLD_LOCAL_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}


@pytest.mark.parametrize("environ", [OPEN_MPI, MPICH, CRAY, MVAPICH, BARE, PMIX])
@pytest.mark.parametrize("hosts", ["h1:2,h2:2", "h[1-2]:2", "h1,h1,h2,h2"])
def test_hosts_with_slots(environ, hosts):
    cluster = Cluster.from_environment({**environ, "TFGPU_HOSTS": hosts})
    assert cluster.workers == ("h1:2222", "h1:2223", "h2:2224", "h2:2225")
    assert (cluster.rank, cluster.source, cluster.local_rank, cluster.local_size) == (2, "MPI", 0, 2)


def test_hosts_past_the_last_rank_are_left_out():
    assert len(Cluster.from_environment({**OPEN_MPI, "TFGPU_HOSTS": "a:2,b:8,c:2"}).workers) == 4


def test_all_on_one_machine():
    cluster = Cluster.from_environment({**OPEN_MPI, **HERE})
    assert cluster.workers == tuple(f"127.0.0.1:{2222 + rank}" for rank in range(4))
    assert (cluster.local_rank, cluster.local_size) == (2, 4)


def test_the_ports_follow_from_the_job():
    first, second = (
        Cluster.from_environment({**OPEN_MPI, **HERE, "TFGPU_PORT": "", "PMIX_NAMESPACE": name}).workers
        for name in ("1321336833", "1321336834")
    )
    assert first != second and len(set(first)) == 4


@pytest.mark.parametrize(
    "environ",
    [
        {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
        {"PMI_RANK": "0", "PMI_SIZE": "1"},
        {"OMPI_MCA_btl": "^openib", "PMIX_MCA_gds": "hash"},
        {"PMIX_RANK": "0", "SLURM_STEP_NODELIST": "n1", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
    ],
)
def test_one_process(environ):
    assert Cluster.from_environment(environ) == Cluster()


def test_inside_slurms_allocation_the_nodes_are_the_hosts():
    # mpirun starts a helper on each other node by srun: the step is the helpers', of one task a node.
    job = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1"}
    helpers = {"SLURM_STEP_NODELIST": "n[2-3]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    ranks = {"OMPI_COMM_WORLD_RANK": "4", "OMPI_COMM_WORLD_SIZE": "6"}
    cluster = Cluster.from_environment({**OPEN_MPI, **ranks, **job, **helpers})
    assert [address.partition(":")[0] for address in cluster.workers] == ["n1", "n1", "n2", "n2", "n3", "n3"]
    assert (cluster.source, cluster.rank) == ("MPI", 4)
    first = {**OPEN_MPI, **ranks, **job, "OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0"}  # not in a step
    assert Cluster.from_environment(first).workers == cluster.workers


def test_srun_with_pmi_is_slurms():
    step = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_NUM_TASKS": "2"}
    step |= {"SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PROCID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert Cluster.from_environment(step).source == "Slurm"


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [("0,1,2,3", ("0", "1")), ("4,5", ("4",)), ("0", None), ("", None), ("-1", None), (None, None)],
)
def test_the_gpus_of_a_process(visible, gpus):
    environ = {**OPEN_MPI, "TFGPU_HOSTS": "a:2,b:2"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    assert Cluster.from_environment(environ).gpus == gpus


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        (
            OPEN_MPI,
            "process 2 of 4, but the hosts of the others are unknown.*host1:4,host2:4.*mpirun -x TFGPU_HOSTS",
        ),
        (BARE, "the hosts of the others are unknown"),
        (PMIX, "not the number of processes. Set TFGPU_HOSTS"),
        ({**OPEN_MPI, "SLURM_JOB_NODELIST": "n[1-3]"}, "the hosts of the others are unknown"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "4"}, "OMPI_COMM_WORLD_RANK is malformed.*from 0 to 3.*'4'"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "OMPI_COMM_WORLD_SIZE is malformed.*'x'"),
        ({**OPEN_MPI, "TFGPU_HOSTS": "a:2:3"}, "TFGPU_HOSTS is malformed.*'a:2:3'"),
        ({**OPEN_MPI, "TFGPU_HOSTS": "a:0,b:4"}, "TFGPU_HOSTS is malformed.*'a:0"),
        ({**OPEN_MPI, "TFGPU_HOSTS": "a b"}, "TFGPU_HOSTS is malformed"),
        ({**OPEN_MPI, "TFGPU_HOSTS": "a:1"}, "TFGPU_HOSTS has 1 slots for 4 processes"),
        (
            {**OPEN_MPI, "TFGPU_HOSTS": "a:3,b:1"},
            "rank 2 is process 2 of 3 on its host, but MPI says 0 of 2.*--map-by slot",
        ),
    ],
)
def test_missing_and_malformed_values_are_named(environ, words):
    with pytest.raises(InputError, match=words) as caught:
        Cluster.from_environment(environ)
    assert "\n" not in str(caught.value)


PRINT = """
import json
from tfgpu import Cluster

cluster = Cluster.from_environment()
print(json.dumps([cluster.rank, cluster.workers, cluster.source]))
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    "command",
    [
        ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-np", "2"],
        ["mpiexec.hydra", "-n", "2"],
    ],
    ids=["Open MPI", "MPICH"],
)
def test_a_real_mpirun(command, tmp_path):
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not installed (Debian: openmpi-bin, mpich)")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI"))}
    done = subprocess.run(
        [*command, sys.executable, "-c", PRINT], capture_output=True, text=True, timeout=550, cwd=tmp_path, env=environ
    )
    assert done.returncode == 0, done.stderr
    # The launcher may put two processes' lines on one.
    found = sorted(json.loads(line) for line in re.findall(r"\[\d+, \[.*?\], .*?\]", done.stdout))
    assert [rank for rank, _, _ in found] == [0, 1] and found[0][1] == found[1][1]
    assert all(
        source == "MPI" and address.startswith("127.0.0.1:") for _, workers, source in found for address in workers
    )
