"""A worker that is stopped (SIGSTOP) in the middle of an epoch is named, and all start again from the checkpoint."""

import json

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize(
    ("heartbeat_timeout_s", "words"),
    [
        (7, "worker 1: no heartbeat for 7 s"),
        # TensorFlow's own limit is shorter: the other worker fails first, and is not to blame.
        (60, "Before that, worker 1 had sent no heartbeat for"),
    ],
)
def test_a_stopped_worker_is_named_and_the_result_is_the_same(
    heartbeat_timeout_s, words, tmp_path, launched, whole, same_bytes
):
    cut = launched(tmp_path / "cut", "stopped", "--max-restarts", "1", "--heartbeat-timeout", str(heartbeat_timeout_s))
    stopped_at, pid = cut.event("stopped", attempt=1, rank=1)
    named_at = cut.said_at(words)
    ended_at = cut.said_at("Attempt 2 starts")
    cut.gone(pid)
    trains_at, _ = cut.event("trains", attempt=2)
    found = cut.finish()
    seconds = {
        "silence": heartbeat_timeout_s,
        "named": round(named_at - stopped_at, 1),
        "ended": round(ended_at - stopped_at, 1),
        "trains again": round(trains_at - stopped_at, 1),
    }
    print(json.dumps(seconds))
    assert same_bytes(whole, found) and cut.begun_at(1) == 0 < cut.begun_at(2)
