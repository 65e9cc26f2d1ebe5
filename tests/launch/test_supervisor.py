"""The restart loop of every engine, and its policy."""

import pytest

from tfgpu.launch import restarts
from tfgpu.launch.restarts import Ending, Restarts, supervise


class Engine:
    """Ends with given codes after given seconds, by a clock of its own."""

    def __init__(self, monkeypatch, *endings, refuses=()):
        self.endings, self.refuses = list(endings), refuses
        self.attempts, self.waits, self._now = [], [], 0.0
        monkeypatch.setattr(restarts.time, "monotonic", lambda: self._now)

    def run(self, attempt):
        self.attempts.append(attempt)
        code, ran_s = self.endings.pop(0)
        self._now += ran_s
        return Ending(code)

    def may_restart(self, ending):
        return ending.code not in self.refuses

    def restart(self, ending, wait_s):
        self.waits.append(wait_s)
        return True


def test_attempts_follow_each_other_until_one_succeeds(monkeypatch):
    engine = Engine(monkeypatch, (1, 3), (137, 3), (0, 3))
    assert supervise(engine, Restarts(most=5)) == Ending(0)
    assert (engine.attempts, engine.waits) == ([1, 2, 3], [1.0, 2.0])


def test_the_back_off_starts_over_after_an_attempt_that_made_progress(monkeypatch):
    engine = Engine(monkeypatch, (1, 3), (1, 3), (1, 3), (1, 700), (1, 3), (0, 3))
    supervise(engine, Restarts(most=9))
    assert engine.waits == [1.0, 2.0, 4.0, 1.0, 2.0]


def test_a_preemption_uses_no_restart_and_waits_only_where_it_comes_at_once(monkeypatch):
    engine = Engine(monkeypatch, (75, 60), (75, 1), (0, 3))
    restarts = Restarts(most=0)
    assert supervise(engine, restarts).code == 0
    assert (engine.waits, restarts.made) == ([0.0, 1.0], 0)


def test_the_policy_ends_it_and_tells_the_engine(monkeypatch):
    engine = Engine(monkeypatch, (1, 3), (9, 3))
    assert supervise(engine, Restarts(most=1)) == Ending(9)
    assert engine.waits == [1.0, None]
    engine = Engine(monkeypatch, (2, 3))
    assert supervise(engine, Restarts(most=5)) == Ending(2)
    assert engine.waits == [None]


def test_an_engine_may_refuse_before_the_policy_is_asked(monkeypatch):
    engine, restarts = Engine(monkeypatch, (1, 3), refuses={1}), Restarts(most=5)
    assert supervise(engine, restarts, first=4) == Ending(1)
    assert (engine.attempts, engine.waits, restarts.made) == ([4], [], 0)


def test_the_back_off_doubles_up_to_a_limit_and_the_restarts_run_out():
    restarts = Restarts(most=7)
    assert [restarts.after(1, ran_s=1) for _ in range(8)] == [1, 2, 4, 8, 16, 30, 30, None]


@pytest.mark.parametrize(("code", "expected"), [(0, None), (2, None), (75, 0.0), (1, 1.0), (124, 1.0), (137, 1.0)])
def test_which_exit_codes_are_restarted(code, expected):
    restarts = Restarts(most=1)
    assert restarts.after(code, ran_s=60) == expected
    assert restarts.made == (expected == 1.0)
