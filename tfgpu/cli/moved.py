"""Earlier spellings of commands and options: each is refused, and the error names what to write.

The parser finds them, so that a script's own arguments may have any name.
"""

from collections.abc import Sequence

COMMANDS = {
    "find": "tune batch-size` or `tfgpu tune learning-rate",
    "find batch-size": "tune batch-size",
    "find learning-rate": "tune learning-rate",
    "bench": "profile input",
    "bench input": "profile input",
    "verify": "compare weights",
}
"""Old command -> new command."""
_RECIPE = "RECIPE, the first argument"
OPTIONS: dict[str, dict[str, str]] = {
    "": {"--global-batch": "--batch"},
    "train": {"--config": _RECIPE, "-c": _RECIPE},
    "launch": {"--silence": "--heartbeat-timeout", "--grace": "--grace-period", "--scheduling": "--scheduling-timeout"},
    "tune batch-size": {"--rounds": "--repeats", "--memory-limit": "--device-memory"},
    "profile input": {"--config": _RECIPE, "-c": _RECIPE},
    "plan": {
        "-n": "--devices",
        "--option": "--model-option",
        "--top": "--limit",
        "--memory": "--device-memory",
        "--per-host": "--devices-per-host",
        "--json FILE": "--json-to FILE",
    },
    "doctor": {"--workers": "--hosts"},
}
"""By command ("" is all): old option -> new. `--json FILE` is an option that no longer takes a value."""

FOREIGN = {
    "--lr": "--learning-rate",
    "--batch-size": "--batch",
    "--out": "--output",
    "--gpus": "--devices",
    "--np": "--workers",
    "--nproc": "--workers",
    "--nproc-per-node": "--workers",
    "--num-processes": "--workers",
    "--num-workers": "--workers",
    "--nnodes": "--nodes",
}
"""What other tools call an option -> its name here, where the command has it."""


def command(words: str) -> str | None:
    """What to write instead of an old command.

    Example:
        >>> command("bench input")
        '`tfgpu bench input` is now `tfgpu profile input`.'
    """
    return f"`tfgpu {words}` is now `tfgpu {COMMANDS[words]}`." if words in COMMANDS else None


def foreign(name: str | None, known: Sequence[str]) -> str | None:
    """The question that answers an option of another tool.

    Args:
        name: the option that the parser does not know.
        known: the options that the command has.

    Example:
        >>> foreign("--lr", ["--learning-rate", "--list"])
        'No such option: --lr. Did you mean --learning-rate?'
    """
    new = FOREIGN.get((name or "").replace("_", "-"))
    return f"No such option: {name}. Did you mean {new}?" if new in known else None


def option(command: str, name: str | None, words: Sequence[str] = ()) -> str | None:
    """What to write instead of an old option.

    Args:
        command: the command, such as `"tune batch-size"`.
        name: the option that the parser does not know; None if it found an extra value.
        words: everything that was typed.

    Example:
        >>> option("doctor", "--workers")
        '`tfgpu doctor --workers` is now `--hosts`.'
    """
    known = OPTIONS.get(command, {})
    if name is None:
        name = next((old for old in known if " " in old and old.split()[0] in words), "")
    new = known.get(name) or OPTIONS[""].get(name)
    if new is None:
        return None
    new = new if new.startswith(("-", "RECIPE")) else f"tfgpu {new}"
    return f"`tfgpu {command} {name}` is now {new if new.startswith('RECIPE') else f'`{new}`'}."
