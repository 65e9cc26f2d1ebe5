"""A worker that never starts, or never comes as far as TensorFlow, is named within the startup timeout."""

import json
import os
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
STARTUP_S = 60
# Python runs this before anything else.
HANGS = """
import json, os, time
if os.environ.get("TFGPU_ATTEMPT") == "1" and json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
    time.sleep(3600)
"""


@pytest.mark.parametrize("how", ["hangs", "sleeps", "leaves", "stock"])
def test_a_process_that_never_starts_is_named_and_the_result_is_the_same(how, tmp_path, launched, whole, same_bytes):
    """`stock`: the script makes TensorFlow's own strategy."""
    environ = {}
    if how == "hangs":
        (tmp_path / "sitecustomize.py").write_text(HANGS)
        environ["PYTHONPATH"] = f"{tmp_path}:{ROOT}"
    options = ("--max-restarts", "1", "--startup-timeout", str(STARTUP_S))
    cut = launched(tmp_path / "cut", how, *options, environ=environ)
    began_at, _ = cut.event("start", attempt=1) if how != "hangs" else (cut.began, os.getpid())
    ended_at = cut.said_at("Attempt 2 starts")
    found = cut.finish()
    print(json.dumps({"how": how, "seconds to the end of attempt 1": round(ended_at - began_at, 1)}))
    assert "worker 1 (127.0.0.1:" in cut.said and "did not answer" in cut.said
    assert same_bytes(whole, found)
