"""A pytest plugin for Keras's own tests: installs the repairs where asked, writes each test's outcome as a JSON line.

run.py loads it by `-p outcomes` in a process of its own; `UPSTREAM_OUTCOMES` names the file, and `TFGPU_REPAIR=0`
leaves Keras as it is.
"""

import importlib.util
import json
import os
import sys
from types import ModuleType

import pytest

# Keras's tests import these at the top for a few tests of theirs; without them whole files would not be read.
EXTRAS = ("jax", "jax.experimental", "jax.experimental.sparse", "torch", "grain")
_placed = []


class _Any(type):
    """A class that has any attribute, each such a class again: type checks against it say no."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


class _Placeholder(ModuleType):
    """A module that has any name, each a class without content."""

    __getattr__ = _Any.__getattr__


def pytest_configure(config):
    # Keras's own conftest.py is not in its wheel; this is all that its tests need of it under TensorFlow.
    config.addinivalue_line("markers", "requires_trainable_backend: the backend can train")
    if os.environ["TFGPU_REPAIR"] != "0":
        from tfgpu import repairs

        assert repairs.repair_keras() == tuple(fix.name for fix in repairs.all_repairs())
    placed = {name: _Placeholder(name) for name in EXTRAS if not _is_there(name.partition(".")[0])}
    if not os.environ.get("UPSTREAM_HAS_CONFTEST"):
        placed["conftest"] = ModuleType("conftest")
        placed["conftest"].skip_if_backend = _skip_if_backend
    sys.modules.update(placed)
    _placed.extend(placed)


def pytest_collection_finish():
    # Gone before the first test: Keras asks at run time which extras there are.
    while _placed:
        sys.modules.pop(_placed.pop(), None)


def _is_there(package):
    return importlib.util.find_spec(package) is not None


def _skip_if_backend(name, reason):
    return pytest.mark.skipif(name == "tensorflow", reason=reason)


def pytest_collectreport(report):
    if report.failed:
        _write(report.nodeid, "failed", report)


def pytest_runtest_logreport(report):
    # A test has three parts: its setup may skip or fail, its call tells how it went, its teardown may fail.
    if report.when == "call" or report.outcome != "passed":
        _write(report.nodeid, report.outcome, report)


def _write(test, outcome, report):
    crash = getattr(report.longrepr, "reprcrash", None)
    reason = crash.message if crash else report.longrepr[-1] if isinstance(report.longrepr, tuple) else ""
    if outcome != "passed" and not reason:
        reason = str(report.longrepr).strip().rpartition("\n")[2]
    line = {"test": test, "outcome": outcome, "reason": reason.partition("\n")[0][:200]}
    with open(os.environ["UPSTREAM_OUTCOMES"], "a") as file:
        print(json.dumps({**line, "seconds": round(getattr(report, "duration", 0), 2)}), file=file)
