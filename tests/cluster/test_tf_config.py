import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError


def read(value) -> Cluster:
    return Cluster.from_environment({"TF_CONFIG": value if isinstance(value, str) else json.dumps(value)})


def config(cluster, task) -> dict:
    return {"cluster": cluster, "task": task}


TWO = {"worker": ["a:2222", "b:2222"]}
FULL = {"chief": ["c:1"], "worker": ["a:1", "b:1"], "ps": ["p:1"]}


@pytest.mark.parametrize(
    ("value", "size", "rank", "is_chief", "is_multi_worker"),
    [
        (config(TWO, {"type": "worker", "index": 0}), 2, 0, True, True),
        (config(TWO, {"type": "worker", "index": 1}), 2, 1, False, True),
        (config(TWO, {"type": "worker", "index": "1"}), 2, 1, False, True),
        (config({"worker": ["a:1"]}, {"type": "worker", "index": 0}), 1, 0, True, False),
        (config(FULL, {"type": "chief", "index": 0}), 3, 0, True, True),
        (config(FULL, {"type": "worker", "index": 0}), 3, 1, False, True),
        (config(FULL, {"type": "worker", "index": 1}), 3, 2, False, True),
        (config(FULL, {"type": "ps", "index": 0}), 3, -1, False, False),
        (config(FULL, {"type": "evaluator", "index": 0}), 3, -1, False, False),
        (config({**TWO, "evaluator": ["e:1"]}, {"type": "evaluator", "index": 0}), 2, -1, False, False),
        (
            config({"master": ["m:1"], "worker": ["a:1"]}, {"type": "master", "index": 0}),
            2,
            0,
            True,
            True,
        ),
        (
            config({"worker": ["[::1]:2222", "[fe80::1]:2222"]}, {"type": "worker", "index": 0}),
            2,
            0,
            True,
            True,
        ),
        # What platforms add beside the two keys that TensorFlow reads.
        (
            {**config(TWO, {"type": "worker", "index": 1, "trial": "1"}), "environment": "cloud", "job": {}},
            2,
            1,
            False,
            True,
        ),
        (
            {**config({**TWO, "ps": []}, {"type": "worker", "index": 1}), "rpc_layer": "grpc"},
            2,
            1,
            False,
            True,
        ),
    ],
)
def test_reads_the_forms_of_the_wild(value, size, rank, is_chief, is_multi_worker):
    cluster = read(value)
    assert (cluster.size, cluster.rank, cluster.is_chief, cluster.is_multi_worker) == (
        size,
        rank,
        is_chief,
        is_multi_worker,
    )
    assert cluster.source == "TF_CONFIG"


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TF_CONFIG": ""},
        {"TF_CONFIG": "  \n"},
        {"TF_CONFIG": "{}"},
        {"TF_CONFIG": '{"cluster": {}, "task": {"type": "worker", "index": 0}}'},
        {"TF_CONFIG": '{"cluster": null}'},
        {"TF_CONFIG": '{"cluster": {"worker": []}}'},
        {"TF_CONFIG": '{"environment": "cloud", "task": {"type": "worker", "index": 0}}'},
    ],
)
def test_no_cluster_is_one_process(environ):
    cluster = Cluster.from_environment(environ)
    assert cluster == Cluster()
    assert (cluster.size, cluster.rank, cluster.is_chief, cluster.is_multi_worker, cluster.source) == (
        1,
        0,
        True,
        False,
        "none",
    )
    assert cluster.tf_config() == "{}"


