"""Checkpoints on disk: reading returns what was written or reports damage; a full disk loses nothing."""

import errno
import gc
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tfgpu import atomic
from tfgpu.checkpoint import disks, storage
from tfgpu.checkpoint.best import Best
from tfgpu.checkpoint.fetching import fetch
from tfgpu.checkpoint.storage import FACTS, STATE, Damaged, Position, found
from tfgpu.core.state import parts
from tfgpu.errors import InputError, MachineError

ARRAYS = {"weights/0000": np.arange(6, dtype="float32").reshape(2, 3), "optimizer/0000": np.array(7, "int64")}
POSITION = Position(3, ({"loss": 0.1, "each": np.array([1.0, 2.0])},) * 3, step=25, done=4, logs={"loss": float("nan")})
plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=2) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


def write(folder, position=POSITION, memory=None):
    path = Path(folder) / position.name
    storage.write(path, position, parts.whole(ARRAYS), memory)
    return path


@given(memory=plain)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_what_is_written_is_read(memory):
    with tempfile.TemporaryDirectory() as folder:
        read = storage.read(write(folder, memory=memory))
        assert repr(read.memory) == repr(memory)  # by their text, so that a NaN is a NaN
        assert read.position.directory == Path(folder) / POSITION.name and read.position.name == POSITION.name
    assert read.arrays.keys() == ARRAYS.keys()  # though the files are gone
    assert all(np.asarray(read.arrays[name]).tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)


def test_arrays_and_numbers_of_numpy_keep_their_kind(tmp_path):
    import tensorflow as tf

    narrow = np.array([1.5, -2.0], tf.bfloat16.as_numpy_dtype)
    memory = {"EarlyStopping/0": {"best": np.float32(0.1), "best_weights": [narrow, np.zeros((2, 0))]}}
    read = storage.read(write(tmp_path, memory=memory)).memory["EarlyStopping/0"]
    assert type(read["best"]) is np.float32 and read["best"] == np.float32(0.1)
    assert read["best_weights"][0].dtype == narrow.dtype and (read["best_weights"][0] == narrow).all()
    assert read["best_weights"][1].shape == (2, 0)


def test_a_checkpoint_of_format_2_is_read(tmp_path):
    """One file with all arrays, whose hash the facts have, as tfgpu wrote until now."""
    arrays = {**ARRAYS, "memory/0000": np.array([1.0, 2.0])}
    content = safetensors.numpy.save(arrays)
    facts = {"format": 2, "epoch": 3, "step": 25, "done": 4, "first": 0, "over_at": None, "data_epoch": 0, "logs": None}
    facts |= {"history": [{"loss": 0.1}], "memory": {"wait": {"!": "array", "at": "memory/0000", "dtype": "float64"}}}
    facts["sha256"] = hashlib.sha256(content).hexdigest()
    path = tmp_path / POSITION.name
    path.mkdir()
    (path / STATE).write_bytes(content)
    whole = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    (path / FACTS).write_text(json.dumps({"facts": facts, "sha256": whole}))
    read = storage.newest(tmp_path)
    assert read.position == Position(3, ({"loss": 0.1},), path, step=25, done=4)
    assert read.memory["wait"].tolist() == [1.0, 2.0] and read.arrays.keys() == ARRAYS.keys()
    assert all(np.asarray(read.arrays[name]).tobytes() == ARRAYS[name].tobytes() for name in ARRAYS)
    (path / STATE).write_bytes(content[:-1] + b"\1")
    with pytest.raises(Damaged, match="state.safetensors does not match the hash"):
        storage.read(path)


@given(data=st.data())
@settings(max_examples=200)
def test_every_flipped_bit_is_detected(data):
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder, memory={"wait": 2})
        part = path / data.draw(st.sampled_from([STATE, FACTS]))
        content = bytearray(part.read_bytes())
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        part.write_bytes(content)
        try:
            read = storage.read(path)
        except Damaged:
            return
    # A space that JSON has between its words says nothing.
    assert read.memory == {"wait": 2} and read.position.step == 25
    assert all((np.asarray(read.arrays[name]) == ARRAYS[name]).all() for name in ARRAYS)


@given(length=st.integers(0, 400))
def test_every_truncated_file_is_detected(length):
    with tempfile.TemporaryDirectory() as folder:
        path = write(folder)
        for name in (STATE, FACTS):
            content = (path / name).read_bytes()
            (path / name).write_bytes(content[: min(length, len(content) - 2)])
            with pytest.raises(Damaged):
                storage.read(path)
            (path / name).write_bytes(content)


def test_the_names_give_the_order_and_the_clock_does_not(tmp_path):
    positions = [Position(2), Position(2, step=20, done=6), Position(10), Position(2, step=15, done=1)]
    for seconds, position in zip((9e8, 1e8, 0, 4e9), positions, strict=True):
        os.utime(write(tmp_path, position), (seconds, seconds))
    names = [path.name for path in found(tmp_path)]
    assert names == ["epoch-0010", "epoch-0002-step-0000020", "epoch-0002-step-0000015", "epoch-0002"]
    assert storage.newest(tmp_path).position.epoch == 10
    storage.prune(tmp_path, tmp_path / names[0], keep=2, best=2)
    assert [path.name for path in found(tmp_path)] == ["epoch-0010", "epoch-0002-step-0000020", "epoch-0002"]


