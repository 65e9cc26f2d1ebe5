"""Every Python block of the README and the docs runs: each page in a process with two logical CPU devices, a block that
says `# tfgpu launch ...` by that command, one that takes an engine (Ray, Spark) where there is one. Other frameworks'
blocks (```py) compile at least; every command that a page shows is one that there is."""

import ast
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from tfgpu import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")]
PAGES += sorted((ROOT / "docs").glob("**/*.md"))
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LANGUAGES = {
    "python": "runs in the tests",
    "py": "another library's code, which compiles",
    "sh": "commands; those of tfgpu exist",
    "text": "what is printed",
}
START = "import tfgpu\ntfgpu.environment.set_logical_devices(2)\n"
# The first line of a script that several processes run, and of a file that other blocks import.
LAUNCH = re.compile(r"# tfgpu (launch .* train\.py)\n")
FILE = re.compile(r"# (\w+\.py)\n")

# Text of a block that takes an engine, the module it is, and how to have it.
ENGINES = {
    "launch.ray_job(": ("ray", "Ray: pip install 'tfgpu[ray]'"),
    "import SparkSession": ("pyspark", "Spark: pip install 'tfgpu[spark]'"),
    "from nvidia.dali": ("nvidia.dali", "DALI: pip install 'tfgpu[dali]'"),
    "import keras_hub\n": ("keras_hub", "KerasHub: pip install keras-hub"),
    'Track("mlflow"': ("mlflow", "MLflow: pip install 'tfgpu[track]'"),
}

# They take ten seconds and more; `.ci/run` has them.
SLOW = {
    *("averaging.md", "data-stages.md", "data-workers.md", "does-not-fit.md", "export.md"),
    *("from-accelerate.md", "from-deepspeed.md"),
    *("from-pytorch.md", "from-tf-distribute.md", "horovod.md", "incremental.md", "memory.md", "parallel.md"),
    *("planner.md", "profiling.md", "recipes.md", "sharding.md", "speed.md", "training-loops.md", "tuning.md"),
}


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == language]


def engine(block: str) -> tuple[str, str] | None:
    return next((needed for words, needed in ENGINES.items() if words in block), None)


def together(page: Path) -> list[str]:
    """The blocks that run one after another in one process."""
    if page.name == "five-minutes.md":  # its scripts run one by one, in test_tutorial.py
        return []
    return [block for block in blocks(page, "python") if not LAUNCH.match(block) and not engine(block)]


def pages():
    for page in PAGES:
        if together(page):
            yield pytest.param(page, id=page.name, marks=pytest.mark.slow if page.name in SLOW else ())


NEEDS_TWO = re.compile(r"\b(?:devices|stages)=2\b|\"CPU:1\"")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_that_needs_two_devices_says_how_to_have_them(page):
    """The pages' tests have two; a reader's machine without GPUs has one."""
    text = "".join(block for block in blocks(page, "python") if not LAUNCH.match(block))
    found = NEEDS_TWO.search(text)
    if found:
        before = text[: found.start()]
        assert "set_logical_devices(2)" in before, f"{page.name}: {found[0]} fails on a machine with one device"


def alone(chosen):
    """The blocks that `chosen` takes, each with its page."""
    for page in PAGES:
        for number, block in enumerate(filter(chosen, blocks(page, "python")), 1):
            yield pytest.param(page, block, id=f"{page.name}-{number}", marks=pytest.mark.slow)


