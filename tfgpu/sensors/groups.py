"""CPU and memory limits of this process's control group.

Everything is read below `root`, a folder with `proc` and `sys`, such as `/`.
"""

import contextlib
from pathlib import Path


def cpu_quota(root: Path) -> float | None:
    """The CPU quota of this process's control group in cores; `None` without a limit."""
    for path in _groups(root, "cpu"):
        words = text_of(path / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        quota, period = text_of(path / "cpu.cfs_quota_us").strip(), text_of(path / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None


def memory_limit(root: Path) -> int | None:
    """The memory limit of this process's control group in bytes; `None` without a limit."""
    found = _limited(root)
    return None if found is None else found[0]


def memory_used(root: Path) -> int | None:
    """The memory use of the limited control group in bytes, without reclaimable cache; `None` without a limit."""
    found = _limited(root)
    if found is None or not (now := text_of(found[1]).strip()).isdecimal():
        return None
    lines = [line.split() for line in text_of(found[1].parent / "memory.stat").splitlines()]
    kept = dict(words for words in lines if len(words) == 2)
    return max(0, int(now) - int(kept.get("inactive_file", kept.get("total_inactive_file", 0))))


def _limited(root: Path) -> tuple[int, Path] | None:
    """The nearest group's limit, and the file with its use."""
    for path in _groups(root, "memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            text = text_of(path / limit).strip()
            if text.isdecimal() and int(text) < 2**60:  # Version 1 writes nearly 2**63 for no limit.
                return int(text), path / used
    return None


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's control group and its parents, the nearest first."""
    found = []
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            top = root / "sys/fs/cgroup"
        elif controller in names.split(","):
            top = root / "sys/fs/cgroup" / controller
        else:
            continue
        own = top / path.strip().lstrip("/")
        found += [each for each in (own, *own.parents) if each == top or top in each.parents]
    return found


def text_of(path: Path) -> str:
    """The content of a file, such as one in `/proc`; empty if it cannot be read."""
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""
