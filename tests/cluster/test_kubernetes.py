"""Clusters from the variables of Kubernetes and Kubeflow."""

import json

import pytest

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError

JOB = {
    "KUBERNETES_SERVICE_HOST": "10.96.0.1",
    "KUBERNETES_SERVICE_PORT": "443",
    "HOSTNAME": "digits-1",
    "JOB_COMPLETION_INDEX": "1",
    "TFGPU_WORKERS": "3",
    "TFGPU_JOB_NAME": "digits",
    "TFGPU_SERVICE": "digits-workers",
}
# Kubeflow Trainer v2's torch plugin.
TRAIN_JOB = {
    "JOB_COMPLETION_INDEX": "1",
    "JOBSET_NAME": "digits",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "auto",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "digits-node-0-0.digits",
    "PET_MASTER_PORT": "29400",
}


def tf_job(task_type, index):
    """TF_CONFIG as written by Kubeflow's training operator for a TFJob in the namespace `team`."""
    cluster = {
        "chief": ["digits-chief-0.team.svc:2222"],
        "ps": ["digits-ps-0.team.svc:2222"],
        "worker": ["digits-worker-0.team.svc:2222", "digits-worker-1.team.svc:2222"],
    }
    task = {"type": task_type, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, "environment": "cloud"})}


@pytest.mark.parametrize(
    ("environ", "workers", "rank"),
    [
        (JOB, "digits-0.digits-workers:2222 digits-1.digits-workers:2222 digits-2.digits-workers:2222", 1),
        (
            {**JOB, "TFGPU_WORKERS": "2", "TFGPU_PORT": "5000"},
            "digits-0.digits-workers:5000 digits-1.digits-workers:5000",
            1,
        ),
        (
            {**JOB, "TFGPU_WORKERS": "2", "TFGPU_SERVICE": "w.team.svc.cluster.local", "JOB_COMPLETION_INDEX": "0"},
            "digits-0.w.team.svc.cluster.local:2222 digits-1.w.team.svc.cluster.local:2222",
            0,
        ),
        (TRAIN_JOB, "digits-node-0-0.digits:29400 digits-node-0-1.digits:29400", 1),
        ({**TRAIN_JOB, "TFGPU_PORT": "2222"}, "digits-node-0-0.digits:2222 digits-node-0-1.digits:2222", 1),
        (
            {**TRAIN_JOB, "PET_MASTER_ADDR": "run-7-0-node-0-0.run-7-0", "PET_NODE_RANK": "0"},
            "run-7-0-node-0-0.run-7-0:29400 run-7-0-node-0-1.run-7-0:29400",
            0,
        ),
    ],
)
def test_the_pods_of_a_job(environ, workers, rank):
    cluster = Cluster.from_environment(environ)
    assert (cluster.workers, cluster.rank, cluster.source) == (tuple(workers.split()), rank, "Kubernetes")
    assert cluster.task_index == rank and not cluster.has_chief and cluster.gpus is None


@pytest.mark.parametrize(
    "environ",
    [
        {"KUBERNETES_SERVICE_HOST": "10.96.0.1", "HOSTNAME": "web-7d4b9c"},
        {"JOB_COMPLETION_INDEX": "3"},  # an indexed Job whose pods work apart
        {**JOB, "TFGPU_WORKERS": "1", "JOB_COMPLETION_INDEX": "0"},
        {**TRAIN_JOB, "PET_NNODES": "1", "PET_NODE_RANK": "0"},
        {"PET_NPROC_PER_NODE": "auto"},
    ],
)
def test_one_pod(environ):
    assert Cluster.from_environment(environ) == Cluster()


@pytest.mark.parametrize(
    ("task_type", "index", "rank"),
    [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("ps", 0, -1), ("evaluator", 0, -1)],
)
def test_a_tfjob(task_type, index, rank):
    cluster = Cluster.from_environment({**JOB, **tf_job(task_type, index)})
    assert (cluster.source, cluster.rank, cluster.size) == ("TF_CONFIG", rank, 3)
    assert cluster.workers[0] == "digits-chief-0.team.svc:2222"


def test_a_dynamic_tfjob_is_refused():
    text = (
        '{"sparseCluster": {"worker": {"0": "w-0:2222"}, "ps": ["p-0:2222"]}, "task": {"type": "worker", "index": 0}}'
    )
    with pytest.raises(InputError, match="enableDynamicWorker"):
        Cluster.from_environment({"TF_CONFIG": text})


def test_the_last_pods_may_hold_variables():
    environ = {**JOB, "TFGPU_WORKERS": "4", "TFGPU_PARAMETER_SERVERS": "1"}
    names = [
        (cluster.task_type, cluster.task_index, cluster.rank)
        for index in range(4)
        for cluster in [Cluster.from_environment({**environ, "JOB_COMPLETION_INDEX": str(index)})]
    ]
    assert names == [("chief", 0, 0), ("worker", 0, 1), ("worker", 1, 2), ("ps", 0, -1)]


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({**JOB, "TFGPU_WORKERS": "many"}, "TFGPU_WORKERS is malformed.*'many'"),
        ({**JOB, "TFGPU_WORKERS": "0"}, "TFGPU_WORKERS is malformed.*'0'"),
        ({**JOB, "JOB_COMPLETION_INDEX": "3"}, "from 0 to 2.*'3'"),
        ({**JOB, "JOB_COMPLETION_INDEX": ""}, "completionMode: Indexed"),
        ({**JOB, "TFGPU_SERVICE": ""}, "TFGPU_SERVICE is malformed: it is not set"),
        ({**JOB, "TFGPU_JOB_NAME": "a_b"}, "TFGPU_JOB_NAME is malformed: it must be a DNS name.*'a_b'"),
        ({**JOB, "TFGPU_PORT": "tcp://10.0.0.1:2222"}, "TFGPU_PORT is malformed.*'tcp://10.0.0.1:2222'"),
        ({**TRAIN_JOB, "PET_NNODES": "1:4"}, "PET_NNODES is malformed.*'1:4'"),
        ({**TRAIN_JOB, "PET_NODE_RANK": "2"}, "from 0 to 1.*'2'"),
        (
            {**TRAIN_JOB, "PET_MASTER_ADDR": "192.168.9.6"},
            "PET_MASTER_ADDR is malformed.*'192.168.9.6'.*myjob-node-0-0.myjob",
        ),
        ({**TRAIN_JOB, "PET_MASTER_PORT": "0"}, "PET_MASTER_PORT is malformed"),
    ],
)
def test_a_malformed_value_is_quoted_beside_the_right_form(environ, words):
    with pytest.raises(InputError, match=words) as caught:
        Cluster.from_environment(environ)
    assert "\n" not in str(caught.value)
