"""Writes a .zip for a bug report: facts and logs, without secrets.

It contains only what is listed here: `FACTS`, `VARIABLES` and `FAMILIES`, `_TOOLS`, and the files of a run on request.
"""

import json
import os
import platform
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import yaml

from tfgpu import atomic
from tfgpu.doctor.check import Check
from tfgpu.doctor.facts import asking
from tfgpu.doctor.facts.software import installed
from tfgpu.errors import InputError
from tfgpu.recipes import reading
from tfgpu.redact import REMOVED, Cleaner, is_secret

FACTS: dict[str, tuple[str, ...] | None] = {
    "python": ("version", "executable"),
    "packages": None,
    "tensorflow": ("version", "build", "gpus", "folder"),
    "keras": ("version", "backend"),
    "repairs": None,
    "patches": None,
    "driver": ("version", "cuda", "gpus", "links", "lost"),
    "libraries": None,
    "tools": ("ptxas", "version", "libdevice", "looked"),
    "machine": (
        *("cores", "all_cores", "quota", "threads", "memory_bytes", "free_bytes", "memory_limit_bytes", "container"),
        *("pci_gpus", "devices", "kernel_driver", "shared_memory", "infiniband", "limits", "disk"),
    ),
}
"""The doctor's questions, and the fields of each answer to include; `None` includes all."""
VARIABLES = (
    *("PATH", "LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "CONDA_PREFIX", "LANG"),
    *("LC_ALL", "HF_HOME", "HF_HUB_OFFLINE", "TFDS_DATA_DIR", "KUBERNETES_SERVICE_HOST"),
)
FAMILIES = ("TF_", "TFGPU_", "KERAS_", "XLA_", "NCCL_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "SLURM_", "OMPI_", "PMI")
"""The environment variables to include: those in `VARIABLES`, and those with one of these prefixes."""
LEFT_OUT = "left-out.txt"
_TAIL = 256 * 1024
"""Bytes to keep of the end of a log."""
_MOST_LOGS = 16
_TOOL_S = 20.0
# All sections of `nvidia-smi -q` except the processes.
_SECTIONS = "MEMORY,UTILIZATION,ECC,TEMPERATURE,POWER,CLOCK,COMPUTE,PERFORMANCE,PAGE_RETIREMENT"
_TOOLS = {
    "nvidia-smi.txt": ("nvidia-smi", "-q", "-d", _SECTIONS),
    "nvidia-smi-topology.txt": ("nvidia-smi", "topo", "-m"),
    "cpu.txt": ("lscpu",),
}


class _Archive:
    """The cleaned texts of a bundle, and a list of omissions."""

    def __init__(self, cleaner: Cleaner):
        self._cleaner = cleaner
        self.texts: dict[str, str] = {}
        self.left_out: list[str] = []

    def add(self, name: str, content: object) -> None:
        """Adds a text, such as a log, or facts as JSON or YAML, depending on the file's name."""
        before = self._cleaner.removed.copy()
        if isinstance(content, str):
            self.texts[name] = self._cleaner.clean(content)
        elif name.endswith(".json"):
            self.texts[name] = json.dumps(self._cleaner.facts(content), indent=2)
        else:
            self.texts[name] = yaml.safe_dump(self._cleaner.facts(content), sort_keys=False)
        for kind, count in sorted((self._cleaner.removed - before).items()):
            self.left_out.append(f"{name}: {kind}, {count} time(s)")

    def omit(self, name: str, why: str) -> None:
        self.left_out.append(f"{name}: {why}")


def write(
    path: Path,
    checks: Sequence[Check],
    facts: Mapping[str, dict],
    *,
    environ: Mapping[str, str],
    run: Path | None = None,
    cleaner: Cleaner | None = None,
) -> Path:
    """Writes the bundle.

    Args:
        path: the file to write, which must not exist.
        checks: the doctor's checks.
        facts: the result of `gather`.
        environ: environment variables; `VARIABLES` and `FAMILIES` select those to include; secret values are removed.
        run: the directory of a run, or of the logs of a launch; adds its settings, metrics and logs.
        cleaner: removes secrets; `None` makes one from `environ`.

    Returns:
        The path.

    Raises:
        InputError: the file exists or cannot be written, or `run` is not a directory.
    """
    checked(path, run)
    archive = _Archive(cleaner or Cleaner(environ))
    archive.add("doctor.json", [asdict(check) for check in checks])
    archive.add("facts.json", named(facts))
    archive.add("versions.txt", "\n".join(f"{name}=={version}" for name, version in sorted(installed().items())))
    archive.add("system.txt", _system())
    archive.add("environment.txt", _environment(environ, archive))
    archive.add("tensorflow.log", facts["tensorflow"].get("loading", {}).get("log", ""))
    _add_tools(archive, environ)
    _add_xids(archive, facts["xid"])
    if run is not None:
        _add_run(archive, run)
    text = "Omitted from this bundle, and removed from its files:\n"
    archive.texts[LEFT_OUT] = text + "\n".join(f"- {line}" for line in archive.left_out or ["nothing"]) + "\n"
    _zip(path, archive.texts)
    return path


def named(facts: Mapping[str, Mapping]) -> dict[str, dict]:
    """The facts selected by `FACTS`, and the errors of those that could not be read."""
    return {
        question: {
            name: value for name, value in facts[question].items() if fields is None or name in (*fields, "error")
        }
        for question, fields in FACTS.items()
        if question in facts
    }


def checked(path: Path, run: Path | None) -> Path:
    """Returns the path, after checking that a bundle can be written there.

    Raises:
        InputError: the file exists, its directory does not, or `run` is not a directory.
    """
    if path.exists():
        raise InputError(f"{path} exists. Remove it, or give --output another name.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"There is no folder {str(path.parent)!r}. Create it, or give --output another path.")
    if run is not None and not run.is_dir():
        raise InputError(f"There is no folder {str(run)!r}. Give --run the folder of a run, or omit it.")
    return path


def default_path() -> Path:
    """A new name in the current directory."""
    return Path(time.strftime("tfgpu-doctor-%Y%m%d-%H%M%S.zip"))


def _system() -> str:
    lines = [platform.platform(), f"Python {platform.python_version()} ({platform.python_implementation()})"]
    try:
        release = platform.freedesktop_os_release().get("PRETTY_NAME", "")
    except OSError:
        release = ""
    return "\n".join([*lines, release])


def _environment(environ: Mapping[str, str], archive: _Archive) -> str:
    kept = {name: value for name, value in environ.items() if name in VARIABLES or name.startswith(FAMILIES)}
    for name in sorted(name for name in kept if is_secret(name)):
        kept[name] = REMOVED
        archive.omit("environment.txt", f"the value of {name}")
    archive.omit("environment.txt", f"{len(environ) - len(kept)} variables that do not concern training")
    return "\n".join(f"{name}={value}" for name, value in sorted(kept.items()))


def _add_tools(archive: _Archive, environ: Mapping[str, str]) -> None:
    for name, command in _TOOLS.items():
        if not shutil.which(command[0], path=environ.get("PATH")):
            archive.omit(name, f"{command[0]} is not installed")
            continue
        ended = asking.run(command, environ=environ, seconds=_TOOL_S)
        if ended.code != 0:
            archive.omit(name, f"`{' '.join(command)}`: {ended.how}")
        if ended.out or ended.err:
            archive.add(name, ended.out + ended.err)


def _add_xids(archive: _Archive, found: Mapping) -> None:
    if found.get("unread") or found.get("error"):
        archive.omit("xid.txt", f"the kernel's log cannot be read: {found.get('unread') or found['error']}")
    elif found["lines"]:
        lines = [f"Xid {each['number']} ({each['gpu']}): {each['text']}" for each in found["lines"]]
        archive.add("xid.txt", "\n".join(lines))
    else:
        archive.omit("xid.txt", "no Xid error in the kernel's log")


def _add_run(archive: _Archive, run: Path) -> None:
    _add_settings(archive, run / "config.yaml")
    logs = sorted({*run.glob("*.log"), *run.glob("logs/*.log"), *run.glob("*.out"), *run.glob("*.err")})
    for path in [run / "metrics.csv", *logs[:_MOST_LOGS]]:
        name = f"run/{path.relative_to(run)}"
        try:
            content = path.read_bytes()
        except OSError as error:
            archive.omit(name, (error.strerror or str(error)).lower())
            continue
        if len(content) > _TAIL:
            archive.omit(name, f"all but its last {_TAIL // 1024} KiB, of {len(content) // 1024} KiB")
            # Drop the first line, which may begin in the middle of a secret.
            content = content[-_TAIL:].partition(b"\n")[2]
        archive.add(name, content.decode(errors="replace"))
    for path in logs[_MOST_LOGS:]:
        archive.omit(f"run/{path.relative_to(run)}", f"only {_MOST_LOGS} logs are included")
    archive.omit("run/", "models, checkpoints, reports and TensorBoard files")


def _add_settings(archive: _Archive, path: Path) -> None:
    """Adds a run's settings, without secret values."""
    if not path.is_file():
        archive.omit("run/config.yaml", "no such file")
        return
    try:
        archive.add("run/config.yaml", {**reading.read(path), reading.FACTS: reading.read_facts(path)})
    except InputError:
        archive.omit("run/config.yaml", "it is not a recipe")


def _zip(path: Path, texts: Mapping[str, str]) -> None:
    """Writes the file, readable only by its owner."""
    try:
        with atomic.replacing(path) as aside:
            with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                    for name, text in texts.items():
                        archive.writestr(f"tfgpu-doctor/{name}", text)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}. Give --output another path.") from None
