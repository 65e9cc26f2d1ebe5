"""One file to attach to a bug report: what the doctor found, versions, settings, logs; without secrets."""

import json
import os
import platform
import shutil
import time
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from tfgpu.doctor.check import Check
from tfgpu.doctor.facts import asking
from tfgpu.doctor.facts.software import installed
from tfgpu.errors import InputError
from tfgpu.redact import REMOVED, Cleaner, is_secret

RELEVANT = ("TF_", "TFGPU_", "KERAS_", "XLA_", "NCCL_", "CUDA_", "NVIDIA_", "OMP_", "MKL_", "SLURM_", "KUBERNETES_")
RELEVANT += ("LD_", "PYTHON", "VIRTUAL_ENV", "CONDA_", "PATH", "LANG", "HF_", "TFDS_", "OMPI_", "PMI")
"""The beginnings of the names of variables that say something about a training."""
LEFT_OUT = "left-out.txt"
_TAIL = 256 * 1024
"""Bytes of a log's end."""
_MOST_LOGS = 16
_TOOL_S = 20.0
_TOOLS = {
    "nvidia-smi.txt": ("nvidia-smi", "-q"),
    "nvidia-smi-topology.txt": ("nvidia-smi", "topo", "-m"),
    "cpu.txt": ("lscpu",),
}
_RUN_FILES = ("config.yaml", "metrics.csv")


class _Archive:
    """The texts of a bundle, each cleaned, and a list of what was left out."""

    def __init__(self, cleaner: Cleaner):
        self._cleaner = cleaner
        self.texts: dict[str, str] = {}
        self.left_out: list[str] = []

    def add(self, name: str, text: str) -> None:
        before = self._cleaner.removed.copy()
        self.texts[name] = self._cleaner.clean(text)
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
    """Writes a .zip with all that a bug report needs.

    Args:
        path: the file to write; it must not be there yet.
        checks, facts: what the doctor found.
        environ: the environment; only variables that concern training are written, secret ones without their value.
        run: the folder of a run or of a launch's logs, whose settings, metrics and logs are added.
        cleaner: what removes secrets; `None` makes one of `environ`.

    Returns:
        The path.

    Raises:
        InputError: the file is there already, cannot be written, or `run` is no folder.
    """
    checked(path, run)
    archive = _Archive(cleaner or Cleaner(environ))
    archive.add("doctor.json", json.dumps([asdict(check) for check in checks], indent=2))
    archive.add("facts.json", json.dumps({**facts, "xid": {}}, indent=2, default=str))
    archive.add("versions.txt", "\n".join(f"{name}=={version}" for name, version in sorted(installed().items())))
    archive.add("system.txt", _system())
    archive.add("environment.txt", _environment(environ, archive))
    archive.add("tensorflow.log", facts["tensorflow"].get("loading", {}).get("log", ""))
    _add_tools(archive, environ)
    _add_xids(archive, facts["xid"])
    if run is not None:
        _add_run(archive, run)
    text = "What is not in this bundle, and how often something was removed from a file:\n"
    archive.texts[LEFT_OUT] = text + "\n".join(f"- {line}" for line in archive.left_out or ["nothing"]) + "\n"
    _zip(path, archive.texts)
    return path


def checked(path: Path, run: Path | None) -> Path:
    """The path of a bundle that can be written.

    Raises:
        InputError: the file is there already, or `run` is no folder.
    """
    if path.exists():
        raise InputError(f"{path} is there already. Remove it, or give --output another name.")
    if not path.absolute().parent.is_dir():
        raise InputError(f"There is no folder {str(path.parent)!r}. Make it, or give --output another place.")
    if run is not None and not run.is_dir():
        raise InputError(f"There is no folder {str(run)!r}. Give --run the folder of a run, or leave it out.")
    return path


def default_path() -> Path:
    """A new name in this folder."""
    return Path(time.strftime("tfgpu-doctor-%Y%m%d-%H%M%S.zip"))


def _system() -> str:
    lines = [platform.platform(), f"Python {platform.python_version()} ({platform.python_implementation()})"]
    release = Path("/etc/os-release")
    return "\n".join(lines + (release.read_text(errors="replace").splitlines() if release.is_file() else []))


def _environment(environ: Mapping[str, str], archive: _Archive) -> str:
    kept = {name: value for name, value in environ.items() if name.startswith(RELEVANT)}
    for name in sorted(name for name in kept if is_secret(name)):
        kept[name] = REMOVED
        archive.omit("environment.txt", f"the value of {name}")
    archive.omit("environment.txt", f"{len(environ) - len(kept)} variables that do not concern training")
    return "\n".join(f"{name}={value}" for name, value in sorted(kept.items()))


def _add_tools(archive: _Archive, environ: Mapping[str, str]) -> None:
    for name, command in _TOOLS.items():
        if not shutil.which(command[0], path=environ.get("PATH")):
            archive.omit(name, f"there is no {command[0]} here")
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
        archive.add(
            "xid.txt", "\n".join(f"Xid {each['number']} ({each['gpu']}): {each['text']}" for each in found["lines"])
        )
    else:
        archive.omit("xid.txt", "no Xid error in the kernel's log")


def _add_run(archive: _Archive, run: Path) -> None:
    logs = sorted({*run.glob("*.log"), *run.glob("logs/*.log"), *run.glob("*.out"), *run.glob("*.err")})
    for path in [*(run / name for name in _RUN_FILES), *logs[:_MOST_LOGS]]:
        name = f"run/{path.relative_to(run)}"
        try:
            content = path.read_bytes()
        except OSError as error:
            archive.omit(name, (error.strerror or str(error)).lower())
            continue
        if len(content) > _TAIL:
            archive.omit(name, f"all but its last {_TAIL // 1024} KiB, of {len(content) // 1024} KiB")
            # What is cut in two at the begin could be half of a secret.
            content = content[-_TAIL:].partition(b"\n")[2]
        archive.add(name, content.decode(errors="replace"))
    for path in logs[_MOST_LOGS:]:
        archive.omit(f"run/{path.relative_to(run)}", f"one log of more than {_MOST_LOGS}")
    archive.omit("run/", "models, checkpoints, reports and TensorBoard's files")


def _zip(path: Path, texts: Mapping[str, str]) -> None:
    """Writes the file aside and renames it; only its owner may read it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
                for name, text in texts.items():
                    archive.writestr(f"tfgpu-doctor/{name}", text)
        os.replace(aside, path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise InputError(f"{path} cannot be written: {error.strerror}. Give --output another place.") from None
