"""Every Python block of the README and the docs runs, each page in a process with two logical CPU devices; other
frameworks' blocks (```py) are Python at least; every command that a page shows is one that there is."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
START = "import tfgpu\ntfgpu.environment.set_logical_devices(2)\n"


# They take ten seconds and more; `.ci/run` has them.
SLOW = {
    *("averaging.md", "data-stages.md", "does-not-fit.md", "export.md", "from-accelerate.md", "from-deepspeed.md"),
    *("from-pytorch.md", "from-tf-distribute.md", "horovod.md", "incremental.md", "memory.md", "parallel.md"),
    *("planner.md", "profiling.md", "recipes.md", "speed.md", "training-loops.md", "tuning.md"),
}
SHOWN = re.compile(r"^```py\n(.*?)^```", re.DOTALL | re.MULTILINE)


def pages():
    for page in PAGES:
        if BLOCK.search(page.read_text()):
            yield pytest.param(page, id=page.name, marks=pytest.mark.slow if page.name in SLOW else ())


@pytest.mark.parametrize("page", list(pages()))
def test_code_runs(page, tmp_path):
    script = tmp_path / "page.py"
    script.write_text(START + "\n".join(BLOCK.findall(page.read_text())))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_others_is_python(page):
    for block in SHOWN.findall(page.read_text()):
        ast.parse(block)


SHELL = re.compile(r"^```(?:sh|bash)\n(.*?)^```", re.DOTALL | re.MULTILINE)
# The command, what it is given, and nothing of what the shell does with it.
CALL = re.compile(r"^(?:\w+=\S+ )*tfgpu ([^|&>#\n]+)", re.MULTILINE)
GROUPS = ("bench", "data", "find")


def calls():
    for page in PAGES:
        for block in SHELL.findall(page.read_text()):
            for words in CALL.findall(block.replace("\\\n", " ")):
                yield pytest.param(shlex.split(words), id=f"{page.name}: {words.strip()[:60]}")


@pytest.mark.parametrize("words", list(calls()))
def test_the_command_line_has_what_a_page_shows(words, capsys):
    """With `--help`, flags and their number are read, and nothing is done."""
    at = 2 if words[0] in GROUPS else 1
    with pytest.raises(SystemExit) as ended:
        cli.main([*words[:at], "--help", *words[at:]])
    assert not ended.value.code, capsys.readouterr().err
