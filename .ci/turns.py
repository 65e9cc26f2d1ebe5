"""Chooses which slow tests and long checks a run of `.ci/run` takes.

What a change touches comes first, all of it up to a quarter of an hour; a share of the rest follows, which the number
of commits picks. The same commit always gets the same choice.

    python .ci/turns.py share 5       # K/5: which fifth of something
    python .ci/turns.py share 4 5     # K/4: which quarter, where a fifth is chosen; each fifth gets all quarters
    python .ci/turns.py matrix        # K/N: which part of the matrix
    python .ci/turns.py parts         # the long checks of this run, one a line
    python .ci/turns.py slow 300 PATH # slow tests there that take about 300 CPU seconds in all, one a line
    python .ci/turns.py keep FILE     # adds what `pytest --costs FILE` has measured to `costs.json`
"""

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
COSTS = Path(__file__).with_name("costs.json")
DEFAULT_COST_S = 25.0
"""CPU seconds of a slow test in a file that `costs.json` does not have."""
TOUCHED_S, TOUCHED_TIMES = 1800.0, 5
"""CPU seconds that slow tests of a change's own may take (a quarter of an hour on two cores), and times the budget."""
# Multiples of the golden ratio spread evenly over a circle, at any stride: every turn comes, however many commits
# lie between two runs.
GOLDEN = 0.6180339887498949

# Tests of a folder of the package that stand in folders of another name.
RELATED = {
    "callbacks": ("tests/faults/",),
    "checkpoint": ("tests/callbacks/", "tests/faults/"),
    "cli": ("tests/test_cli.py",),
    "cluster": ("tests/launch/",),
    "launch": ("tests/faults/", "tests/test_run.py"),
    "rendezvous": ("tests/faults/",),
    "sensors": ("tests/callbacks/test_monitor.py", "tests/test_top.py"),
}
# The long checks that take turns, and the paths whose change makes them run in any case.
PARTS = {
    "keras": ("tfgpu/compat/", "tfgpu/core/", "tfgpu/repairs/", "tests/upstream/"),
    "versions": ("tfgpu/compat/", "tests/versions/", "setup.cfg"),
    "fuzzing": ("tfgpu/redact/", "tfgpu/cluster/", "tests/security/"),
    "engines": ("tfgpu/launch/", "tests/launch/"),
    "libraries": ("tfgpu/interop/", "tests/interop/"),
}
# Where a change can make replicas differ from one device: an eighth of the matrix then, else a 24th.
EQUALITY = ("tfgpu/compat/", "tfgpu/core/", "tfgpu/repairs/", "tfgpu/optim/", "tfgpu/parallel/", "tests/matrix/")


def commits() -> int:
    """The number of commits up to this one."""
    return int(_git("rev-list", "--count", "HEAD"))


def position(number: int) -> float:
    """Where a turn begins, from 0 to 1."""
    return number * GOLDEN % 1


def landed() -> str:
    """The newest commit that has landed, of a change that has not; else nothing."""
    if given := os.environ.get("TFGPU_CI_BASE"):
        return given
    head = _git("rev-parse", "HEAD")
    for main in ("origin/HEAD", "origin/main", "main"):
        if (found := _git("merge-base", main, "HEAD", default="")) and found != head:
            return found
    return ""


def base() -> str:
    """The commit that this work is compared with: what has not landed yet, or else the commits of the last day."""
    if found := landed():
        return found
    before = int(_git("log", "-1", "--format=%ct")) - 86400
    return _git("rev-list", "-1", f"--before={before}", "HEAD") or _git("rev-list", "--max-parents=0", "HEAD")


def changed() -> list[str]:
    """The files that differ from `base()`; of a file that was moved, both names."""
    return _git("diff", "--name-only", "--no-renames", base(), "HEAD").splitlines()


@dataclass
class Touched:
    """Which tests a change touches.

    Args:
        paths: the files that changed.
    """

    paths: Sequence[str]
    files: set[str] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)
    names: set[str] = field(default_factory=set)

    def __post_init__(self):
        for path in map(Path, self.paths):
            inside = path.parts[1:-1]
            if path.suffix == ".md" or path.suffix == ".ipynb" or path.suffix == ".yaml":
                self.names |= {path.name, path.stem}
            elif path.parts[0] == "tests" and path.name.startswith("test_"):
                self.files.add(str(path))
            elif path.parts[0] == "tests" and inside:
                self.folders.add(f"{path.parent}/")
            elif path.parts[0] == "tfgpu":
                self._add_mirrors(path.stem, inside)

    def _add_mirrors(self, stem: str, inside: tuple[str, ...]) -> None:
        for depth in range(len(inside) + 1):
            self.files.add("/".join(["tests", *inside[:depth], f"test_{stem}.py"]))
        if inside:
            self.files |= {"/".join(["tests", *inside[:at], f"test_{word}.py"]) for at, word in enumerate(inside)}
            self.folders |= {f"tests/{inside[0]}/", *RELATED.get(inside[0], ())}

    def level(self, test: str) -> int:
        """How near a test is to the change: 0 is its own tests, 1 those of its folder, 2 the rest.

        Args:
            test: pytest's name of it, such as `"tests/data/test_cache.py::test_size[2]"`.
        """
        file, _, name = test.partition("::")
        words = name.partition("[")[2].rstrip("]")
        if file in self.files or any(words == each or words.startswith(f"{each}-") for each in self.names):
            return 0
        return 1 if any(file.startswith(folder) for folder in self.folders) else 2


