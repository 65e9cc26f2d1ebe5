"""The commands that mend what was found, as a shell script for a person to read. Nothing here runs it."""

import textwrap
from collections.abc import Sequence

from tfgpu.doctor.check import Check

_WIDTH = 100
_HEAD = """\
#!/bin/sh
# What `tfgpu doctor --fix` would have you run. Nothing has been run. Read it, strike out what you do not want, and
# take it into your shell with `. ./FILE`: what it exports and unsets would be lost in a shell of its own.
"""


def script(checks: Sequence[Check]) -> str:
    """Writes the commands of all problems and warnings, problems first; what only a person can do is a comment.

    Args:
        checks: what `examine` returns.

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
            lines += _comment("mended above")
        else:
            lines += check.command.splitlines()
            seen.add(check.command)
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) if faults else f"{_HEAD}\n# Nothing was found that needs mending.\n"


def _comment(text: str) -> list[str]:
    """Lines that a shell skips, whatever stands in the text."""
    return [f"# {line}" for line in textwrap.wrap(" ".join(text.split()), _WIDTH, break_on_hyphens=False)] or ["#"]
