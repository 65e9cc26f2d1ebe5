"""The examples in docstrings are correct. Those that need a separate process are in the modules' tests."""

import doctest
import importlib
from pathlib import Path

import pytest

import tfgpu

# `environment` changes devices before TensorFlow starts; `doctor` describes the machine that it runs on.
ELSEWHERE = ("tfgpu.environment", "tfgpu.__main__", "tfgpu.cli", "tfgpu.repairs.probing", "tfgpu.doctor.__init__")
ROOT = Path(tfgpu.__file__).parents[1]
NAMES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path
    for path in sorted(ROOT.glob("tfgpu/**/*.py"))
    if ">>> " in path.read_text()
}
MODULES = [name.removesuffix(".__init__") for name in NAMES if not name.startswith(ELSEWHERE)]


# It measures for seconds; tests/measure has the same.
SLOW = dict.fromkeys(
    ("tfgpu.measure.input", "tfgpu.measure.workers", "tfgpu.serving", "tfgpu.recipes.runner"), pytest.mark.slow
)


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW.get(name, ())) for name in MODULES])
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.testmod(importlib.import_module(name), optionflags=flags).failed == 0
