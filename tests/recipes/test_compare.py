"""Comparisons of runs: hand-made, damaged, foreign, and two real ones."""

import json
import os
import re
import subprocess
import sys

import pytest
import yaml

from tfgpu.errors import InputError
from tfgpu.recipes.compare import compare, render, text, write

ROWS = "epoch,loss,val_accuracy,val_loss,learning_rate,step_time_s,epoch_time_s\n"
FACTS = {"finished": "2026-01-01T00:00:00", "test_accuracy": 0.75, "test_loss": 0.5, "versions": {"tfgpu": "0.1.0"}}


@pytest.fixture
def made(tmp_path):
    def make(name, rows=("1,2.0,0.5,1.5,0.1,0.01,2.0", "2,1.0,0.9,0.5,0.1,0.03,4.0"), facts=FACTS, **settings):
        folder = tmp_path / name
        folder.mkdir(parents=True)
        config = {"model": "mlp", "global_batch": 32, **settings, "run": facts}
        (folder / "config.yaml").write_text(yaml.safe_dump(config))
        if rows is not None:
            (folder / "metrics.csv").write_text(ROWS + "\n".join(rows) + "\n")
        return folder

    return make


def test_what_differs_and_what_each_came_to(made):
    found = compare([made("a", learning_rate=0.1), made("b", learning_rate=0.2, rows=["1,2.0,0.25,nan,0.2,0.01,2"])])
    assert found.differing == {"learning_rate": [0.1, 0.2]} and found.same == {"model": "mlp", "global_batch": 32}
    first, second = (run.results for run in found.runs)
    assert first["best val_accuracy"] == 0.9 and first["best val_loss"] == 0.5 and first["test_accuracy"] == 0.75
    assert first["step_ms"] == pytest.approx(20) and first["examples/s"] == pytest.approx(1600)
    assert (first["epochs"], first["training_s"]) == (2, 6.0)
    assert "best val_loss" not in second  # a NaN is not the best
    assert json.loads(json.dumps(found.as_json(), allow_nan=False))[1]["rows"][0]["val_loss"] is None


def test_the_best_of_a_column_is_bold(made):
    page = render(compare([made("a"), made("b", rows=["1,3.0,0.5,1.5,0.1,0.01,2.0"])]))
    first, second = re.findall(r"<tr><th><i.*?</tr>", page, re.DOTALL)[:2]
    # validation accuracy and loss are the first's, test accuracy and loss equal, the second is quicker
    assert re.findall(r'class="best">([^<]+)<', first) == ["90.00%", "0.5", "75.00%", "0.5"]
    assert re.findall(r'class="best">([^<]+)<', second) == ["75.00%", "0.5", "10", "3,200"]


def test_damaged_runs_are_reported(made):
    cut = made("cut", rows=["1,2.0,0.5,1.5,0.1,0.01,2.0", "2,1.0,x"])
    running = made("running", facts={"versions": {}}, rows=None)
    broken = made("broken")
    (broken / "config.yaml").write_text("model: [")
    found = compare([cut, running, broken])
    states = {run.name: run.state for run in found.runs}
    assert states["cut"] == "damaged: metrics.csv from line 3" and len(found.runs[0].rows) == 1
    assert states["running"] == "unfinished"
    assert "is not YAML" in states["broken"]
    page = render(found)
    assert all(state.split(":")[0] in page for state in states.values())


def test_names_are_as_long_as_they_must_be(made):
    names = [run.name for run in compare([made("x/run"), made("y/run"), made("y/other")]).runs]
    assert names == ["x/run", "y/run", "y/other"]


def test_names_that_look_the_same_are_numbered(made):
    names = [run.name for run in compare([made("a\x1b/run"), made("a\x07/run")]).runs]
    assert [name[-4:] for name in names] == [" (1)", " (2)"]


LONG = "cifar10-resnet18-with-a-long-name-lr"


@pytest.mark.sample("names2")
@pytest.mark.parametrize(
    "names", [(f"{LONG}0.1", f"{LONG}0.2"), (f"1{LONG}", f"2{LONG}"), (f"{LONG}1{LONG}", f"{LONG}2{LONG}")]
)
def test_the_table_tells_runs_and_columns_apart(made, tmp_path, names):
    words = ["compare", *(str(made(name, epochs=at)) for at, name in enumerate(names))]
    command, wide = [sys.executable, "-m", "tfgpu", *words], {**os.environ, "COLUMNS": "120"}
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550, env=wide)
    head, *lines = ran.stdout.splitlines()
    titles = re.split(r"  +", head.strip())
    assert len(set(titles)) == len(titles) and {"epochs", "epochs done"} <= set(titles), head
    first, second = (re.split(r"  +", line)[0] for line in lines[:2])
    assert first != second and max(len(first), len(second)) <= 24


