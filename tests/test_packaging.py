"""The wheel holds all that the package needs, outside of this tree."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT]
    subprocess.run(command, check=True, timeout=300)
    (made,) = folder.glob("*.whl")
    return made


def test_every_file_of_the_package_is_in_it(wheel):
    listed = subprocess.run(["git", "ls-files", "tfgpu"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    if listed.returncode:
        pytest.skip("not a git checkout")
    with zipfile.ZipFile(wheel) as archive:
        missing = set(listed.stdout.split()) - set(archive.namelist())
    assert not missing


def test_it_trains_outside_the_tree(wheel, tmp_path):
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, wheel]
    subprocess.run(command, check=True, timeout=300)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import tfgpu; print(tfgpu.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert found.stdout.startswith(str(installed))
    train = [sys.executable, "-m", "tfgpu", "train", "--epochs", "1", "--model", "mlp", "--output", "run"]
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "model.keras").exists()
