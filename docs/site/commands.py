"""The reference of the command line: what `--help-all` says of each command."""

import re
from collections.abc import Iterator
from typing import Any

import typer

from tfgpu import cli
from tfgpu.cli import screen

HEAD = """# Command line

What `tfgpu COMMAND --help-all` prints. `tfgpu COMMAND --help` prints the most common options.
"""
_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def page() -> str:
    """One section a command.

    Example:
        >>> "## tfgpu tune batch-size" in page()
        True
    """
    root = typer.main.get_command(cli.app)
    found = [HEAD]
    for words, context in _contexts(root, typer.Context(root, info_name="tfgpu", **screen.HELP)):
        context.meta[screen.HELP["help_option_names"][-1]] = True
        text = _COLORS.sub("", context.get_help())
        found.append(f"## {words}\n\n```text\n{text.strip()}\n```\n")
    return "\n".join(found)


def _contexts(command: Any, context: Any) -> Iterator[tuple[str, Any]]:
    yield context.command_path, context
    for name, each in getattr(command, "commands", {}).items():
        yield from _contexts(each, typer.Context(each, info_name=name, parent=context))
