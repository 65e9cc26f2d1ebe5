"""The combinations of TensorFlow, Keras, NumPy and Python that `run.py` tries, and their environments."""

import configparser
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from shutil import which

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "versions"
PIP = ("-m", "pip", "--disable-pip-version-check", "--quiet")
LEFT_ALONE = ("tensorflow", "keras", "numpy")
"""Packages that installing tfgpu must not change where a supported version is there."""


@dataclass(frozen=True)
class Corner:
    """One environment.

    Attributes:
        name: its name in `--corners` and of its folder.
        title: where these versions are used.
        python: the minor version of Python.
        packages: what pip installs first, with versions.
        nightly: Keras's nightly build takes the place of Keras. Its distribution has another name, so that pip takes
            Keras for missing.
        wanted: whether a run fails where this Python is missing. pyenv and Linux distributions have all others.
    """

    name: str
    title: str
    python: str
    packages: tuple[str, ...]
    nightly: bool = False
    wanted: bool = True

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def interpreter(self) -> Path:
        return self.folder / "venv" / "bin" / "python"


CORNERS = (
    Corner("oldest", "NGC 25.02", "3.12", ("tensorflow==2.17.*", "keras==3.13.*", "numpy==1.26.*")),
    Corner("colab", "Colab, Kaggle", "3.13", ("tensorflow==2.20.*", "keras==3.13.*")),
    Corner("newest", "next release", "3.13", ("tensorflow==2.22.*", "keras"), nightly=True),
    Corner("middle", "in between", "3.11", ("tensorflow==2.19.*", "keras==3.14.*")),
    Corner("current", "pip today", "3.13", ("tensorflow==2.21.*", "keras==3.15.*")),
    Corner("python", "newest Python", "3.14", ("tensorflow==2.22.*", "keras"), nightly=True, wanted=False),
)


def find_python(version: str) -> str | None:
    """An interpreter of this minor version: pyenv's (its shim on `PATH` may refuse), or one on `PATH`."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(found[-1]) if found else which(f"python{version}")


def requirements() -> list[str]:
    """What tfgpu needs beside the packages that a corner chooses, as `setup.cfg` has it."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    needed = config["options"]["install_requires"].split()
    return [each for each in needed if not each.startswith(LEFT_ALONE)]


def build(corner: Corner, python: str) -> None:
    """Makes a corner's environment, unless it is there."""
    wanted = [*corner.packages, *(["keras-nightly"] if corner.nightly else []), *requirements()]
    record = corner.folder / "installed.json"
    if record.exists() and json.loads(record.read_text()) == wanted:
        return
    corner.folder.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    _run([python, "-m", "venv", "--clear", corner.folder / "venv"])
    # `--pre` in the range of one minor version takes its release candidate where there is no release.
    early = ["--pre"] if corner.nightly else []
    _run([corner.interpreter, *PIP, "install", *early, *corner.packages, *requirements()])
    if corner.nightly:
        _run([corner.interpreter, *PIP, "uninstall", "--yes", "keras", "keras-nightly"])
        _run([corner.interpreter, *PIP, "install", "--pre", "--no-deps", "keras-nightly"])
    record.write_text(json.dumps(wanted))


def add_pytest(corner: Corner) -> None:
    """Installs what the fast tests of `run.TESTED` need."""
    _run([corner.interpreter, *PIP, "install", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist"])


def changed_by_pip(corner: Corner) -> list[str]:
    """Which of TensorFlow, Keras and NumPy `pip install tfgpu` would change in this environment."""
    command = [corner.interpreter, *PIP, "install", "--dry-run", "--ignore-requires-python", "--report", "-", ROOT]
    report = json.loads(_run(command))
    names = {each["metadata"]["name"] for each in report["install"]}
    return sorted(names & set(LEFT_ALONE) - ({"keras"} if corner.nightly else set()))


def _run(command: list, timeout: float = 900) -> str:
    """Standard output of a command that must succeed."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.stderr[-2000:]}")
    return done.stdout
