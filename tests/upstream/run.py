"""Runs the tests that ship in Keras's wheel, once with stock Keras and once with the repairs, and compares them.

    python tests/upstream/run.py            # all that the repairs touch
    python tests/upstream/run.py --set core # distribution, optimizers under a strategy, losses
    python tests/upstream/run.py --source CLONE/keras_rs/src --files layers losses metrics # of a library on Keras

A test that passes with stock Keras and not with the repairs is a fault of ours: the exit code is then 1. Tests that
fail both ways lack a package that Keras's own developers have (jax, torch, grain, orbax); they are listed by reason.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
CORE = (
    "backend/tensorflow/distribute_test.py",
    "backend/tensorflow/optimizer_distribute_test.py",
    "losses/loss_test.py",
    "optimizers/loss_scale_optimizer_test.py",
    "optimizers/optimizer_test.py",
)
ALL = (
    *CORE[:2],
    "callbacks",
    "layers/normalization",
    "layers/regularization",
    "layers/rnn",
    "losses",
    "metrics",
    "optimizers",
    "random",
    "trainers",
)
SETS = {"core": CORE, "all": ALL}
# Tests of what a repair changes on purpose.
CHANGED = {
    "callbacks/backup_and_restore_test.py::BackupAndRestoreCallbackTest::test_best_case_step": (
        "it counts 17 steps where 15 are asked for: two are trained twice after the interruption; here they are not"
    ),
    "backend/tensorflow/optimizer_distribute_test.py::OptimizerDistributeTest::test_gradient_accumulation": (
        "an accumulator read from outside is the sum over replicas, as one device's is the sum over the batch; "
        "test_core.py holds what the test states of the weights"
    ),
}


def source():
    """The folder of Keras's own code."""
    return Path(find_spec("keras").origin).parent / "src"


def files(chosen, folder=None):
    """The test files of a set in a folder of code, Keras's own by default; a folder stands for all that are in it."""
    found = []
    for name in chosen:
        path = (folder or source()) / name
        found += sorted(path.rglob("*_test.py")) if path.is_dir() else [path]
    missing = [str(path) for path in found if not path.is_file()]
    if missing or not found:
        raise FileNotFoundError(f"{folder or 'this Keras'} has no {missing or list(chosen)}")
    return found


def start(paths, *, repaired, folder, clone=None):
    """Starts pytest on these files in a process of its own; its outcomes go to a file.

    `clone` is where the files of another library stand: it is imported from there, with its own conftest.py.
    """
    name = "repaired" if repaired else "stock"
    environ = {
        **os.environ,
        "CUDA_VISIBLE_DEVICES": "",
        "KERAS_BACKEND": "tensorflow",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONFAULTHANDLER": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TFGPU_REPAIR": "1" if repaired else "0",
        "UPSTREAM_OUTCOMES": str(folder / f"{name}.jsonl"),
        "PYTHONPATH": os.pathsep.join(map(str, filter(None, [ROOT, HERE, clone, os.environ.get("PYTHONPATH")]))),
        "UPSTREAM_HAS_CONFTEST": "" if clone is None else "1",
    }
    for variable in ("TF_CONFIG", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        environ.pop(variable, None)
    # No configuration of ours: Keras's files are run as Keras's.
    command = [sys.executable, "-m", "pytest", "-q", "-p", "outcomes", "-p", "no:cacheprovider", "-p", "no:xdist"]
    command += [
        "-c",
        os.devnull,
        "--rootdir",
        str(clone or source()),
        "--continue-on-collection-errors",
        "--timeout",
        "300",
    ]
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen([*command, *map(str, paths)], cwd=folder, env=environ, stdout=log, stderr=log)


def outcomes(path):
    """`{test: (outcome, reason)}`; the worst of a test's parts counts."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        entry = json.loads(line)
        if found.get(entry["test"], ("passed",))[0] != "failed":
            found[entry["test"]] = entry["outcome"], entry["reason"]
    return found


def compare(stock, repaired):
    """What passes with stock Keras and not with the repairs, `{test: why}`; a test without an outcome counts."""
    return {
        test: " ".join(filter(None, repaired.get(test, ("no outcome: its process ended early", ""))))
        for test, (outcome, _) in stock.items()
        if outcome == "passed" and repaired.get(test, ("",))[0] != "passed" and test not in CHANGED
    }


def report(stock, repaired):
    """The text of a comparison: totals, what fails both ways by its reason, what only the repairs break or fix."""
    lines = []
    for name, column in (("stock", stock), ("repaired", repaired)):
        counts = Counter(outcome for outcome, _ in column.values())
        lines.append(f"{name}: " + ", ".join(f"{counts[o]} {o}" for o in ("passed", "failed", "skipped")))
    both = [t for t, (o, _) in stock.items() if o == "failed" and repaired.get(t, ("",))[0] == "failed"]
    lines.append(f"fail both ways: {len(both)}")
    for (file, reason), count in Counter((t.partition("::")[0], stock[t][1][:110]) for t in both).most_common():
        lines.append(f"  {count} in {file}: {reason}")
    for test, reason in CHANGED.items():
        if test in stock:
            lines.append(f"changed on purpose: {test}: {reason}")
    mended = [t for t, (o, _) in repaired.items() if o == "passed" and stock.get(t, ("",))[0] == "failed"]
    lines += [f"passes only with the repairs: {test}" for test in mended]
    broken = compare(stock, repaired)
    lines += [f"BROKEN by the repairs: {test}: {why}" for test, why in broken.items()]
    lines.append(f"passes stock and fails with the repairs: {len(broken)}")
    return "\n".join(lines)


def run(paths, folder, timeout, clone=None):
    """Both columns, side by side; returns their outcomes.

    Raises:
        RuntimeError: pytest did not run to its end with stock Keras, so that there is nothing to compare with.
    """
    running = [start(paths, repaired=repaired, folder=folder, clone=clone) for repaired in (False, True)]
    end = time.monotonic() + timeout
    try:
        codes = []
        for process in running:
            try:
                codes.append(process.wait(max(1, end - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append("timeout")
    finally:
        for process in running:
            process.kill()
            process.wait()
    if codes[0] not in (0, 1):
        raise RuntimeError(f"pytest ended with {codes[0]}: {(folder / 'stock.log').read_text()[-2000:]}")
    return outcomes(folder / "stock.jsonl"), outcomes(folder / "repaired.jsonl")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=SETS, default="all", dest="chosen")
    parser.add_argument("--files", nargs="*", help="files or folders under keras/src instead")
    parser.add_argument("--source", type=Path, help="a library's folder PACKAGE/src instead; --files are in it")
    parser.add_argument("--folder", type=Path, help="keep outcomes and logs there")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for all of it")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="upstream-") as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("*.jsonl"):
            old.unlink()
        code = options.source and options.source.resolve()
        paths = files(options.files or SETS[options.chosen], code)
        stock, repaired = run(paths, folder.resolve(), options.timeout, code and code.parents[1])
    print(report(stock, repaired))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{time.monotonic() - began:.0f} s, {used.ru_utime + used.ru_stime:.0f} s of CPU")
    sys.exit(1 if compare(stock, repaired) else 0)


if __name__ == "__main__":
    main()
