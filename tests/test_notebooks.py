"""Every notebook runs from top to bottom; two need KerasHub. The site shows what they print (`make docs`)."""

import ast
import configparser
import importlib.util
import os
import re
from importlib import metadata
from pathlib import Path

import nbformat
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "site" / "notebooks.py"
SPEC = importlib.util.spec_from_file_location("site_notebooks", FILE)
notebooks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(notebooks)
NEEDS_HUB = [path for path in notebooks.NOTEBOOKS if "import keras_hub" in path.read_text(encoding="utf-8")]
HUB = pytest.mark.skipif(importlib.util.find_spec("keras_hub") is None, reason="needs KerasHub: pip install keras-hub")
CASES = [
    pytest.param(path, id=path.stem, marks=[pytest.mark.slow, *([HUB] if path in NEEDS_HUB else [])])
    for path in notebooks.NOTEBOOKS
]
# Makes an environment as if nothing but ALLOWED was installed.
ONLY = """
import sys
class Only:
    missing = {missing!r}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.missing:
            raise ModuleNotFoundError(f"{{name}} is not among what the notebook's `pip install` brings", name=name)
sys.meta_path.insert(0, Only())
"""


def brought(extra: str) -> set[str]:
    """The names of all packages that tfgpu with an extra brings, with what they bring themselves."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    extras = setup["options.extras_require"]
    found, seen = set(), set()
    waiting = [Requirement(f"tfgpu[{extra}]")]
    while waiting:
        need = waiting.pop()
        name = canonicalize_name(need.name)
        for part in {"", *need.extras} - {part for known, part in seen if known == name}:
            seen.add((name, part))
            if name == "tfgpu":
                lines = extras[part] if part else setup["options"]["install_requires"]
                waiting += [Requirement(line) for line in lines.split("\n") if line]
                continue
            found.add(name)
            try:
                needs = map(Requirement, metadata.requires(name) or ())
            except metadata.PackageNotFoundError:  # of another extra's, or another system's
                continue
            waiting += [each for each in needs if not each.marker or each.marker.evaluate({"extra": part})]
    return found


def only(extras, folder):
    """A folder that hides, put on PYTHONPATH, all that `pip install tfgpu[EXTRAS]` would not bring."""
    allowed = {"tfgpu", "coverage"}.union(*map(brought, extras))
    packages = metadata.packages_distributions().items()
    missing = {module for module, names in packages if not allowed & {canonicalize_name(name) for name in names}}
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(ONLY.format(missing=missing))
    return folder


def test_there_are_ten_and_none_is_left_out():
    assert [path.stem.split("_")[0] for path in notebooks.NOTEBOOKS] == [str(number) for number in range(1, 11)]
    assert [case.values[0] for case in CASES] == notebooks.NOTEBOOKS
    assert [case.values[0] for case in CASES if case.marks[1:]] == NEEDS_HUB and len(NEEDS_HUB) == 2
    kept = [path for path in ROOT.glob("notebooks/**/*.ipynb") if ".ipynb_checkpoints" not in path.parts]
    assert sorted(kept) == sorted(notebooks.NOTEBOOKS)
    pages = re.findall(r"notebooks/(\w+)\.md", (ROOT / "mkdocs.yml").read_text())
    assert pages == [path.stem for path in notebooks.NOTEBOOKS]


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_it_opens_with_what_one_learns_and_ends_with_what_to_try(path):
    first, *_, last = (cell.source for cell in nbformat.read(path, as_version=4).cells)
    learned = first.partition("**You will learn**")[2].partition("**Time:**")[0]
    assert first.startswith("# ") and 3 <= len(re.findall("^- ", learned, re.MULTILINE)) <= 5
    assert re.search(r"\*\*Time:\*\* about \S+ (seconds|minutes) on 2 CPU cores", first)
    assert "**Hardware:** any" in first and "**On Colab,**" in first
    assert "git clone REPOSITORY tfgpu" in first and "git clone REPOSITORY tfgpu" in (ROOT / "README.md").read_text()
    assert re.findall(r"^(\d)\. ", last.partition("## What to try")[2], re.MULTILINE) == ["1", "2", "3"]
    links = re.findall(r"\]\(([^)#:]+)", last.partition("**Next:**")[2])
    assert links and all((path.parent / link).exists() for link in links)


def test_texts_that_a_cell_prints_one_after_the_other_are_one_output():
    texts = [nbformat.v4.new_output("stream", text=text) for text in ("Epoch 1\n", "20/20\n", "Epoch 2\n")]
    picture = nbformat.v4.new_output("display_data", data={"image/png": ""})
    found = notebooks.joined([*texts[:2], picture, texts[2]])
    assert [each.get("text") for each in found] == ["Epoch 1\n20/20\n", None, "Epoch 2\n"]


def scripts(path):
    """The programs that a notebook writes down to run them in other processes."""
    for cell in nbformat.read(path, as_version=4).cells:
        source = re.sub(r"^( *)%.*", r"\1pass", cell.source, flags=re.MULTILINE)  # IPython's own commands
        for node in ast.walk(ast.parse(source)) if cell.cell_type == "code" else ():
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "import keras" in node.value:
                yield ast.parse(node.value)


@pytest.mark.parametrize("path", notebooks.NOTEBOOKS, ids=lambda path: path.stem)
def test_stock_keras_stands_beside_tfgpu(path):
    """A program that trains by Keras and has no tfgpu, or not always: within the notebook Keras is repaired."""
    imported = [
        {name.name.split(".")[0] for node in program.body if isinstance(node, ast.Import) for name in node.names}
        for program in scripts(path)
    ]
    assert any("keras" in names and "tfgpu" not in names for names in imported)


@pytest.mark.parametrize("path", CASES)
def test_notebook_runs(path, tmp_path, monkeypatch):
    assert not any(cell.get("outputs") for cell in nbformat.read(path, as_version=4).cells), "commit without outputs"
    extras = ["notebooks", "hub"] if path in NEEDS_HUB else ["notebooks"]
    paths = [str(only(extras, tmp_path / "only")), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    (tmp_path / "work").mkdir()
    ran = nbformat.read(notebooks.run(path, folder=tmp_path / "work"), as_version=4)
    pictures = [each for cell in ran.cells for each in cell.get("outputs", []) if "image/png" in each.get("data", {})]
    assert pictures, "a notebook has pictures"
