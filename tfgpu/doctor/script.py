"""Writes the fixes as a shell script for a person to read. Nothing here runs it."""

import textwrap
from collections.abc import Sequence

from tfgpu.doctor.check import Check

_WIDTH = 100
_HEAD = """\
#!/bin/sh
# Fixes suggested by `tfgpu doctor --fix`. Nothing has been run. Read it, remove what you do not want, and run it in
# your shell with `. ./FILE`, so that the variables it exports and unsets take effect.
"""


def script(checks: Sequence[Check]) -> str:
    """Writes the commands for all problems and warnings, problems first; manual fixes become comments.

    Args:
        checks: the result of `examine`.

    Returns:
        A shell script, each command once.

    Example:
        >>> print(script([Check("Legacy Keras", "problem", "in use", command="unset TF_USE_LEGACY_KERAS")]))
        #!/bin/sh
        ...
        # problem: Legacy Keras: in use
        unset TF_USE_LEGACY_KERAS
        <BLANKLINE>
    """
    faults = sorted((check for check in checks if check.status != "ok"), key=lambda check: check.status != "problem")
    parts, seen = [_HEAD], set()
    for check in faults:
        lines = [*_comment(f"{check.status}: {check.name}: {check.found}")]
        if not check.command:
            lines += _comment(f"by hand: {check.fix}")
        elif check.command in seen:
            lines += _comment("fixed above")
        else:
            lines += check.command.splitlines()
            seen.add(check.command)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) if faults else f"{_HEAD}\n# Nothing to fix.\n"


def _comment(text: str) -> list[str]:
    """Formats a text as shell comments."""
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH, break_on_hyphens=False)] or ["#"]
