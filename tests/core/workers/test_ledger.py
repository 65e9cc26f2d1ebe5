"""What a worker reads of the others."""

import json

from tfgpu.compat import coordination
from tfgpu.core.workers.ledger import Ledger
from tfgpu.core.workers.sentences import Event


def test_why_a_worker_has_left_is_named_though_a_short_look_misses_it(monkeypatch):
    left = Event("left `fit` by ValueError", is_failure=True)
    text = json.dumps({"rank": 1, "event": left.as_json()})
    monkeypatch.setattr(coordination, "get", lambda key, seconds=0.001: text if seconds >= 1 else None)
    mine = Ledger(["worker 0", "worker 1"], ["", ""], 0)
    assert mine.news() is None
    mine.ended = 1, Event("ended its script")
    assert mine.news() == ("worker 1", left)