def run(words: list[str], script: str, *, page: Path, folder: Path, timeout: float = 300) -> str:
    """Runs a script, beside the files that its page has, and returns what it printed."""
    for block in filter(FILE.match, blocks(page, "python")):
        (folder / FILE.match(block)[1]).write_text(block)
    (folder / "train.py").write_text(script)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2", "PYTHONPATH": paths}
    command = [sys.executable, *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.mark.sample("README.md")
@pytest.mark.parametrize("page", list(pages()))
def test_code_runs(page, tmp_path):
    run(["train.py"], START + "\n".join(together(page)), page=page, folder=tmp_path)


@pytest.mark.processes
@pytest.mark.parametrize(("page", "block"), list(alone(LAUNCH.match)))
def test_code_of_several_processes_runs(page, block, tmp_path):
    words = shlex.split(LAUNCH.match(block)[1])
    run(["-m", "tfgpu", *words], block, page=page, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.processes
def test_the_script_of_the_readme_trains_in_several_processes(tmp_path):
    readme = ROOT / "README.md"
    (script,) = together(readme)
    run(["-m", "tfgpu", "launch", "-n", "2", "train.py"], script, page=readme, folder=tmp_path)
    assert (tmp_path / "run" / "epoch-0005").exists()


@pytest.fixture
def folder(tmp_path):
    """What the blocks with an engine find beside them: a folder of photos."""
    keras = pytest.importorskip("keras")
    for kind in range(10):
        (tmp_path / "photos" / str(kind)).mkdir(parents=True)
        for number in range(2):
            picture = keras.random.uniform((40 + kind, 60, 3), maxval=255, seed=number)
            keras.utils.save_img(tmp_path / "photos" / str(kind) / f"{number}.jpg", picture)
    return tmp_path


@pytest.mark.processes
@pytest.mark.parametrize(("page", "block"), list(alone(engine)))
def test_code_that_takes_an_engine_runs_where_there_is_one(page, block, folder):
    module, name = engine(block)
    pytest.importorskip(module, reason=f"needs {name}")
    if module == "pyspark" and shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs Java: apt-get install openjdk-17-jre-headless")
    run(["train.py"], block, page=page, folder=folder, timeout=600)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_fence_says_what_it_holds(page):
    """A fence without one of these words, or one that stands further in, would be neither run nor read."""
    inside, wrong = False, []
    for line in page.read_text().splitlines():
        if line.lstrip().startswith(("```", "~~~")):
            if not inside and line.removeprefix("```") not in LANGUAGES:
                wrong.append(line)
            inside = not inside
    assert not wrong and not inside, f"one of {sorted(LANGUAGES)}: {wrong}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_of_others_compiles(page):
    for block in blocks(page, "py"):
        compile(block, page.name, "exec")
        imported = {name.name for node in ast.walk(ast.parse(block)) if hasattr(node, "names") for name in node.names}
        assert "tfgpu" not in imported, "tfgpu's own code runs: write `python`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_what_is_printed_is_no_code(page):
    for block in blocks(page, "text"):
        assert not re.search(r"^(\$ )?tfgpu [a-z]|^(import|from) \w|^\w+ = ", block, re.MULTILINE), block


# The command, what it is given, and nothing of what the shell does with it.
CALL = re.compile(r"^(?:\w+=\S+ )*tfgpu ([^|&>#\n]+)", re.MULTILINE)
PAIRS = {name for name in typer.main.get_command(cli.app).commands if " " in name}


def commands():
    for page in PAGES:
        for block in blocks(page, "sh"):
            yield page, block.replace("\\\n", " ")


def calls():
    for page, block in commands():
        for words in CALL.findall(block):
            yield pytest.param(shlex.split(words), id=f"{page.name}: {words.strip()[:60]}")


@pytest.mark.parametrize("words", list(calls()))
def test_the_command_line_has_what_a_page_shows(words, capsys):
    """With `--help`, flags and their number are read, and nothing is done."""
    at = 2 if words[0] == "data" or " ".join(words[:2]) in PAIRS else 1
    with pytest.raises(SystemExit) as ended:
        cli.main([*words[:at], "--help", *words[at:]])
    assert not ended.value.code, capsys.readouterr().err


def test_the_other_commands_are_there():
    """What `make` and Python are asked to do."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page, block in commands():
        assert set(re.findall(r"^make ([a-z-]+)", block, re.MULTILINE)) <= targets, page.name
        for script in re.findall(r"^(?:\w+=\S+ )*python (\w+/\S+\.py)", block, re.MULTILINE):
            assert (ROOT / script).exists(), f"{page.name}: {script}"


DOCSTRING = """Adds.

Example:
    for number in (1, 2):
        total += number

    print(total)

Source: a book.
"""


def test_an_example_is_code_in_the_reference_with_prompts_or_without():
    pytest.importorskip("griffe")
    spec = importlib.util.spec_from_file_location("site_docstrings", ROOT / "docs" / "site" / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    code = "    ```python\n    for number in (1, 2):\n        total += number\n\n    print(total)\n    ```"
    assert docstrings.with_code(DOCSTRING) == f"Adds.\n\nExamples:\n{code}\n\nSource: a book.\n"
    prompted = "Adds.\n\nExample:\n    >>> 1 + 2\n    3"
    assert docstrings.with_code(prompted) == "Adds.\n\nExamples:\n    >>> 1 + 2\n    3\n"
