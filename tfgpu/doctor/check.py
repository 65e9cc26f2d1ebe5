"""The result of one check of the doctor."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


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
