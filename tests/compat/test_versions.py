"""The supported versions are defined in one place, for pip, for imports and for the doctor."""

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from tfgpu.compat import versions

ROOT = Path(__file__).parents[2]


def test_pip_is_asked_for_the_same_versions():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    required = config["options"]["install_requires"].split()
    assert {versions.TENSORFLOW.requirement, versions.KERAS.requirement} <= set(required)
    gpu = config["options.extras_require"]["gpu"].strip()
    assert versions.INSTALL_CUDA == f"pip install '{gpu}'"
    assert (ROOT / "requirements.txt").read_text().count(f"\n{gpu};") == 1


def test_each_version_is_older_or_supported_or_newer():
    assert [versions.TENSORFLOW.compare(each) for each in ("2.16.2", "2.17.0", "2.22.0-rc0", "2.23.0.dev1")] == [
        *("older", "supported", "supported", "newer")
    ]
    assert versions.KERAS.describe("2.15.0") == "Keras 2.15.0 is too old: tfgpu supports 3.13 to 3.16."


@pytest.mark.parametrize(("name", "library"), [("tf-nightly", "tensorflow"), ("keras-nightly", "keras")])
def test_a_nightly_build_is_known_before_it_is_imported(name, library, monkeypatch, tmp_path):
    facts = tmp_path / f"{name.replace('-', '_')}-9.1.0.dev7.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 9.1.0.dev7\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, library, raising=False)
    assert str(versions.installed(library)) == "9.1.0.dev7"


USES = {
    "Python": "import tfgpu; tfgpu.repair_keras()",
    "the command line": "from tfgpu.cli import main; main(['train', '--dry-run', '--model', 'mlp'])",
}


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    ("version", "code", "said"),
    [pytest.param("3.12.4", 1, "too old", id="old"), pytest.param("3.99.0", 0, "newer than", id="new")],
)
def test_the_first_use_of_keras_says_it_once(version, code, said, use):
    script = f"import keras; keras.__version__ = {version!r}; {USES[use]}"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=550)
    assert done.returncode == code, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if f"Keras {version} is {said}" in line]
    assert len(lines) == 1 and versions.INSTALL in lines[0]
