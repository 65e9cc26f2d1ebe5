"""The command `tfgpu doctor`."""

import json
import subprocess
import sys
import zipfile

import pytest

from tfgpu.doctor.facts import asking


def tfgpu(*words: str, environ: dict, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tfgpu", *words]
    environ = asking.with_tfgpu(environ)
    return subprocess.run(command, env=environ, cwd=cwd, capture_output=True, text=True, timeout=800)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--hosts", "a,b"], "--hosts is for --train. Add --train, or omit --hosts."),
        (["--output", "it.zip"], "--output is for --bundle. Add --bundle, or omit --output."),
        (["--json", "--fix"], "--json and --fix cannot be combined"),
        (["--train", "--hosts", "a"], "--hosts must list two or more machines"),
        (["--bundle", "--run", "nowhere"], "There is no folder 'nowhere'"),
    ],
)
def test_invalid_input_is_reported_at_once(words, error, clean, tmp_path):
    done = tfgpu("doctor", *words, environ=clean(), cwd=tmp_path)
    assert done.returncode == 2 and error in " ".join(done.stderr.split()), done.stderr


@pytest.mark.slow
def test_the_script_and_the_bundle_of_a_machine_without_tensorflow(clean, tmp_path):
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text("raise ModuleNotFoundError(\"No module named 'tensorflow'\")")
    environ = clean(PYTHONPATH=str(tmp_path), OMP_NUM_THREADS="999", HF_TOKEN="it-is-secret")
    done = tfgpu("doctor", "--fix", "--bundle", "--output", "it.zip", environ=environ, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert "pip install 'tensorflow>=2.17,<2.23' 'keras>=3.13,<3.17'" in lines and "unset OMP_NUM_THREADS" in lines
    assert lines.index("unset OMP_NUM_THREADS") > lines.index("# problem: TensorFlow: not installed")
    with zipfile.ZipFile(tmp_path / "it.zip") as archive:
        checks = json.loads(archive.read("tfgpu-doctor/doctor.json"))
        assert b"it-is-secret" not in b"".join(archive.read(name) for name in archive.namelist())
        assert json.loads(archive.read("tfgpu-doctor/facts.json"))["machine"]["cores"]
    assert {check["status"] for check in checks} == {"ok", "warning", "problem"}
    assert "left-out.txt in it lists what was removed" in " ".join(done.stderr.split())