def test_a_folder_that_is_no_run_ends_the_command(made, tmp_path):
    (tmp_path / "none").mkdir()
    words = ["compare", str(made("a")), "none", "--output", "page.html"]
    ran = subprocess.run(
        [sys.executable, "-m", "tfgpu", *words], cwd=tmp_path, capture_output=True, text=True, timeout=550
    )
    assert ran.returncode == 2 and not ran.stdout and not (tmp_path / "page.html").exists()
    assert ran.stderr.count("\n") == 1 and "Not a tfgpu run: none (no config.yaml)" in ran.stderr


def test_one_run_and_the_same_one_twice(made):
    folder = made("a")
    assert len(compare([folder, folder, str(folder) + "/"]).runs) == 1
    assert "1 run, side by side" in render(compare([folder]))


def test_thirty_runs_have_separate_lines(made):
    page = render(compare([made(f"run{at:02d}", learning_rate=at) for at in range(30)]))
    looks = re.findall(r'<i class="d(\d)" style="border-top-color: ([^"]+)">', page)[:30]
    assert len(set(looks)) == 30
    assert page.count("hsl(212, 62%, 52%)") > 6  # the drawings have the legend's colors
    assert "#fe0000" not in page


def test_untrusted_text_is_escaped(made):
    page = render(compare([made("<script>alert(1)<", model="<img src=x>", note={"<b>": ["<i>"]})]))
    assert "<script>alert" not in page and "<img src=x>" not in page and "<b>" not in page


def test_wrong_paths(tmp_path, made):
    with pytest.raises(InputError, match="There is no directory nowhere"):
        compare(["nowhere"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="Not a tfgpu run: .*empty .no config.yaml.. Pass only directories"):
        compare([made("a"), tmp_path / "empty"])
    (tmp_path / "empty/config.yaml").write_text("model: [")
    with pytest.raises(InputError, match="None of these runs can be read: .*empty. damaged: .*is not YAML"):
        compare([tmp_path / "empty"])
    with pytest.raises(InputError, match="Pass the run directories"):
        compare([])


def test_only_our_own_page_is_replaced(made, tmp_path):
    found, page = compare([made("a")]), tmp_path / "page.html"
    write(found, page)
    before = page.read_text()
    assert write(found, page).read_text() == before
    page.write_text("mine")
    with pytest.raises(InputError, match="exists and was not written by `tfgpu compare`"):
        write(found, page)
    with pytest.raises(InputError, match="Cannot write"):
        write(found, tmp_path / "no" / "page.html")
    assert page.read_text() == "mine" and not list(tmp_path.glob(".*.part"))


@pytest.mark.parametrize(
    ("name", "value", "shown"),
    [("test_accuracy", 0.5, "50.00%"), ("epochs", 3, "3"), ("training_s", 130, "2.2 min"), ("x", None, "-")],
)
def test_results_as_they_are_shown(name, value, shown):
    assert text(name, value) == shown


def test_the_command_starts_no_tensorflow(made, tmp_path):
    words = ["compare", str(made("a", seed=1)), str(made("b", seed=2))]
    command = [sys.executable, "-X", "importtime", "-m", "tfgpu", *words]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=550)
    assert ran.returncode == 0 and "compare.html" in ran.stdout, ran.stderr[-2000:]
    assert (tmp_path / "compare.html").exists() and "tensorflow" not in ran.stderr
    assert "75.00%" in ran.stdout and "seed" in ran.stdout


@pytest.mark.slow
def test_real_runs(tmp_path):
    for seed in (1, 2):
        words = ["train", "--model", "mlp", "--epochs", "2", "--seed", str(seed), "--output", f"run{seed}"]
        subprocess.run([sys.executable, "-m", "tfgpu", *words], cwd=tmp_path, check=True, timeout=550)
    found = compare([tmp_path / "run1", tmp_path / "run2"])
    assert [run.state for run in found.runs] == ["finished"] * 2 and found.differing == {"seed": [1, 2]}
    assert not found.about and all("test_accuracy" in run.results for run in found.runs)


def test_names_that_steer_a_terminal_or_are_no_text_are_harmless_in_the_page(made, tmp_path):
    odd = [made("a\x1b[2J\u202e"), made("b\udcff")]
    written = write(compare(odd), tmp_path / "page.html").read_text()
    assert "a\ufffd[2J\ufffd" in written and "b\ufffd" in written and "\x1b" not in written