def cost_s(test: str, costs: dict[str, float]) -> float:
    """The CPU seconds that a slow test is expected to take: the test's, its function's or its file's."""
    file, function = test.partition("::")[0], test.partition("[")[0]
    return next((costs[key] for key in (test, function, file) if key in costs), DEFAULT_COST_S)


def pick(
    tests: Iterable[str],
    *,
    touched: Touched,
    costs: dict[str, float],
    budget_s: float,
    turn: float,
    touched_s: float = 0.0,
) -> list[str]:
    """The tests of one run: those of the change, then as many of the rest as fit the budget.

    Args:
        tests: their names.
        touched: the change.
        costs: CPU seconds by test, function or file.
        budget_s: CPU seconds in all.
        turn: `position()`: with which of the rest to begin.
        touched_s: CPU seconds that the change's own tests may take, where they do not fit the budget.
    """
    levels: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for test in sorted(tests, key=lambda test: (zlib.crc32(test.encode()), test)):
        levels[touched.level(test)].append(test)
    chosen, taken_s = [], 0.0
    for level, found in levels.items():
        most_s = budget_s if level else max(budget_s, touched_s)
        first = int(turn * len(found))
        for test in [*found[first:], *found[:first]]:
            cost = cost_s(test, costs)
            if cost > most_s:
                continue  # `make test-all` has it.
            if taken_s + cost > most_s:
                return chosen
            chosen.append(test)
            taken_s += cost
    return chosen


def share(parts: int, turn: float, within: int = 1) -> str:
    """`K/N`, the form that `tests/matrix/run.py --share` takes.

    Args:
        parts: N.
        turn: `position()`.
        within: into how many parts `turn` is divided already. Each of them gets all of these.
    """
    return f"{int(turn * within % 1 * parts) + 1}/{parts}"


def parts(paths: Sequence[str], turn: float) -> list[str]:
    """The long checks of one run: the one whose turn it is, and those that the change touches."""
    due = list(PARTS)[int(turn * len(PARTS))]
    return [part for part, starts in PARTS.items() if part == due or any(path.startswith(starts) for path in paths)]


def keep(lines: Iterable[str], known: dict[str, float]) -> dict[str, float]:
    """The known costs of files that are there, and by function what a run with `--costs FILE` has written."""
    known = {test: cost for test, cost in known.items() if (ROOT / test.partition("::")[0]).exists()}
    found: dict[str, list[float]] = {}
    for each in map(json.loads, lines):
        if each["slow"]:
            found.setdefault(each["test"].partition("[")[0], []).append(each["cpu_s"])
    return dict(sorted((known | {name: round(sum(each) / len(each), 1) for name, each in found.items()}).items()))


def slow(paths: Sequence[str]) -> list[str]:
    """The names of the slow tests in files and folders."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "slow", "-p", "no:cacheprovider", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    if done.returncode not in (0, 5):  # 5: there is none
        sys.exit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def print_slow(budget_s: float, paths: Sequence[str]) -> None:
    """Prints the slow tests of this run; on standard error, how many of how many."""
    tests, touched, costs = slow(paths), Touched(changed()), json.loads(COSTS.read_text())
    touched_s = min(TOUCHED_S, TOUCHED_TIMES * budget_s) if landed() else 0.0
    turn = position(commits())
    chosen = pick(tests, touched=touched, costs=costs, budget_s=budget_s, turn=turn, touched_s=touched_s)
    print("\n".join(chosen))
    for level, whose in enumerate(("of what changed", "of their folders", "others")):
        every, taken = ([test for test in of if touched.level(test) == level] for of in (tests, chosen))
        print(f"slow tests {whose}: {len(taken)} of {len(every)}", file=sys.stderr)
    total_s = sum(cost_s(test, costs) for test in chosen)
    print(f"about {total_s:.0f} CPU seconds of {max(budget_s, touched_s):.0f}", file=sys.stderr)


def _git(*words: str, default: str | None = None) -> str:
    done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode and default is not None:
        return default
    done.check_returncode()
    return done.stdout.strip()


def main(words: list[str]) -> None:
    """Answers the command line."""
    match words:
        case ["share", count]:
            print(share(int(count), position(commits())))
        case ["share", count, within]:
            print(share(int(count), position(commits()), int(within)))
        case ["matrix"]:
            touched = any(path.startswith(EQUALITY) for path in changed())
            print(share(8 if touched else 24, position(commits())))
        case ["slow", budget_s, *paths]:
            print_slow(float(budget_s), paths)
        case ["parts"]:
            print("\n".join(parts(changed(), position(commits()))))
        case ["keep", file]:
            known = keep(Path(file).read_text().splitlines(), json.loads(COSTS.read_text()))
            COSTS.write_text(json.dumps(known, indent=1) + "\n")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