def test_all_damaged_is_an_error_and_no_checkpoint_is_none(tmp_path):
    assert storage.newest(tmp_path / "none") is None
    (write(tmp_path) / FACTS).write_text("{}")
    with pytest.raises(Damaged, match="All checkpoints in .* are damaged"):
        storage.newest(tmp_path)


def test_what_a_killed_process_left_is_swept(tmp_path):
    write(tmp_path)
    (tmp_path / ".epoch-0009.123").mkdir()
    storage.sweep(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [POSITION.name]


def test_what_a_killed_process_was_about_to_replace_is_put_back(tmp_path):
    path = write(tmp_path)
    path.rename(tmp_path / f".{path.name}.123.old")  # it ended between two renames
    (tmp_path / f".{path.name}.123").mkdir()
    storage.sweep(tmp_path)
    assert storage.newest(tmp_path).position.step == POSITION.step
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


def test_an_irreplaceable_checkpoint_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(atomic, "_exchange", lambda *_: False)  # as on a file system that cannot
    path, rename = write(tmp_path, memory="first"), os.rename

    def fails(source, target):
        if Path(target) == path and not str(source).endswith(".old"):
            raise PermissionError
        rename(source, target)

    monkeypatch.setattr(os, "rename", fails)
    with pytest.raises(PermissionError):
        write(tmp_path, memory="second")
    assert storage.read(path).memory == "first" and list(tmp_path.iterdir()) == [path]


REMOVES = """
import os, shutil, signal, sys
from pathlib import Path
from tfgpu.checkpoint import storage
unlink, times = os.unlink, int(sys.argv[2])
def dies(*arguments, **options):
    global times
    times -= 1
    if times < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    unlink(*arguments, **options)
os.unlink = dies
folder = Path(sys.argv[1])
storage.prune(folder, folder / "epoch-0003", keep=1, best=None)
"""


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("files", [0, 1, 2])
def test_a_kill_while_one_is_removed_leaves_the_others_whole(tmp_path, files):
    for epoch in (1, 2, 3):
        write(tmp_path, Position(epoch))
    command = [sys.executable, "-c", REMOVES, str(tmp_path), str(files)]
    killed = subprocess.run(command, capture_output=True, timeout=550)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    assert [storage.read(path).position.epoch for path in found(tmp_path)] == ([3, 1] if files < 2 else [3])
    storage.sweep(tmp_path)
    assert all(path in found(tmp_path) for path in tmp_path.iterdir())


FULL = """
import resource, signal, sys
from pathlib import Path
import numpy as np
from tfgpu.checkpoint import Writer
from tfgpu.checkpoint import storage
from tfgpu.core.state import parts
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
folder = Path(sys.argv[1])
def write(epoch, writer):
    path, arrays = folder / f"epoch-{epoch:04d}", parts.whole({"w": np.zeros(40_000, "float32")})
    writer.put(path, lambda: storage.write(path, storage.Position(epoch), arrays, None))
with Writer() as writer:
    write(1, writer)
    writer.wait()
    if len(sys.argv) > 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    for epoch in range(2, 40):
        write(epoch, writer)
"""


def run_out_of_room(folder: Path, *limit: str) -> str:
    command = [sys.executable, "-c", FULL, str(folder), *limit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550)
    assert done.returncode == 1
    return done.stderr


@pytest.mark.processes
@pytest.mark.slow
def test_a_file_that_must_not_grow_loses_nothing(tmp_path):
    said = run_out_of_room(tmp_path, "limited")
    assert "MachineError: Writing" in said and "File too large" in said and "Free space" in said
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0001"]
    assert storage.newest(tmp_path).position.epoch == 1


@pytest.mark.processes
@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a small tmpfs, as root can")
    try:
        said = run_out_of_room(tmp_path)
        assert "MachineError: Writing" in said and os.strerror(errno.ENOSPC) in said
        whole = [storage.read(path).position.epoch for path in found(tmp_path)]
        assert whole == list(range(len(whole), 0, -1)) and len(whole) >= 4
        assert not list(tmp_path.glob(".epoch-*"))
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        with pytest.raises(MachineError, match="cannot be written to .*Read-only file system"):
            disks.compare(None, tmp_path)
        assert fetch(None, tmp_path).position.epoch == len(whole)
    finally:
        gc.collect()  # unmaps the files that were read
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_which_epoch_is_the_best(caplog):
    rows = [{"val_loss": 3.0, "val_accuracy": 0.2}, {"val_loss": 1.0, "val_accuracy": 0.2}, {"val_loss": float("nan")}]
    assert Best().place(rows) == 1
    assert Best("val_loss", "max").place(rows) == 0
    assert Best("val_accuracy").place(rows) == 0  # the first of equals
    assert Best(None).place(rows) is None and Best().place([{"loss": 1.0}]) is None
    assert not caplog.text
    best = Best("val_acuracy")
    assert best.place(rows) is best.place(rows) is None
    assert caplog.text.count("'val_acuracy' is not in the logs") == 1
    with pytest.raises(InputError, match="`mode` must be"):
        Best("loss", "lowest")
