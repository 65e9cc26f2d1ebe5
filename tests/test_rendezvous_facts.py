"""Real pairs of processes that differ in one fact, and the message that names it."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tfgpu
from tfgpu.rendezvous import facts

pytestmark = pytest.mark.processes
PACKAGE = Path(tfgpu.__file__).parent
HASH = r"[0-9a-f]{12}"

TRAIN = """
import os, sys
import keras, numpy as np, tensorflow as tf
import tfgpu

before, after = os.environ.get("BEFORE"), os.environ.get("AFTER")
if before:
    keras.utils.set_random_seed(int(before))
strategy = tfgpu.strategy()
if after:
    keras.utils.set_random_seed(int(after))
with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.arange(16, dtype="float32").reshape(8, 2)
data = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).shuffle(8).batch(4)
if "OWN" in os.environ:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    data = data.with_options(options)
model.fit(data, epochs=1, verbose=0)
print("trained")
"""


class Pair:
    """Two workers of one cluster, each with its own folder.

    Args:
        folder: where theirs are made.
        addresses: `free_addresses` of `tests/conftest.py`.
    """

    def __init__(self, folder: Path, addresses):
        self.folders = [folder / f"host{rank}" for rank in range(2)]
        for each in self.folders:
            each.mkdir()
            (each / "train.py").write_text(TRAIN)
        workers = addresses(2)
        self._places = [{"cluster": {"worker": workers}, "task": {"type": "worker", "index": at}} for at in range(2)]

    def run(self, *words: list[str], environ=({}, {})) -> list[tuple[int, str, str]]:
        """Returns exit code, stdout and stderr of each; `words` are for both, or one each."""
        variables = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TFGPU_STARTUP_TIMEOUT": "150"}
        running = [
            subprocess.Popen(
                [sys.executable, "-m", *words[rank % len(words)]],
                env={**os.environ, **variables, "TF_CONFIG": json.dumps(self._places[rank]), **environ[rank]},
                cwd=self.folders[rank],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [process.communicate(timeout=550) for process in running]
        finally:
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                process.wait()
        return [(process.returncode, *each) for process, each in zip(running, said, strict=True)]


@pytest.fixture
def pair(tmp_path, addresses):
    return Pair(tmp_path, addresses)


SCRIPT = ["tfgpu.run", "train.py"]


def check_refused(found, *words: str) -> None:
    """Checks that both have ended with the exit code for invalid input and this message."""
    for code, out, error in found:
        assert code == 2 and "trained" not in out, found
        for each in words:
            assert each in " ".join(error.split()), error


def test_a_script_that_was_edited_on_one_host_is_named_before_tensorflow_starts(pair):
    with open(pair.folders[1] / "train.py", "a") as file:
        file.write("# edited\n")
    found = pair.run(SCRIPT)
    here, there = (facts.gather(folder / "train.py")["script"] for folder in pair.folders)
    check_refused(found, f"script differs: {here} on worker 0; {there} on worker 1. Give every process the same file.")
    assert all("tfgpu's code" not in error and error.startswith("error: ") for _, _, error in found)


def test_another_line_in_tfgpu_on_one_host_is_named(pair):
    copy = pair.folders[1] / "other" / "tfgpu"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with open(copy / "errors.py", "a") as file:
        file.write("\n# another line\n")
    paths = [str(copy.parent) if rank else str(PACKAGE.parent) for rank in range(2)]
    found = pair.run(SCRIPT, environ=[{"PYTHONPATH": path} for path in paths])
    here, there = facts.package_hash(PACKAGE), facts.package_hash(copy)
    words = f"tfgpu's code differs: {here} on worker 0; {there} on worker 1. Install the same tfgpu everywhere."
    check_refused(found, words)
    assert here != there and not any("script differs" in error for _, _, error in found)


@pytest.mark.slow
def test_each_setting_of_a_recipe_that_differs_is_named(pair):
    common = ["tfgpu", "train", "--data", "digits", "--strategy", "multi_worker", "--epochs"]
    found = pair.run([*common, "1"], [*common, "2", "--seed", "5"])
    check_refused(
        found,
        "recipe: epochs differs: 1 on worker 0; 2 on worker 1. Give every process the same settings.",
        "recipe: seed differs: 0 on worker 0; 5 on worker 1. Give every process the same settings.",
    )
    assert not any("global_batch" in error for _, _, error in found)


@pytest.mark.slow
def test_equal_ones_train_and_arguments_that_differ_are_a_warning(pair):
    words = [[*SCRIPT, "--rate", "1", "--rank", str(rank)] for rank in range(2)]
    found = pair.run(*words, environ=[{"BEFORE": "7"}] * 2)
    assert [(code, out.split()[-1:]) for code, out, _ in found] == [(0, ["trained"])] * 2, found
    expected = (
        "arguments differ: ... --rank 0 on worker 0; ... --rank 1 on worker 1. "
        "Use the same everywhere, unless intended."
    )
    assert expected in found[0][2] and "seed" not in found[0][2]
    assert not any(re.search("differs?:", error) for _, _, error in pair.run(SCRIPT))  # oneDNN says "different", too


@pytest.mark.slow
@pytest.mark.parametrize("when", ["BEFORE", "AFTER"])
def test_another_seed_in_the_script_is_refused_where_the_workers_share_batches(pair, when):
    found = pair.run(SCRIPT, environ=[{when: "7"}, {when: "8"}])
    for code, out, error in found:
        assert code == 2 and "trained" not in out, found
        assert "different seeds: 7 on worker 0; 8 on worker 1" in error
        assert "Set the same seed on every worker" in error
    assert ("seeds differ: 7 on worker 0; 8 on worker 1" in found[0][2]) == (when == "BEFORE")


@pytest.mark.slow
def test_another_seed_is_a_warning_where_each_has_data_of_its_own(pair):
    found = pair.run(SCRIPT, environ=[{"BEFORE": str(rank), "OWN": "1"} for rank in range(2)])
    assert [(code, out.split()[-1:]) for code, out, _ in found] == [(0, ["trained"])] * 2, found
    assert "seeds differ: 0 on worker 0; 1 on worker 1. Set the same everywhere, unless" in found[0][2]


@pytest.mark.slow
@pytest.mark.parametrize("timeout", ["150", "0"])
def test_a_seed_on_one_worker_alone_is_refused_and_hangs_nobody(pair, timeout):
    startup = {"TFGPU_STARTUP_TIMEOUT": timeout}
    found = pair.run(SCRIPT, environ=[{"BEFORE": "7", **startup}, startup])
    if timeout == "0":
        check_refused(found, "A seed is set on 1 of 2 workers, and not on worker 1. Set the same seed")
    else:
        check_refused(
            found, "seed before the strategy differs: set on worker 0; not set on worker 1. Set one everywhere"
        )


def test_long_arguments_and_settings_that_differ_at_their_ends_still_differ():
    one, other = (facts.arguments(["x" * 5000, end]) for end in "ab")
    assert one != other and len(one) == len(other) == facts.LONGEST
    one, other = (facts.of_settings({"x": "y" * 5000 + end})["recipe: x"] for end in "ab")
    assert one != other and len(one) < 300


def test_a_missing_argument_is_reported_too():
    found = facts.advice({"worker 0": {"arguments": ""}, "worker 1": {"arguments": "--fast"}})
    text = "arguments differ: none on worker 0; --fast on worker 1. Use the same everywhere, unless intended."
    assert found == [text]
    many = {f"worker {rank}": {"arguments": str(rank)} for rank in range(20)}
    assert "7 on worker 7; and 12 others. Use" in facts.advice(many)[0]
