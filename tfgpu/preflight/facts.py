"""What must be equal on all processes of a run, and the sentence that says who differs."""

import hashlib
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

PACKAGES = {"TensorFlow": ("tensorflow", "tensorflow-cpu"), "Keras": ("keras",), "tfgpu": ("tfgpu",)}
SCRIPT = "script"
# By fact; all others are versions.
FIXES = {
    SCRIPT: "Give every process the same file.",
    "tfgpu's code": "Install the same tfgpu everywhere.",
    "TFGPU_SEED": "Set it alike everywhere.",
    "PYTHONHASHSEED": "Set it alike everywhere.",
    "recipe": "Give every process the same settings.",
    "seed": "Give every process the same settings.",
}
_MOST_NAMED = 8
_DIGITS = 12


def gather(script: str | os.PathLike | None = None) -> dict[str, str]:
    """Looks up this process's versions, seeds and code, without importing TensorFlow.

    Args:
        script: the file that runs; `None` is the running program's.

    Returns:
        Short texts by name.
    """
    found = {"Python": platform.python_version()}
    found |= {title: _version(names) for title, names in PACKAGES.items()}
    found |= {name: os.environ.get(name, "not set")[:64] for name in ("PYTHONHASHSEED", "TFGPU_SEED")}
    found["tfgpu's code"] = _package_hash(Path(__file__).parent.parent)
    found[SCRIPT] = _script_hash(script)
    return found


def differences(facts: Mapping[str, Mapping[str, str]], *, skip: Sequence[str] = ()) -> list[str]:
    """Says, for each fact that is not equal everywhere, who has what.

    Args:
        facts: facts by the process's name.
        skip: names of facts that may differ.

    Example:
        >>> differences({"worker 0": {"Keras": "3.15.1"}, "worker 1": {"Keras": "3.14.0"}})
        ['Keras differs: 3.15.1 on worker 0; 3.14.0 on worker 1. Install the same version everywhere.']
    """
    found = []
    for name in dict.fromkeys(name for each in facts.values() for name in each):
        who: dict[str, list[str]] = {}
        for process, each in facts.items():
            who.setdefault(str(each.get(name, "none")), []).append(process)
        if len(who) > 1 and name not in skip:
            fix = FIXES.get(name, "Install the same version everywhere.")
            found.append(f"{name} differs: {'; '.join(f'{value} on {_some(who[value])}' for value in who)}. {fix}")
    return found


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_MOST_NAMED])
    return shown if len(names) <= _MOST_NAMED else f"{shown} and {len(names) - _MOST_NAMED} more"


def _version(names: Sequence[str]) -> str:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _package_hash(folder: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:_DIGITS]


def _script_hash(script: str | os.PathLike | None) -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None) if script is None else script
    try:
        return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:_DIGITS] if file else "none"
    except OSError:
        return "none"