def test_reads_this_processs_environment(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps(config(TWO, {"type": "worker", "index": 1})))
    assert Cluster.from_environment().rank == 1
    monkeypatch.delenv("TF_CONFIG")
    assert Cluster.from_environment() == Cluster()


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("{", "not JSON"),
        ("worker", "not JSON"),
        ("{'cluster': {}}", "not JSON"),
        ("[" * 100000, "not JSON"),
        ("[]", "must be a JSON object"),
        ("3", "must be a JSON object"),
        ('"worker"', "must be a JSON object"),
        (config(["a:1"], {"type": "worker", "index": 0}), "`cluster` must map jobs to lists"),
        (config("a:1", {"type": "worker", "index": 0}), "`cluster` must map jobs to lists"),
        (config({"worker": "a:1"}, {"type": "worker", "index": 0}), "`cluster.worker` must be a list"),
        (config({"worker": {"0": "a:1"}}, {"type": "worker", "index": 0}), "`cluster.worker` must be a list"),
        (config({"wroker": ["a:1"]}, {"type": "worker", "index": 0}), "Did you mean 'worker'?"),
        ({"cluster": TWO}, "`task` must identify this process"),
        (config(TWO, None), "`task` must identify this process"),
        (config(TWO, ["worker", 0]), "`task` must identify this process"),
        (config(TWO, {"index": 0}), "`task.type` is missing"),
        (config(TWO, {"type": "worker"}), "`task.index` is missing"),
        (config(TWO, {"type": "workers", "index": 0}), "Did you mean 'worker'?"),
        (config(TWO, {"type": ["worker"], "index": 0}), "Unknown task type"),
        (config(TWO, {"type": "worker", "index": 2}), "has only 2"),
        (config(TWO, {"type": "worker", "index": -1}), "whole number of at least 0"),
        (config(TWO, {"type": "worker", "index": "one"}), "whole number of at least 0"),
        (config(TWO, {"type": "worker", "index": ""}), "whole number of at least 0"),
        (config(TWO, {"type": "worker", "index": 1.0}), "whole number of at least 0"),
        (config(TWO, {"type": "worker", "index": True}), "whole number of at least 0"),
        (config(TWO, {"type": "worker", "index": None}), "whole number of at least 0"),
        (config(TWO, {"type": "chief", "index": 0}), "the task is a chief, but `cluster` has none"),
        (config(TWO, {"type": "ps", "index": 0}), "the task is a ps, but `cluster` has none"),
        (config({"chief": ["a:1", "b:1"]}, {"type": "chief", "index": 0}), "must have one chief, got 2"),
        (config({"chief": ["a:1"], "master": ["b:1"]}, {"type": "chief", "index": 0}), "both a `chief`"),
        (config({"worker": ["a:1", "a:1"]}, {"type": "worker", "index": 0}), "'a:1' is listed twice"),
        (config({"worker": ["a:1"], "ps": ["a:1"]}, {"type": "worker", "index": 0}), "is listed twice"),
        (config({"worker": ["a"]}, {"type": "worker", "index": 0}), "'host:port'"),
        (config({"worker": [":1"]}, {"type": "worker", "index": 0}), "'host:port'"),
        (config({"worker": ["a:"]}, {"type": "worker", "index": 0}), "'host:port'"),
        (config({"worker": ["a:http"]}, {"type": "worker", "index": 0}), "'host:port'"),
        (config({"worker": ["grpc://a:1"]}, {"type": "worker", "index": 0}), "without a scheme"),
        (config({"worker": ["fe80::1:2222"]}, {"type": "worker", "index": 0}), "'host:port'"),
        (config({"worker": [2222]}, {"type": "worker", "index": 0}), "'host:port'"),
        (config({"worker": ["a:0"]}, {"type": "worker", "index": 0}), "from 1 to 65535"),
        (config({"worker": ["a:65536"]}, {"type": "worker", "index": 0}), "from 1 to 65535"),
        ({**config(TWO, {"type": "worker", "index": 0}), "rpc_layer": "grpc+verbs"}, "`rpc_layer`"),
    ],
)
def test_a_malformed_value_is_one_line_that_quotes_it_and_shows_a_right_one(value, words):
    text = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(InputError) as caught:
        read(text)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert repr(text)[:1000] in message
    assert '{"cluster": {"worker": ["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}' in message


def test_facts_that_contradict_each_other_are_refused():
    with pytest.raises(InputError, match="expected 1 for worker 1"):
        Cluster(workers=("a:1", "b:1"), rank=0, task_index=1)
    with pytest.raises(InputError, match="has only 2"):
        Cluster(workers=("a:1", "b:1"), rank=2, task_index=2)
    with pytest.raises(InputError, match="one process"):
        Cluster(task_index=3, rank=3)
    with pytest.raises(InputError, match="Unknown task type 'cheif'"):
        Cluster(task_type="cheif")


def test_the_quote_of_a_huge_value_is_cut():
    workers = [f"a{n}:1" for n in range(5000)]
    with pytest.raises(InputError) as caught:
        read(config({"worker": workers}, {"type": "worker", "index": 5000}))
    assert len(str(caught.value)) < 3000


addresses = st.lists(
    st.tuples(st.from_regex(r"[a-z][a-z0-9.-]{0,8}", fullmatch=True), st.integers(1, 65535)).map(
        lambda pair: f"{pair[0]}:{pair[1]}"
    ),
    unique=True,
    min_size=1,
    max_size=9,
)


@st.composite
def clusters(draw):
    pool = draw(addresses)
    cuts = sorted(draw(st.lists(st.integers(0, len(pool)), min_size=2, max_size=2)))
    jobs = {"worker": pool[: cuts[0]], "ps": pool[cuts[0] : cuts[1]], "evaluator": pool[cuts[1] :]}
    if jobs["worker"] and draw(st.booleans()):
        jobs["chief"] = [jobs["worker"].pop()]
    task_type = draw(st.sampled_from([name for name in jobs if jobs[name]]))
    return config(jobs, {"type": task_type, "index": draw(st.integers(0, len(jobs[task_type]) - 1))})


@given(clusters())
def test_every_right_value_is_read_and_written_back(value):
    cluster = read(value)
    jobs, task = value["cluster"], value["task"]
    assert cluster.workers == tuple(jobs.get("chief", []) + jobs["worker"])
    if task["type"] in ("chief", "worker"):
        assert cluster.workers[cluster.rank] == jobs[task["type"]][task["index"]]
    else:
        assert cluster.rank == -1
    assert read(cluster.tf_config()) == cluster


@given(clusters())
def test_the_processes_of_one_job_agree_on_it_and_have_one_chief(value):
    jobs = value["cluster"]
    members = [read(config(jobs, {"type": name, "index": index})) for name in jobs for index in range(len(jobs[name]))]
    assert len({(m.workers, m.parameter_servers, m.evaluators, m.has_chief) for m in members}) == 1
    assert sorted(m.rank for m in members if m.rank >= 0) == list(range(len(members[0].workers)))
    assert sum(m.is_chief for m in members) == (1 if members[0].workers else 0)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("a:1"),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["cluster", "task", "worker", "type", "index", "ps"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.text() | anything.map(json.dumps))
def test_any_value_is_read_or_refused_in_one_line(text):
    try:
        assert read(text).size >= 1
    except InputError as error:
        assert "\n" not in str(error) and "TF_CONFIG" in str(error)


def test_the_module_starts_no_tensorflow():
    code = "import sys, tfgpu.cluster; print('tensorflow' in sys.modules or 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550, check=True)
    assert done.stdout.strip() == "False"
