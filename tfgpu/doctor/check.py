"""The result of one check of the doctor, and the fixes of several as a shell script. Nothing here runs it."""

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_WIDTH = 100
_HEAD = """\
#!/bin/sh
# Fixes suggested by `tfgpu doctor --fix`. Nothing has been run. Read it, remove what you do not want, and run it in
# your shell with `. ./FILE`, so that the variables it exports and unsets take effect.
"""


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
        name: such as `"TensorFlow"`.
        status: `"ok"`, `"warning"` (training works, but could be better) or `"problem"` (training fails, or leaves a
            GPU unused).
        found: a short description of what was found.
        fix: how to fix it, for a person; `""` if the status is `"ok"`. Default: `command`.
        command: shell commands that fix it, one per line; `""` if only a person can fix it.
        figures: measured values by name; rates are in bytes or operations per second.
        details: what `found` only counts, one by one.

    Example:
        >>> Check("TF_CONFIG", "problem", "it is not JSON", command="unset TF_CONFIG").fix
        'unset TF_CONFIG'
    """

    name: str
    status: str
    found: str
    fix: str = ""
    command: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)
    details: Sequence[Mapping[str, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.command and not self.fix:
            object.__setattr__(self, "fix", self.command)


def ok(name: str, found: str) -> Check:
    """Makes a check without a problem."""
    return Check(name, "ok", found)


def worst(name: str, fine: str, faults: Iterable[Check]) -> list[Check]:
    """Returns the faults, or a check that is ok if there are none."""
    return list(faults) or [ok(name, fine)]


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
