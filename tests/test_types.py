"""What a user's type checker knows of tfgpu: every public name, and every argument of it."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import tfgpu

ROOT = Path(__file__).parents[1]
INNER = ("tfgpu.training.incremental", "tfgpu.training.schedules")
# No annotation, or a bare `dict`. TensorFlow has no types for a dataset's elements: nothing to annotate.
LACKING = re.compile(r'nnotation|Type argument \d+ for class "(?!Dataset)')
BASEDPYRIGHT = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
# An editable install is found by an import hook, which a type checker does not run.
HERE = {**os.environ, "PYTHONPATH": str(ROOT)}


def public() -> set[str]:
    """The places where the public names are defined."""
    modules = [value for name in tfgpu.__all__ if inspect.ismodule(value := getattr(tfgpu, name))]
    modules += [importlib.import_module(name) for name in INNER]
    values = [getattr(tfgpu, name) for name in tfgpu.__all__]
    for module in modules:
        named = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        values += [getattr(module, name) for name in named]
    kept = [value for value in values if inspect.isfunction(value) or inspect.isclass(value)]
    return {f"{value.__module__}.{value.__qualname__}" for value in kept if value.__module__.startswith("tfgpu")}


@pytest.fixture(scope="module")
def symbols():
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    command = [*BASEDPYRIGHT, "--verifytypes", "tfgpu", "--ignoreexternal", "--outputjson"]
    ran = subprocess.run(command, cwd=ROOT, env=HERE, capture_output=True, text=True, timeout=550)
    return json.loads(ran.stdout)["typeCompleteness"]["symbols"]


@pytest.mark.slow
def test_every_public_name_and_argument_has_its_type(symbols):
    places = public()
    ours = [s for s in symbols if any(s["name"] == place or s["name"].startswith(f"{place}.") for place in places)]
    assert len(ours) > 400
    missing = [
        f"{symbol['name']}: {said}"
        for symbol in ours
        for diagnostic in symbol["diagnostics"]
        if LACKING.search(said := " ".join(diagnostic["message"].split()))
    ]
    assert not missing, "\n".join(missing)


FENCE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What is no word about tfgpu: Keras and TensorFlow annotate little, and a checker takes a default's type for all that
# may be given; what is not installed here; a page that shows two ways by one name; a result that is None elsewhere.
THEIRS = re.compile(
    r'parameter "(verbose|jit_compile|seed|input_tensor|target|x)" of type|No overloads for "gradient"|Import "'
    r'|is obscured by a declaration|No parameter named "(batch_size|device_id)"|is not a known attribute of "None"'
    r'|not supported for "None"|OpenVINOKerasTensor'
)


@pytest.mark.slow
def test_the_pages_blocks_have_no_wrong_types(tmp_path):
    """The README's and each page's, as a reader's type checker sees them with nothing set up: in its basic mode."""
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))):
        if found := FENCE.findall(page.read_text()):
            (tmp_path / f"{page.stem.replace('-', '_')}.py").write_text("\n".join(found))
    command = [*BASEDPYRIGHT, "--project", str(tmp_path), "--level", "error", "--outputjson"]
    ran = subprocess.run(command, cwd=tmp_path, env=HERE, capture_output=True, text=True, timeout=550)
    told = json.loads(ran.stdout)
    assert told["summary"]["filesAnalyzed"] > 20
    wrong = [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {' '.join(each['message'].split())}"
        for each in told["generalDiagnostics"]
        if not THEIRS.search(each["message"])
    ]
    assert not wrong, "\n".join(wrong)


SCRIPT = """
import tfgpu

reveal_type(tfgpu.strategy)
reveal_type(tfgpu.data.load("digits", global_batch=32).info.classes)
reveal_type(tfgpu.__version__)
tfgpu.callbacks.Checkpoint("run", keep="three")
tfgpu.data.pipelin("digits")
tfgpu.stategy()
"""


def test_a_script_is_checked_through_the_lazy_names(tmp_path):
    pytest.importorskip("basedpyright", reason="basedpyright is not installed")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [*BASEDPYRIGHT, "--outputjson", str(script)]
    ran = subprocess.run(command, cwd=ROOT, env=HERE, capture_output=True, text=True, timeout=550)
    said = [
        (d["severity"], d["range"]["start"]["line"], d["message"]) for d in json.loads(ran.stdout)["generalDiagnostics"]
    ]
    revealed = {line: message for severity, line, message in said if severity == "information"}
    assert "devices: int | str" in revealed[3]
    assert revealed[4].endswith('is "int"') and revealed[5].endswith('is "str"')
    wrong = {line for severity, line, _ in said if severity == "error"}
    assert wrong == {6, 7, 8}  # an argument of another type, and two names that are misspelled
