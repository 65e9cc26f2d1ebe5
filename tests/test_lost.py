"""The lost peer is named in TensorFlow's errors."""

import json

import pytest
import tensorflow as tf

from tfgpu.cluster import Cluster
from tfgpu.core.workers.ledger import Ledger
from tfgpu.rendezvous.members import note_lost

UNHEALTHY = (
    "Collective ops is aborted by: Error reported from /job:worker/task:1: The following tasks are unhealthy (stopped "
    "sending heartbeats):\n/job:worker/replica:0/task:1\nThe tasks have crashed."
)
FIRST = "Collective ops is aborted by: Deadline Exceeded\nRPC: /tensorflow.CoordinationService/Heartbeat"
BROKEN = (
    "failed to connect to all addresses\nAdditional GRPC error information from remote target "
    "/job:worker/replica:0/task:1 while calling /tensorflow.WorkerService/RecvBuf:"
)


def cluster(index: int, chief: bool = False) -> Cluster:
    jobs = {"chief": ["a:1"], "worker": ["b:2", "c:3"]} if chief else {"worker": ["a:1", "b:2", "c:3"]}
    place = {"cluster": jobs, "task": {"type": "worker", "index": index}}
    return Cluster.from_environment({"TF_CONFIG": json.dumps(place)})


def notes(error: Exception, facts: Cluster) -> list[str]:
    note_lost(error, facts)
    return getattr(error, "__notes__", [])


@pytest.mark.parametrize(
    ("text", "facts", "who"),
    [
        (UNHEALTHY, cluster(0), "worker 1 (b:2)"),
        (UNHEALTHY, cluster(0, chief=True), "worker 1 (c:3)"),
        (BROKEN, cluster(0), "worker 1 (b:2)"),
        (FIRST, cluster(1), "worker 0 (a:1)"),
        (FIRST, cluster(1, chief=True), "chief (a:1)"),
    ],
)
def test_the_lost_one_is_named(text, facts, who):
    expected = f"{who} no longer answers: it has ended, is stopped, or has lost its network."
    assert notes(tf.errors.UnavailableError(None, None, text), facts) == [expected]


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (RuntimeError(UNHEALTHY), cluster(0)),
        (tf.errors.UnavailableError(None, None, "out of something"), cluster(0)),
        (tf.errors.InvalidArgumentError(None, None, f"Shape mismatch\n{BROKEN}"), cluster(0)),  # a peer that lives
        (tf.errors.UnavailableError(None, None, UNHEALTHY), cluster(1)),  # this process itself
        (tf.errors.UnavailableError(None, None, UNHEALTHY), Cluster.from_environment({})),
    ],
)
def test_other_errors_are_left_alone(error, facts):
    assert notes(error, facts) == []


@pytest.mark.parametrize(("text", "rank", "who"), [(UNHEALTHY, 0, "two"), (FIRST, 1, "one"), (UNHEALTHY, 1, None)])
def test_a_worker_that_is_silent_is_gone_without_asking_it(text, rank, who):
    """The others would wait for its answer until the launcher ends them, and nobody would be named."""
    ledger = Ledger(["one", "two"], [f"/job:worker/replica:0/task:{rank}" for rank in range(2)], rank)
    error = ledger.silent(tf.errors.UnavailableError(None, None, text))
    assert who is None and error is None or str(error).startswith(f"{who} no longer answers")
    assert ledger.silent(tf.errors.UnavailableError(None, None, BROKEN)) is None  # it may have told why it ended
