"""The wheel contains everything that the package needs outside this tree."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD_PY = """
from setuptools.dist import Distribution
distribution = Distribution({"script_name": "setup.py"})
distribution.parse_config_files()
build = distribution.get_command_obj("build_py")
build.build_lib = "."
build.ensure_finalized()
print(*build.get_outputs(include_bytecode=0), sep="\\n")
"""


@pytest.fixture(scope="module")
def committed():
    listed = subprocess.run(["git", "ls-files", "tfgpu"], cwd=ROOT, capture_output=True, text=True, timeout=550)
    if listed.returncode:
        pytest.skip("not a git checkout")
    return set(listed.stdout.split())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # Of a copy: setuptools would add what an earlier build left in the tree's `build/lib`.
    copy, folder = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "tfgpu", copy / "tfgpu", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, copy]
    subprocess.run(command, check=True, timeout=550)
    (made,) = folder.glob("*.whl")
    return made


def test_setuptools_takes_every_file_of_the_package(committed):
    command = [sys.executable, "-W", "ignore", "-c", BUILD_PY]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=550)
    missing = committed - {os.path.normpath(line) for line in listed.stdout.splitlines()}
    assert not missing


@pytest.mark.slow
def test_every_file_of_the_package_is_in_it(committed, wheel):
    with zipfile.ZipFile(wheel) as archive:
        missing = committed - set(archive.namelist())
    assert not missing


@pytest.mark.slow
def test_it_trains_outside_the_tree(wheel, tmp_path):
    installed = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", installed, wheel]
    subprocess.run(command, check=True, timeout=550)
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    where = [sys.executable, "-c", "import tfgpu; print(tfgpu.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert found.stdout.startswith(str(installed))
    train = [sys.executable, "-m", "tfgpu", "train", "--epochs", "1", "--model", "mlp", "--output", "run"]
    done = subprocess.run(train, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "run" / "report.html").exists() and (tmp_path / "run" / "model.keras").exists()
