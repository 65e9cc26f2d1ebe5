"""What this process's control group allows it: a container's limits, of both versions of Linux's groups."""

import contextlib
import os
from pathlib import Path


def cpu_quota(root: Path = Path("/")) -> float | None:
    """The cores' worth of time that this process's control group gets; `None` where there is no limit."""
    for path in _groups(root, "cpu"):
        words = _text(path / "cpu.max").split()
        if len(words) == 2 and words[0] != "max":
            return int(words[0]) / int(words[1])
        quota, period = _text(path / "cpu.cfs_quota_us").strip(), _text(path / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            return int(quota) / int(period)
    return None


def memory_limit(root: Path = Path("/")) -> int | None:
    """The bytes that this process's control group may use; `None` where there is no limit."""
    for path in _groups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _text(path / name).strip()
            if text.isdecimal() and int(text) < 2**60:  # Version 1 writes nearly 2**63 for none.
                return int(text)
    return None


def cores(root: Path = Path("/")) -> float:
    """The cores that this process may use: its affinity, and its control group's quota where there is one."""
    available = len(os.sched_getaffinity(0))
    quota = cpu_quota(root)
    return float(available) if quota is None else min(float(available), quota)


def _groups(root: Path, controller: str) -> list[Path]:
    """The folders of the control group that this process is in, and of the ones above it, the nearest first."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
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


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text()
    return ""
