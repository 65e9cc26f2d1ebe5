"""The facts that must be equal on all processes of a run, and the messages on differences."""

import hashlib
import os
import platform
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from tfgpu.redact import Cleaner

PACKAGES = {"TensorFlow": ("tensorflow", "tensorflow-cpu"), "Keras": ("keras",), "tfgpu": ("tfgpu",)}
SCRIPT = "script"
ARGUMENTS, SEED = "arguments", "seeds"
MAY_DIFFER = {ARGUMENTS: "Use the same everywhere, unless intended."}
MAY_DIFFER[SEED] = "Set the same everywhere, unless each worker reads its own data."
"""Facts that only cause a warning: `--rank 0`, or a seed that shuffles each worker's own data, may be intended."""
LONGEST = 1024
"""Most characters of a fact; longer ones end with their hash."""
LONGEST_NAME = 64
# By the fact's name, or the part before its colon; all other facts are versions.
FIXES = {SCRIPT: "Give every process the same file.", "tfgpu's code": "Install the same tfgpu everywhere."}
FIXES |= dict.fromkeys(("TFGPU_SEED", "PYTHONHASHSEED"), "Set the same value everywhere.")
FIXES["recipe"] = "Give every process the same settings."
FIXES["communication"] = "Give every worker the same devices and the same options of `tfgpu.strategy`."
FIXES["seed before the strategy"] = "Set one everywhere, or nowhere."
_MOST_NAMED = 8
_DIGITS = 12


def gather(script: str | os.PathLike | None = None) -> dict[str, str]:
    """Collects this process's versions, seeds and code hashes, without importing TensorFlow.

    Args:
        script: the script; `None` is the running program.

    Returns:
        Short texts by name.
    """
    found = {"Python": platform.python_version()}
    found |= {title: _version(names) for title, names in PACKAGES.items()}
    found |= {name: os.environ.get(name, "not set")[:64] for name in ("PYTHONHASHSEED", "TFGPU_SEED")}
    found["tfgpu's code"] = package_hash(Path(__file__).parent.parent)
    found[SCRIPT] = _script_hash(script)
    return found


def arguments(words: Sequence[str] | None = None) -> str:
    """The script's arguments for the comparison, without secrets, since they are sent and appear in warnings.

    Args:
        words: the arguments; `None` is `sys.argv[1:]`.

    Example:
        >>> arguments(["--rank", "0"])
        '--rank 0'
    """
    return _shortened(Cleaner(os.environ).hide(shlex.join(sys.argv[1:] if words is None else words)), LONGEST)


def of_settings(settings: Mapping[str, object]) -> dict[str, str]:
    """Converts a recipe's settings to facts, without secrets.

    Example:
        >>> of_settings({"epochs": 3})
        {'recipe: epochs': '3'}
    """
    hide = Cleaner(os.environ).hide
    return {f"recipe: {name}": _shortened(hide(str(value)), 200) for name, value in settings.items()}


def fitting(facts: Mapping[str, str]) -> dict[str, str]:
    """Shortens facts that are too long for a message; a hash replaces their end.

    Example:
        >>> fitting({"note": "short"}), len(fitting({"note": "y" * 2000})["note"])
        ({'note': 'short'}, 1024)
    """
    return {_shortened(str(name), LONGEST_NAME): _shortened(str(value), LONGEST) for name, value in facts.items()}


def advice(facts: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Returns messages on differences that may be intended.

    Args:
        facts: facts by the name of the process.

    Example:
        >>> advice({"worker 0": {"arguments": "--lr 1 --rank 0"}, "worker 1": {"arguments": "--lr 1 --rank 1"}})
        ['arguments differ: ... --rank 0 on worker 0; ... --rank 1 on worker 1. Use the same everywhere, ...']
    """
    found = []
    for name, fix in MAY_DIFFER.items():
        who = _who(facts, name)
        if len(who) > 1:
            words = [value.split(" ") for value in who]
            alike = max(len(os.path.commonprefix(words)) - 1, 0)  # keeps the option's name before the difference
            told = [("... " if alike else "") + (" ".join(each[alike:])[:100] or "none") for each in words]
            told = [f"{text} on {_some(names)}" for text, names in zip(told, who.values(), strict=True)]
            more = f"; and {len(told) - _MOST_NAMED} others" if len(told) > _MOST_NAMED else ""
            found.append(f"{name} differ: {'; '.join(told[:_MOST_NAMED])}{more}. {fix}")
    return found


def differences(facts: Mapping[str, Mapping[str, str]], *, skip: Sequence[str] = ()) -> list[str]:
    """Returns a message for each fact that differs between processes.

    Args:
        facts: facts by the name of the process.
        skip: names of facts that may differ.

    Example:
        >>> differences({"worker 0": {"Keras": "3.15.1"}, "worker 1": {"Keras": "3.14.0"}})
        ['Keras differs: 3.15.1 on worker 0; 3.14.0 on worker 1. Install the same version everywhere.']
    """
    found = []
    for name in dict.fromkeys(name for each in facts.values() for name in each):
        who = _who(facts, name)
        if len(who) > 1 and name not in skip:
            fix = FIXES.get(name.partition(":")[0], "Install the same version everywhere.")
            found.append(f"{name} differs: {'; '.join(f'{value} on {_some(who[value])}' for value in who)}. {fix}")
    return found


def _who(facts: Mapping[str, Mapping[str, str]], name: str) -> dict[str, list[str]]:
    """The processes by the value of a fact."""
    found: dict[str, list[str]] = {}
    for process, each in facts.items():
        found.setdefault(str(each.get(name, "none")), []).append(process)
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


def package_hash(folder: Path) -> str:
    """The hash of all Python files in a folder."""
    whole = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(folder).as_posix()} {len(content)}\n".encode() + content)
    return whole.hexdigest()[:_DIGITS]


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - _DIGITS - 4]}... {_hash(text.encode())}"


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_DIGITS]


def _script_hash(script: str | os.PathLike | None) -> str:
    file = getattr(sys.modules.get("__main__"), "__file__", None) if script is None else script
    try:
        return _hash(Path(file).read_bytes()) if file else "none"
    except OSError:
        return "none"
