"""Tries tfgpu with the oldest, the newest and other versions of TensorFlow and Keras that it supports.

    python tests/versions/run.py                              # every corner; prints what it found
    python tests/versions/run.py --corners colab --check      # one; ends with 1 where something is not right
    python tests/versions/run.py --corners colab --tests 3/4  # and there, a quarter of the fast tests
    python tests/versions/run.py --write docs/measured/versions.md     # the page; corners not tried here stay

Each corner has an environment of its own under `build/versions/`, made on first use. There: `import`, what `pip
install tfgpu` would change, every probe (a process each, with a timeout), a slice of the equivalence matrix, and with
`--tests` a share of the fast tests.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from corners import CORNERS, FOLDER, ROOT, Corner, add_pytest, build, changed_by_pip, find_python

# By what differs between versions: the loss and its divisors, layers, optimizers, data, files, XLA.
CASES = """
    last-of-1 class-weights-uneven mask-uneven activity-regularizer-uneven own-train-step-uneven accumulate-5
    ema-accumulate batchnorm-mask dropout mixup-labels own-state SwapEMAWeights jit BackupAndRestore-within-shuffled
    save-keras
""".split()
RUNS = {"fit": ("mirrored-4", CASES), "sharded": ("mirrored-2", ["weight-regularizer"])}
"""Which cases are run by which path, and on what."""
BY_PROCESSOR = {"no-rows"}
"""Repairs of faults that only some processors have."""
TESTED = """
    attention callbacks checkpoint compat consistency core doctor gpu_emulation interop layers losses models optim
    parallel parameter_server repairs training
""".split()
"""Folders whose tests depend on TensorFlow's and Keras's versions, and need no other library."""


def ask(corner: Corner, *command: object, timeout: float) -> str:
    """Runs Python in a corner with this tree's tfgpu; the last line of its output."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": ""}
    line = [str(corner.interpreter), *map(str, command)]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError((done.stderr or done.stdout).strip()[-2000:])
    return done.stdout.strip().rpartition("\n")[2]


def attempt(corner: Corner, python: str, cases: list[str] | None, tested: tuple[int, int] | None) -> dict:
    """What a corner gives; what fails is under `error`, and what comes after it is missing."""
    found: dict = {}
    try:
        build(corner, python)
        found |= json.loads(ask(corner, ROOT / "tests/versions/here.py", timeout=300))
        found["pip changes"] = changed_by_pip(corner)
        found["probes"] = json.loads(ask(corner, "-m", "tfgpu.repairs.probing", timeout=1200))
        found["cells"] = matrix(corner, cases)
        if tested:
            fast_tests(corner, *tested)
    except (RuntimeError, subprocess.TimeoutExpired, json.JSONDecodeError) as error:
        found["error"] = str(error)
    return found


def matrix(corner: Corner, cases: list[str] | None) -> dict[str, str]:
    """Case -> `equal`, or what it is instead.

    Args:
        corner: the environment.
        cases: those to run by `fit`; else all of `RUNS`.
    """
    found = {}
    for path, (topology, those) in ({"fit": (RUNS["fit"][0], cases)} if cases else RUNS).items():
        written = corner.folder / "cells.json"
        written.unlink(missing_ok=True)
        options = ["--topologies", topology, "--paths", path, "--repairs", "tfgpu.repairs", "--json", written]
        ask(corner, ROOT / "tests/matrix/run.py", *options, "--cases", *those, timeout=1800)
        cells = json.loads(written.read_text())["cells"][f"{path} tfgpu.repairs {topology}"]
        for name, cell in cells.items():
            said = " ".join(filter(None, (cell["status"], cell["message"])))
            found[name if path == "fit" else f"{name} ({path})"] = said
    return found


def fast_tests(corner: Corner, part: int, parts: int) -> None:
    """Runs every `parts`-th file of fast tests, from the `part`-th on; those that fail once more, by themselves."""
    add_pytest(corner)
    paths = sorted(path for folder in TESTED for path in (ROOT / "tests" / folder).rglob("test_*.py"))
    command = [corner.interpreter, "-m", "pytest", "-q", "-rfE", "-o", f"cache_dir={corner.folder / 'cache'}"]
    again = ["--last-failed", "--last-failed-no-failures", "none"]
    for options in (["-n", "2", "--dist", "worksteal", *paths[part - 1 :: parts]], ["-n", "0", *again]):
        done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=1500)
        if done.returncode != 1:
            break
    if done.returncode:
        raise RuntimeError(f"{done.stdout}{done.stderr}".strip()[-4000:])


