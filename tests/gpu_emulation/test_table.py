"""The table of traced steps: what each row would do on GPUs has not changed."""

import json
import subprocess
import sys

import pytest
import record
import traced_rows

from tfgpu.compat import versions

SPREAD = tuple(traced_rows.SPREAD)
FAST = [row for row in traced_rows.TABLE if row.fast]
ADVICE = "If the change is meant, run `python tests/gpu_emulation/record.py` and commit table.json."


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=[pytest.mark.slow] * str(row).endswith("rest")) for row in FAST], ids=str
)
def test_a_step_does_what_the_table_says(row):
    found, recorded = json.loads(json.dumps(traced_rows.measure(row))), record.read().get(str(row), {})
    if versions.is_at_most("tensorflow", "2.17"):  # whose gradient of `tf.gather` takes shapes to the host
        assert found.pop("to host, other bytes") >= recorded.pop("to host, other bytes", 0)
    changed = record.difference(str(row), recorded, found)
    assert not changed, f"{ADVICE}\n{changed}"


def test_every_row_is_recorded():
    names = [str(row) for row in traced_rows.TABLE]
    assert len(names) == len(set(names))
    assert list(record.read()) == names


def test_every_row_keeps_the_rules_of_gpus():
    """Whatever is recorded anew: no tensor of a batch's size to the host, no gradient or weight from GPU to GPU but by
    NCCL, no gradients in conditions.
    """
    traced = {name: facts for name, facts in record.read().items() if "error" not in facts}
    assert len(traced) > 80
    for name, facts in traced.items():
        gathers_rows = name.startswith("predict")  # the outputs, for the caller
        assert facts["to host, bytes of rows"] == 0 or (gathers_rows and " workers" in name), name
        assert facts["between devices, bytes of rows"] == 0 or gathers_rows or name.endswith(SPREAD), name
        assert facts.get(traced_rows.WHOLE, 0) <= 16 or "hierarchical" in name, name  # which sums on one GPU a machine
        assert facts["one order"] and "another worker has" not in facts, name
        assert not facts["gradients in conditions"], name
        on_host = {"Split int32"} if name.endswith("sequence") else set()  # token ids, which come from the host
        is_ragged = name.split()[1] in traced_rows.RAGGED
        if is_ragged:  # these too
            on_host |= {"RaggedTensorToTensor int64", "RaggedTensorToTensor int64/int32"}
        assert facts["between GPUs it fails or is slow"] == [] and set(facts["no kernel for GPUs"]) <= on_host, name
        assert all(" nccl x" in each for each in facts["collectives of a GPU"]), name
        assert " one " not in name or facts["collectives of a GPU"] == [], name
        asks_for_rows = name.startswith("predict")  # how many each worker has; nobody asks whether the data has ended
        assert asks_for_rows or "collectives of the host" not in facts, name
        assert asks_for_rows or all(" float" in each for each in facts["collectives of a GPU"]), name
        if name.startswith("fit") and " even" in name and "error on CPUs" not in facts:
            has_slices = is_ragged and " one " not in name  # of the tables' gradients, in another number in each batch
            assert facts["steps in a call"] == ("one" if has_slices else "many"), name


def test_a_change_shows_as_a_diff_with_the_rows_name():
    before = {"one order": True, "to host, other bytes": 8}
    changed = record.difference("fit cnn", before, {**before, "to host, other bytes": 12})
    assert changed.splitlines() == [
        "--- table.json: fit cnn",
        "+++ traced: fit cnn",
        "@@ -2,3 +2,3 @@",
        '  "one order": true,',
        '- "to host, other bytes": 8',
        '+ "to host, other bytes": 12',
        " }",
    ]
    assert record.difference("fit cnn", before, before) == ""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("strategy", traced_rows.REPLICAS)
def test_all_steps_do_what_the_table_says(strategy):
    command = [sys.executable, record.__file__, "--check", f" {strategy} "]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700)
    assert done.returncode == 0, f"{ADVICE}\n{done.stderr[-5000:]}"
