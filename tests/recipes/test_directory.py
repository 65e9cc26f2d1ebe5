import os
import subprocess
from datetime import datetime

import pytest

from tfgpu.errors import InputError
from tfgpu.recipes import directory, recipe
from tfgpu.recipes.recipe import Recipe


@pytest.fixture
def finished(tmp_path):
    """A directory that holds a run, and a file that is not the run's."""
    path = tmp_path / "run"
    directory.prepare(path, resume=False)
    directory.write_config(path, Recipe(epochs=5), {"strategy": "one_device"})
    (path / "checkpoints").mkdir()
    (path / "checkpoints" / "1").write_text("weights")
    (path / "notes.txt").write_text("mine")
    return path


def test_config_repeats_the_run_and_skips_the_facts(finished):
    assert recipe.load(finished / "config.yaml") == Recipe(epochs=5)
    assert "strategy: one_device" in (finished / "config.yaml").read_text()
    assert directory.recorded(finished)["epochs"] == 5


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "holds another run. Add --resume or --overwrite, or give another --output."),
        ({"resume": True, "overwrite": True}, "exclude each other"),
    ],
)
def test_a_directory_with_a_run_is_refused(finished, options, expected):
    with pytest.raises(InputError, match=expected):
        directory.check(finished, **options)


def test_a_run_may_be_resumed_or_overwritten(finished):
    directory.check(finished, resume=True)
    directory.check(finished, overwrite=True)


@pytest.mark.parametrize("options", [{}, {"overwrite": True}])
def test_files_that_are_no_run_are_never_touched(tmp_path, options):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(InputError, match="is not empty and holds no run of tfgpu"):
        directory.check(tmp_path, **options)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(InputError, match="holds no run to resume"):
        directory.check(tmp_path / "new", resume=True)
    with pytest.raises(InputError, match="Add --output DIR"):
        directory.check(None, resume=True)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        directory.check(tmp_path / "file")
    with pytest.raises(InputError, match="Cannot write in"):
        directory.check(tmp_path / "file" / "run")


def test_checking_makes_nothing(tmp_path):
    directory.check(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []


def test_overwriting_removes_the_run_and_nothing_else(finished):
    made = directory.prepare(finished, resume=False)
    directory.settle(finished)
    assert made == []
    assert [path.name for path in finished.iterdir()] == ["notes.txt"]


def test_a_failure_before_the_first_step_brings_the_earlier_run_back(finished):
    before = {path: path.read_text() for path in finished.rglob("*") if path.is_file()}
    made = directory.prepare(finished, resume=False)
    directory.write_config(finished, Recipe(epochs=9), {})
    directory.abandon(finished, made)
    assert {path: path.read_text() for path in finished.rglob("*") if path.is_file()} == before
    assert not (finished / ".replaced").exists()


def test_a_failure_before_the_first_step_takes_new_folders_back(tmp_path):
    made = directory.prepare(tmp_path / "runs" / "one", resume=False)
    directory.write_config(tmp_path / "runs" / "one", Recipe(), {})
    directory.abandon(tmp_path / "runs" / "one", made)
    assert list(tmp_path.iterdir()) == []


def test_resuming_names_each_setting_that_differs():
    earlier = Recipe(epochs=5)
    directory.check_same(Recipe(epochs=6), earlier, directory="runs/a")
    with pytest.raises(InputError, match="`seed` was 0, received 1; `epochs` was 5, received 4"):
        directory.check_same(Recipe(epochs=4, seed=1), earlier, directory="runs/a")


def test_new_directories_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    now = datetime(2024, 1, 2, 3, 4, 5)
    first = directory.fresh(Recipe(model="my.models:small"), now=now)
    assert str(first) == "runs/20240102-030405-my.models-small"
    first.mkdir(parents=True)
    assert str(directory.fresh(Recipe(model="my.models:small"), now=now)) == f"{first}-2"


def test_the_commit_is_recorded_and_changes_are_marked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert directory.git_commit() is None
    author = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
    }
    (tmp_path / "file").write_text("one")
    for words in (
        ["init", "-q"],
        ["add", "file"],
        ["-c", "core.hooksPath=/dev/null", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], check=True, env=os.environ | author)
    commit = directory.git_commit()
    assert len(commit) == 40
    (tmp_path / "file").write_text("two")
    assert directory.git_commit() == f"{commit} (with changes)"
