"""What `.ci/run` selects: tests of what a change touches, then a share of the rest that rotates with each commit."""

import json
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import turns

FILE = Path(turns.__file__)
TESTS = [f"tests/data/test_cache.py::test_it[{number}]" for number in range(10)]


def pick(tests, paths=(), *, costs=None, budget_s=100, turn=0.0, **how):
    return turns.pick(tests, touched=turns.Touched(paths), costs=costs or {}, budget_s=budget_s, turn=turn, **how)


@pytest.mark.parametrize(
    "path, test, level",
    [
        ("tfgpu/data/cache.py", "tests/data/test_cache.py::test_it", 0),
        ("tfgpu/data/cache.py", "tests/data/test_feed.py::test_it", 1),
        ("tfgpu/data/cache.py", "tests/launch/test_ssh.py::test_it", 2),
        ("tfgpu/parallel/zero/shards.py", "tests/parallel/test_shards.py::test_it", 0),
        ("tfgpu/parallel/zero/shards.py", "tests/parallel/test_zero.py::test_it", 0),
        ("tfgpu/parallel/zero/shards.py", "tests/parallel/test_mesh.py::test_it", 1),
        ("tfgpu/checkpoint/storage.py", "tests/faults/test_kill.py::test_it", 1),
        ("tfgpu/run.py", "tests/test_run.py::test_it", 0),
        ("tfgpu/run.py", "tests/data/test_feed.py::test_it", 2),
        ("tests/data/test_cache.py", "tests/data/test_cache.py::test_it", 0),
        ("tests/data/test_cache.py", "tests/data/test_feed.py::test_it", 2),
        ("tests/faults/conftest.py", "tests/faults/test_kill.py::test_it", 1),
        ("tests/conftest.py", "tests/faults/test_kill.py::test_it", 2),
        ("docs/guides/tuning.md", "tests/test_docs.py::test_code_runs[tuning.md-3]", 0),
        ("docs/guides/tuning.md", "tests/test_docs.py::test_code_runs[data.md-3]", 2),
        ("notebooks/10_tuning.ipynb", "tests/test_notebooks.py::test_notebook_runs[10_tuning]", 0),
        ("setup.cfg", "tests/data/test_cache.py::test_it", 2),
    ],
)
def test_how_near_a_test_is_to_a_change(path, test, level):
    assert turns.Touched([path]).level(test) == level


def test_what_changed_comes_before_its_folder_and_that_before_the_rest():
    near, folder = "tests/launch/test_ssh.py::test_it", "tests/launch/test_local.py::test_it"
    for turn in (0.0, 0.3, 0.9):
        chosen = pick([*TESTS, folder, near], ["tfgpu/launch/ssh.py"], budget_s=100, turn=turn)
        assert chosen[:2] == [near, folder] and len(chosen) == 4


def test_all_tests_of_a_change_run_beyond_the_budget_and_then_no_others():
    others, paths = ["tests/data/test_feed.py::test_it"], ["tfgpu/data/cache.py"]
    assert pick([*TESTS, *others], paths, touched_s=250) == sorted(TESTS, key=turns_order)
    assert pick([*TESTS, *others], paths, budget_s=1000, touched_s=250)[-1:] == others
    assert len(pick([*TESTS, *others], paths, touched_s=100)) == 4


def turns_order(test):
    return zlib.crc32(test.encode()), test


def test_turns_reach_every_test_at_any_stride():
    for stride in (1, 2, 3, 5, 9, 40):
        seen = set()
        for run in range(12):
            chosen = pick(TESTS, turn=turns.position(400 + stride * run))
            assert len(chosen) == 4  # each takes 25 s
            seen |= set(chosen)
        assert seen == set(TESTS), stride


def test_a_budget_is_kept_and_what_is_longer_is_left_out():
    costs = {"tests/data/test_cache.py": 30, TESTS[0]: 101, "tests/data/test_feed.py::test_long": 60}
    assert len(pick(TESTS, costs=costs)) == 3
    assert all(TESTS[0] not in pick(TESTS, costs=costs, turn=turn / 10) for turn in range(10))
    assert turns.cost_s("tests/data/test_feed.py::test_long[x]", costs) == 60
    assert turns.cost_s("tests/data/test_feed.py::test_other", costs) == turns.DEFAULT_COST_S


def test_what_is_touched_runs_whatever_the_turn():
    positions = [turns.position(commits) for commits in range(20)]
    for turn in positions:
        assert {"versions", "fuzzing"} <= {*turns.parts(["setup.cfg", "tfgpu/redact/forms.py"], turn)}
    assert {tuple(turns.parts([], turn)) for turn in positions} == {(part,) for part in turns.PARTS}


def test_a_share_is_one_of_so_many():
    assert {turns.share(4, turns.position(commits)) for commits in range(20)} == {"1/4", "2/4", "3/4", "4/4"}


def test_every_version_is_tried_with_every_share_of_the_tests_when_its_turn_comes():
    due = [turn for turn in map(turns.position, range(1000)) if turns.parts([], turn) == ["versions"]]
    assert len({(turns.share(5, turn, 5), turns.share(4, turn, 25)) for turn in due}) == 5 * 4
    script = (turns.ROOT / ".ci" / "run").read_text()
    assert len(turns.PARTS) == 5 and "turns.py share 5 5)" in script and "turns.py share 4 25)" in script


def test_measured_costs_are_kept_by_function():
    lines = [json.dumps({"test": f"a.py::test_it[{number}]", "slow": True, "cpu_s": number}) for number in (1, 2)]
    fast = json.dumps({"test": "a.py::test_fast", "slow": False, "cpu_s": 1})
    here = "tests/test_turns.py"
    assert turns.keep([*lines, fast], {here: 3, "gone.py::test_it": 2}) == {"a.py::test_it": 1.5, here: 3}


def test_every_part_and_its_paths_are_there():
    for path in {*sum(turns.PARTS.values(), ()), *turns.EQUALITY}:
        assert (turns.ROOT / path).exists(), path
    for part in turns.PARTS:
        assert f"\n{part}() {{" in (turns.ROOT / ".ci" / "run").read_text()


def git(folder, *words):
    who = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def test_a_change_is_held_against_what_has_landed(tmp_path, monkeypatch):
    """In a repository of its own, with a copy of the script."""
    monkeypatch.delenv("TFGPU_CI_BASE", raising=False)
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "turns.py").write_text(FILE.read_text())
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "one", "--date", "2020-01-01T00:00:00")
    git(tmp_path, "checkout", "-q", "-b", "work")
    (tmp_path / "setup.cfg").write_text("")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "two")

    def run(*words):
        command = [sys.executable, tmp_path / ".ci" / "turns.py", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()

    assert "versions" in run("parts") and run("matrix") == [turns.share(24, turns.position(2))]
    assert run("share", "5") == [turns.share(5, turns.position(2))]
    git(tmp_path, "branch", "-f", "main", "work")  # All has landed: the commits of the last day.
    assert "versions" in run("parts")
