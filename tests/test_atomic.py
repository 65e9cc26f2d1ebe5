"""Whole files and folders after a killed process, a full disk, and an error in the block."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tfgpu import atomic

LOOP = """
import sys
from pathlib import Path
from tfgpu import atomic
path, kind = Path(sys.argv[1]), sys.argv[2]
for number in range(10**9):
    content = bytes([number % 256]) * 200_000
    if kind == "file":
        atomic.write_bytes(path, content)
    else:
        with atomic.replacing(path) as aside:
            aside.mkdir()
            for name in "ab":
                (aside / name).write_bytes(content)
    print(number, flush=True)
"""


def contents(path: Path) -> list[bytes]:
    return [each.read_bytes() for each in (sorted(path.iterdir()) if path.is_dir() else [path])]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_killed_process_leaves_whole_content(tmp_path, kind):
    target = tmp_path / "target"
    for turn in range(6):
        process = subprocess.Popen([sys.executable, "-c", LOOP, target, kind], stdout=subprocess.PIPE)
        try:
            assert process.stdout.readline()  # it has written once
            time.sleep(0.003 * turn)
        finally:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        found = contents(target)
        assert len(found) == (1 if kind == "file" else 2)
        assert len(set(found)) == 1 and len(found[0]) == 200_000 and len(set(found[0])) == 1


def test_a_process_killed_in_the_block_leaves_the_old_content(tmp_path):
    (tmp_path / "numbers.txt").write_text("old")
    script = (
        "import os, sys\nfrom tfgpu import atomic\nwith atomic.replacing(sys.argv[1]) as aside:\n"
        "    aside.write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, tmp_path / "numbers.txt"])
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "numbers.txt").read_text() == "old"


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_an_error_in_the_block_leaves_the_old_content_and_nothing_else(tmp_path, kind):
    target = tmp_path / "target.txt"
    if kind == "folder":
        target.mkdir()
    (target / "a" if kind == "folder" else target).write_bytes(b"old")
    with pytest.raises(RuntimeError, match="half way"), atomic.replacing(target) as aside:
        if kind == "folder":
            aside.mkdir()
        (aside / "a" if kind == "folder" else aside).write_bytes(b"new")
        raise RuntimeError("half way")
    assert contents(target) == [b"old"] and list(tmp_path.iterdir()) == [target]


def test_a_disk_that_takes_no_more_leaves_the_old_content(tmp_path):
    (tmp_path / "big").write_text("old")
    script = (
        "import resource, signal, sys\nfrom tfgpu import atomic\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\nresource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n    atomic.write_bytes(sys.argv[1], bytes(5000))\nexcept OSError:\n    sys.exit(7)\n"
    )
    assert subprocess.run([sys.executable, "-c", script, tmp_path / "big"]).returncode == 7
    assert (tmp_path / "big").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("can_exchange", [True, False])
def test_a_folder_replaces_a_folder(tmp_path, can_exchange, monkeypatch):
    if not can_exchange:  # as on a file system without renameat2
        monkeypatch.setattr(atomic, "_exchange", lambda one, other: False)
    target = tmp_path / "model"
    for name in "ab":
        with atomic.replacing(target) as aside:
            aside.mkdir()
            (aside / name).write_text(name)
    assert [path.name for path in target.iterdir()] == ["b"] and list(tmp_path.iterdir()) == [target]


def test_file_and_folder_entry_are_flushed_before_and_after_the_rename(tmp_path, monkeypatch):
    calls = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "rename", lambda a, b: (calls.append("rename"), rename(a, b)))
    atomic.write_text(tmp_path / "a.txt", "text")
    flushed, renamed, folder = calls
    assert Path(flushed).name.startswith(".a.txt.") and flushed.endswith(".part")
    assert renamed == "rename" and folder == str(tmp_path)
    calls.clear()
    atomic.write_bytes(tmp_path / "a.txt", b"other", sync=False)
    assert calls == ["rename"] and (tmp_path / "a.txt").read_bytes() == b"other"


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/real.txt").write_text("old")
    (tmp_path / "link.txt").symlink_to("elsewhere/real.txt")
    atomic.write_text(tmp_path / "link.txt", "grüß")
    assert (tmp_path / "link.txt").is_symlink()
    assert (tmp_path / "elsewhere/real.txt").read_bytes() == "grüß".encode()


def test_a_name_of_the_greatest_length(tmp_path):
    path = tmp_path / ("n" * 255)
    atomic.write_text(path, "text")
    assert path.read_text() == "text"


def test_what_is_no_file_is_written_in_place(tmp_path):
    """`--json-to /dev/stdout` prints, where the output is a pipe or a file."""
    code = "from tfgpu import atomic; atomic.write_text('/dev/stdout', 'shown\\n'); atomic.write_text('/dev/null', 'x')"
    piped = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert piped.stdout == "shown\n"
    with open(tmp_path / "log", "w") as log:
        subprocess.run([sys.executable, "-c", code], stdout=log, check=True)
    assert (tmp_path / "log").read_text() == "shown\n" and os.listdir(tmp_path) == ["log"]
    assert not os.path.isfile("/dev/null")
