"""What docs/guides/troubleshooting.md says of each message: stock Keras raises it, and what happens under tfgpu."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
CASES = ROOT / "tests" / "trouble" / "cases.py"
PAGE = (ROOT / "docs" / "guides" / "troubleshooting.md").read_text()
ENTRIES = re.findall(r"^### (.*?)\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)

# (case, rows in a batch, what stock Keras raises, the message): under tfgpu the same lines train, as on one device.
MENDED = (
    ("steps_per_execution", 4, "InvalidArgumentError", "You must feed a value for placeholder tensor"),
    ("uneven_first_batch", 3, "InvalidArgumentError", "Inputs to operation AddN of type AddN must have the same size"),
    ("jit", 4, "InvalidArgumentError", "Trying to access resource"),
    ("accumulation", None, "RuntimeError", "`merge_call` called while defining a new graph or a tf.function"),
    ("compiled_outside", None, "RuntimeError", "Mixing different tf.distribute.Strategy objects"),
)
# (case, the message, the case under tfgpu, its error, its words)
EXPLAINED = (
    ("late_devices", "cannot be modified after being initialized", "late_devices_by_tfgpu", "MachineError", "too late"),
    (
        "late_strategy",
        "Collective ops must be configured at program startup",
        "late_strategy_by_tfgpu",
        "MachineError",
        "must be made before any other TensorFlow operation",
    ),
    ("out_of_memory", "OOM when allocating tensor with shape[", "out_of_memory", "OutOfMemory", "To use less memory"),
)
# (case, the message): Keras's own, which tfgpu leaves as it is.
LEFT = (
    ("not_a_layer", "Only instances of `keras.Layer` can be added to a Sequential model"),
    ("saved_model_folder", "Keras 3 only supports V3 `.keras` files"),
    ("too_few_batches", "Your input ran out of data; interrupting training"),
    ("other_optimizer", "Skipping variable loading for optimizer"),
)
LOGGED = (
    ("", "failed call to cuInit"),
    ("unknown_length", "Your input ran out of data; interrupting training"),
    ("python_numbers", "triggered tf.function retracing"),
)


# On a busy machine tf.data takes up to a minute to end an iterator.
pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the cases came to, in stock Keras and under tfgpu, and what was written on stderr meanwhile."""
    names = {case[0] for case in (*MENDED, *EXPLAINED, *LEFT, *LOGGED) if case[0]} | {"empty_replica"}
    own = {case[2] for case in EXPLAINED}
    running = {
        "stock": _start({*names, "one_device"}, tmp_path_factory.mktemp("stock")),
        "tfgpu": _start({*names, *own}, tmp_path_factory.mktemp("tfgpu"), TFGPU="1"),
    }
    try:
        return {kind: _read(process) for kind, process in running.items()}
    finally:
        for process in running.values():
            process.kill()


def _start(names: set[str], folder: Path, **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, CASES, *sorted(names)],
        cwd=folder,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "0", "CUDA_VISIBLE_DEVICES": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _read(process: subprocess.Popen) -> dict[str, dict]:
    out, err = process.communicate(timeout=550)
    assert process.returncode == 0, err[-3000:]
    found = {each["case"]: each for each in map(json.loads, out.splitlines())}
    first, *logs = re.split(r"^=== (\w+)\n", err, flags=re.MULTILINE)
    for name, log in zip(logs[::2], logs[1::2], strict=True):
        found[name]["log"] = log
    return {**found, "": {"log": first}}


@pytest.mark.parametrize(("case", "rows", "error", "message"), MENDED, ids=[case[0] for case in MENDED])
def test_what_stock_keras_raises_trains_here(answers, case, rows, error, message):
    stock, mended = answers["stock"][case], answers["tfgpu"][case]
    assert stock.get("raised") == error and message in stock["message"]
    assert "raised" not in mended, mended
    assert np.isfinite(mended["returned"]).all()
    if rows:
        np.testing.assert_allclose(mended["returned"], answers["stock"]["one_device"]["returned"][str(rows)], atol=1e-5)


def test_a_mean_of_nothing_is_no_longer_nan(answers):
    assert np.isnan(answers["stock"]["empty_replica"]["returned"]).all()
    expected = answers["stock"]["one_device"]["returned"]["8"]
    np.testing.assert_allclose(answers["tfgpu"]["empty_replica"]["returned"], expected, atol=1e-5)


@pytest.mark.parametrize(("case", "message", "own", "error", "words"), EXPLAINED, ids=[case[0] for case in EXPLAINED])
def test_what_cannot_be_fixed_is_explained(answers, case, message, own, error, words):
    assert message in answers["stock"][case]["message"]
    explained = answers["tfgpu"][own]
    assert explained["raised"] == error and words in explained["message"]


@pytest.mark.parametrize(("case", "message"), LEFT, ids=[case[0] for case in LEFT])
@pytest.mark.parametrize("kind", ["stock", "tfgpu"])
def test_what_is_left_as_it_is(answers, kind, case, message):
    found = answers[kind][case]
    assert message in (found["message"] if "raised" in found else "\n".join(found["returned"]))


@pytest.mark.parametrize(("case", "message"), LOGGED, ids=[case[1] for case in LOGGED])
@pytest.mark.parametrize("kind", ["stock", "tfgpu"])
def test_what_is_only_logged(answers, kind, case, message):
    assert message in answers[kind][case]["log"]


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_train_where_stock_keras_raises(together, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    script = f"import runpy\nrunpy.run_path({str(CASES)!r})['main'](['two_workers'])"
    for found in together(script, {"worker": 2}).values():
        assert found["raised"] == "ValueError"
        assert "unsupported type (<class 'tensorflow.python.distribute.values.PerReplica'>)" in found["message"]
    monkeypatch.setenv("TFGPU", "1")
    for found in together(script, {"worker": 2}).values():
        assert np.isfinite(found["returned"]).all()


def test_the_page_has_each_message_and_cites_a_thread_for_each():
    for message in [*(case[3] for case in MENDED), *(case[1] for case in (*EXPLAINED, *LEFT, *LOGGED))]:
        assert message in PAGE, message
    assert len(ENTRIES) >= 25
    for title, text in ENTRIES:
        assert re.search(r"(tensorflow|keras)#\d+", text), title


def test_the_tables_name_every_entry():
    table = PAGE.partition("\n## ")[0]
    for title, _ in ENTRIES:
        anchor = re.search(r"\{ *#([\w-]+) *\}", title)
        assert anchor, f"`{title}` needs a short anchor, such as {{ #oom }}"
        assert f"](#{anchor[1]})" in table, title
