"""One thing that the doctor looked at."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Args:
        name: such as `"TensorFlow"`.
        status: `"ok"`, `"warning"` (training works, but could do better) or `"problem"` (it does not work, or
            leaves a GPU unused).
        found: what is there, in a few words.
        fix: what mends it, for a person; `""` when the status is `"ok"`. Left out, it is `command`.
        command: what a shell would run, a line or more; `""` where only a person can mend it.
        figures: what was measured, by name; rates are in bytes or operations a second.

    Example:
        >>> Check("TF_CONFIG", "problem", "it is no JSON", command="unset TF_CONFIG").fix
        'unset TF_CONFIG'
    """

    name: str
    status: str
    found: str
    fix: str = ""
    command: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.command and not self.fix:
            object.__setattr__(self, "fix", self.command)


def ok(name: str, found: str) -> Check:
    """A check that found nothing wrong."""
    return Check(name, "ok", found)


def worst(name: str, fine: str, faults: Iterable[Check]) -> list[Check]:
    """The faults, or one check that is ok where there is none."""
    return list(faults) or [ok(name, fine)]
