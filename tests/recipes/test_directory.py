import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from tfgpu.errors import InputError
from tfgpu.recipes import directory, recipe
from tfgpu.recipes.recipe import Recipe

FACTS = {"strategy": "one_device", "versions": {"tfgpu": "0"}}


def contents(path):
    return {one.relative_to(path): one.read_text() for one in path.rglob("*") if one.is_file()}


@pytest.fixture
def finished(tmp_path):
    """A directory with a run, and a file that is not the run's."""
    path = tmp_path / "run"
    with directory.claim(path, Recipe(epochs=5)):
        directory.write_config(path, Recipe(epochs=5), FACTS)
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
        ({}, "contains another run. Add --resume or --overwrite, or use another --output."),
        ({"resume": True, "overwrite": True}, "cannot be combined"),
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
    with pytest.raises(InputError, match="is not empty and contains no tfgpu run"):
        directory.check(tmp_path, **options)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(InputError, match="has no run to resume"):
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
    with directory.claim(finished, Recipe(), overwrite=True) as (_, made):
        assert made == []
    assert [path.name for path in finished.iterdir()] == ["notes.txt"]


def test_a_failure_before_the_first_step_takes_new_folders_back(tmp_path):
    with directory.claim(tmp_path / "runs" / "one", Recipe()) as (path, made):
        directory.write_config(path, Recipe(), {})
        directory.abandon(path, made)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", ["epochs: 3\n", "epochs: 3\nrun: {name: mine}\n", "a: [\n", "run: 1\nother: 2\n"])
def test_a_config_that_no_run_wrote_protects_its_folder(tmp_path, config):
    for name, text in (("config.yaml", config), ("logs/mine.txt", "mine"), ("checkpoints/w.bin", "mine")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = contents(tmp_path)
    with pytest.raises(InputError, match="tfgpu did not write"):
        directory.check(tmp_path, overwrite=True)
    with pytest.raises(InputError, match="tfgpu did not write"), directory.claim(tmp_path, Recipe(), overwrite=True):
        pass
    assert contents(tmp_path) == before


def test_one_directory_has_one_run_at_a_time(finished, tmp_path):
    for path, options in ((finished, {"resume": True}), (finished, {"overwrite": True}), (tmp_path / "new", {})):
        with directory.claim(path, Recipe(), **options):
            code = (
                "import sys; from tfgpu.recipes import directory; from tfgpu.recipes.recipe import Recipe\n"
                f"with directory.claim(sys.argv[1], Recipe(), **{options}): pass"
            )
            done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, timeout=550)
            assert done.returncode and "contains another run, which is still running" in done.stderr
    with directory.claim(tmp_path / "new", Recipe()):  # The lock ends with the run.
        pass


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a folder in which nobody can write")
def test_a_directory_that_cannot_be_made_is_wrong_input():
    with pytest.raises(InputError, match="Cannot write in '/proc/x'"), directory.claim("/proc/x", Recipe()):
        pass


def test_a_path_that_the_system_refuses_is_wrong_input(tmp_path):
    with pytest.raises(InputError, match="name too long"):
        directory.check(tmp_path / ("x" * 300) / "y")


def test_resuming_names_each_setting_that_differs():
    earlier = Recipe(epochs=5)
    directory.check_same(Recipe(epochs=6), earlier, directory="runs/a")
    directory.check_same(Recipe(epochs=5, cache="none", prefetch=3, recompute=True), earlier, directory="runs/a")
    with pytest.raises(InputError, match="`seed` was 0, received 1; `epochs` was 5, received 4"):
        directory.check_same(Recipe(epochs=4, seed=1), earlier, directory="runs/a")


def test_new_directories_have_names_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ThreadPoolExecutor(8) as pool, ExitStack() as held:
        claims = [directory.claim(None, Recipe(model="my.models:small")) for _ in range(8)]
        paths = [path for path, _ in pool.map(held.enter_context, claims)]
    assert len(set(paths)) == 8
    assert all(re.fullmatch(r"runs/\d{8}-\d{6}-my\.models-small(-\d)?", str(path)) for path in paths)


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
