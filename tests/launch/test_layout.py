import json

import pytest

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError
from tfgpu.launch.job import Job
from tfgpu.launch.layout import Place, environments, tasks


def spread(nodes, **job):
    found = tasks(Job("train.py", **job), nodes)
    return [[task.name for task in found if task.node == node] for node in range(nodes)]


def shares(job, *places, environ=None):
    found = tasks(job, len(places))
    ports = {task: 10000 + number for number, task in enumerate(found)}
    return {task.name: each for task, each in environments(job, found, places, ports, environ or {}).items()}


@pytest.mark.parametrize(
    ("nodes", "workers", "counts"),
    [(1, 1, [1]), (2, 2, [1, 1]), (2, 3, [2, 1]), (3, 4, [2, 1, 1]), (3, 5, [2, 2, 1]), (4, 8, [2, 2, 2, 2])],
)
def test_neighbors_stay_together_and_the_first_nodes_get_one_more(nodes, workers, counts):
    found = spread(nodes, workers=workers)
    assert [len(names) for names in found] == counts
    assert sum(found, []) == [f"worker {index}" for index in range(workers)]


def test_parameter_servers_bring_a_chief_and_are_spread_over_nodes():
    assert spread(2, workers=2, parameter_servers=3) == [
        ["chief", "worker 0", "ps 0", "ps 2"],
        ["worker 1", "ps 1"],
    ]


def test_a_node_may_have_a_parameter_server_alone():
    assert spread(3, workers=1, parameter_servers=3) == [["chief", "worker 0", "ps 2"], ["ps 0"], ["ps 1"]]
    with pytest.raises(InputError, match="worker or a parameter server. Received: -n 1, --ps 1 and 3 nodes. Use -n 2"):
        tasks(Job("train.py", workers=1, parameter_servers=1), 3)
    found = shares(
        Job("train.py", workers=1, parameter_servers=1), Place("a", "a", 8, ("0", "1")), Place("b", "b", 8, ("0",))
    )
    assert [found[name]["CUDA_VISIBLE_DEVICES"] for name in ("worker 0", "ps 0")] == ["0,1", ""]


def test_an_evaluator_is_outside_the_cluster():
    found = shares(Job("train.py", workers=2, evaluator=True), Place("", "h", 8, ("0", "1")))
    cluster = Cluster.from_environment(found["evaluator"])
    assert (cluster.task_type, cluster.rank, cluster.size) == ("evaluator", -1, 2)
    assert found["evaluator"]["CUDA_VISIBLE_DEVICES"] == ""


def test_more_nodes_than_workers_are_refused():
    with pytest.raises(InputError, match="-n 2 and 3 nodes. Use -n 3 or more"):
        tasks(Job("train.py", workers=2), 3)


def test_every_process_reads_the_same_cluster_and_its_own_place():
    found = shares(Job("train.py", workers=2, parameter_servers=1), Place("a", "10.0.0.1", 4), Place("b", "fe80::2", 4))
    clusters = {name: Cluster.from_environment(each) for name, each in found.items()}
    assert {each.workers for each in clusters.values()} == {("10.0.0.1:10000", "10.0.0.1:10001", "[fe80::2]:10002")}
    assert {each.parameter_servers for each in clusters.values()} == {("10.0.0.1:10003",)}
    assert {name: each.rank for name, each in clusters.items()} == {
        "chief": 0,
        "worker 0": 1,
        "worker 1": 2,
        "ps 0": -1,
    }


def test_without_parameter_servers_worker_0_is_the_chief():
    found = shares(Job("train.py", workers=2), Place("", "127.0.0.1", 8))
    assert json.loads(found["worker 1"]["TF_CONFIG"]) == {
        "cluster": {"worker": ["127.0.0.1:10000", "127.0.0.1:10001"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize(
    ("cpus", "workers", "intra", "inter"), [(8, 2, "4", "4"), (2, 2, "1", "2"), (2, 5, "1", "2"), (9, 2, "4", "4")]
)
def test_cpus_are_shared(cpus, workers, intra, inter):
    for each in shares(Job("train.py", workers=workers), Place("", "h", cpus)).values():
        assert (each["TF_NUM_INTRAOP_THREADS"], each["TF_NUM_INTEROP_THREADS"]) == (intra, inter)


def test_threads_that_the_user_has_set_and_a_lone_process_are_left_alone():
    found = shares(Job("train.py", workers=2), Place("", "h", 8), environ={"TF_NUM_INTRAOP_THREADS": "3"})
    assert "TF_NUM_INTRAOP_THREADS" not in found["worker 0"] and "TF_NUM_INTEROP_THREADS" in found["worker 0"]
    assert shares(Job("train.py"), Place("", "h", 8)) == {"worker 0": {}}


@pytest.mark.parametrize(
    ("gpus", "workers", "size", "expected"),
    [
        ("0123", 2, None, ["0,1", "2,3"]),
        ("01234", 2, None, ["0,1", "2,3"]),
        ("73", 2, None, ["7", "3"]),
        ("0123", 2, 1, ["0", "1"]),
        ("0", 1, None, ["0"]),
        ("01", 3, 0, ["", "", ""]),
        ("", 2, None, [None, None]),
        ("", 2, 0, ["", ""]),
    ],
)
def test_gpus_are_shared_in_order(gpus, workers, size, expected):
    found = shares(Job("train.py", workers=workers, gpus_per_worker=size), Place("", "h", 8, tuple(gpus)))
    assert [found[f"worker {index}"].get("CUDA_VISIBLE_DEVICES") for index in range(workers)] == expected


def test_each_node_shares_its_own_gpus_among_its_workers_alone():
    places = Place("a", "h1", 8, ("0", "1")), Place("b", "h2", 8, ("4",))
    found = shares(Job("train.py", workers=2, parameter_servers=1), *places)
    visible = {name: each["CUDA_VISIBLE_DEVICES"] for name, each in found.items()}
    assert visible == {"chief": "", "worker 0": "0,1", "worker 1": "4", "ps 0": ""}


@pytest.mark.parametrize(
    ("gpus", "workers", "size", "words"),
    [
        ("01", 3, None, "host has 2 GPU.s. for 3 workers.*--gpus-per-worker 0"),
        ("01", 2, 2, "2 workers with --gpus-per-worker 2 need 4"),
        ("", 1, 1, "host has 0 GPU"),
    ],
)
def test_too_few_gpus_are_refused_with_the_fix(gpus, workers, size, words):
    with pytest.raises(InputError, match=words):
        shares(Job("train.py", workers=workers, gpus_per_worker=size), Place("host", "h", 8, tuple(gpus)))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"workers": 0}, "`workers`.*0"),
        ({"workers": 1.0}, "`workers`"),
        ({"workers": True}, "`workers`"),
        ({"parameter_servers": -1}, "`parameter_servers`"),
        ({"max_restarts": -1}, "`max_restarts`"),
        ({"gpus_per_worker": -1}, "`gpus_per_worker`"),
        ({"startup_timeout_s": 0}, "`startup_timeout_s`"),
        ({"startup_timeout_s": float("nan")}, "`startup_timeout_s`"),
        ({"heartbeat_timeout_s": -1}, "`heartbeat_timeout_s`"),
    ],
)
def test_a_job_refuses_numbers_out_of_range(changes, words):
    with pytest.raises(InputError, match=words):
        Job("train.py", **changes)