def faults(found: dict) -> list[str]:
    """What is wrong with a corner, in sentences."""
    said = [found["error"]] if "error" in found else []
    if (kind := found.get("evaluate", "float")) != "float":
        said.append(f"`evaluate` returns {kind} for one number, not float")
    said += [f"{target} has a source that was not tried" for target in found.get("changed", [])]
    said += [f"pip install would change {name}" for name in found.get("pip changes", [])]
    said += [f"the probe {name} gave no answer" for name, there in found.get("probes", {}).items() if there is None]
    gone = {name for name, there in found.get("probes", {}).items() if there is False} - BY_PROCESSOR
    said += [
        f"the repair {name} is in force, but its probe finds no fault"
        for name in found.get("in force", ())
        if name in gone
    ]
    return said + [f"{name} {cell}" for name, cell in found.get("cells", {}).items() if cell != "equal"]


def row(corner: Corner, found: dict) -> str:
    """A line of the page's table."""
    if "versions" not in found:
        return f"| {corner.title} | | | | {corner.python} | **{found['error'].splitlines()[-1]}** | | | |"
    versions = [found["versions"][name] for name in ("TensorFlow", "Keras", "NumPy", "Python")]
    probes, cells = found.get("probes"), found.get("cells")
    faulty = "not run" if probes is None else f"{list(probes.values()).count(True)} of {len(probes)}"
    equal = "not run" if cells is None else f"{list(cells.values()).count('equal')} of {len(cells)}"
    pip = ", ".join(found["pip changes"]) or "nothing" if "pip changes" in found else "not run"
    return f"| {' | '.join([corner.title, *versions, str(found['repairs']) + ' repairs', pip, faulty, equal])} |"


def page(results: dict[str, dict], before: str = "") -> str:
    """The Markdown of `docs/measured/versions.md`.

    Args:
        results: what was found, by the corners' names.
        before: the page as it stands, whose lines on other corners are kept.
    """
    rows, wrong = [], []
    for corner in CORNERS:
        if corner.name in results:
            rows.append(row(corner, results[corner.name]))
            wrong += [f"- {corner.title}: {said.splitlines()[-1]}" for said in faults(results[corner.name])]
        else:
            kept = before.splitlines()
            rows += [line for line in kept if line.startswith(f"| {corner.title} |")]
            wrong += [line for line in kept if line.startswith(f"- {corner.title}: ")]
    notes = "\n".join(["Not as it should be:", "", *wrong]) if wrong else "No case that ran differs."
    template = Path(__file__).with_name("page.md").read_text()
    return template.replace("{rows}", "\n".join(rows)).replace("{notes}", notes)


def share(text: str) -> tuple[int, int]:
    """`2/3` as (2, 3)."""
    part, parts = map(int, text.split("/"))
    return part, parts


def main() -> None:
    names = [corner.name for corner in CORNERS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corners", nargs="*", choices=names, default=names)
    parser.add_argument(
        "--share", type=share, default=(1, 1), metavar="K/N", help="every N-th corner, from the K-th on"
    )
    parser.add_argument("--cases", nargs="*", help="of the matrix, by `fit` alone")
    parser.add_argument("--tests", type=share, metavar="K/N", help="every N-th file of fast tests, from the K-th on")
    parser.add_argument("--check", action="store_true", help="end with 1 where something is not right")
    parser.add_argument("--write", type=Path, help="the page to write")
    options = parser.parse_args()
    part, parts = options.share
    wrong = False
    for corner in [c for c in CORNERS if c.name in options.corners][part - 1 :: parts]:
        began, python = time.monotonic(), find_python(corner.python)
        if python is None:
            wrong = wrong or corner.wanted
            print(f"{corner.title}: not tried, since there is no Python {corner.python} here.", flush=True)
            continue
        found = attempt(corner, python, options.cases, options.tests)
        corner.folder.mkdir(parents=True, exist_ok=True)
        (corner.folder / "result.json").write_text(json.dumps(found, indent=1))
        print(f"{row(corner, found)} {time.monotonic() - began:.0f} s", flush=True)
        for said in faults(found):
            wrong = True
            print(f"  {said}", flush=True)
    if options.write:
        kept = {path.parent.name: json.loads(path.read_text()) for path in FOLDER.glob("*/result.json")}
        options.write.write_text(page(kept, options.write.read_text() if options.write.exists() else ""))
    if options.check and wrong:
        sys.exit(1)


if __name__ == "__main__":
    main()
