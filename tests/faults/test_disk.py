"""The disk fails under a `fit`: one error says what to do, checkpoints stay complete, and the command resumes."""

import contextlib
import errno
import os
import resource
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from tfgpu.checkpoint import manifest, storage

pytestmark = [pytest.mark.processes, pytest.mark.slow]

OPTIONS = {"every_steps": 2, "pause": 0.03, "epochs": 6, "patience": 99}
# root may write anywhere, unless it has none of its special rights.
PLAIN_USER = ("setpriv", "--bounding-set", "-dac_override,-dac_read_search") if os.geteuid() == 0 else ("env",)
LIMIT = 6000  # bytes that a file may have


@pytest.fixture
def checkpoints(tmp_path):
    """Where the checkpoints go: a file system of 2 MB."""
    folder = tmp_path / "cut" / "checkpoints"
    folder.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs to mount a small tmpfs, as root can")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return {}, tmp_path_factory.mktemp("whole")


@pytest.fixture
def whole(undisturbed, group, result):
    """What a training on so many workers ends with that nothing disturbs."""
    known, folder = undisturbed

    def get(workers: int):
        if workers not in known:
            run = group(folder / f"{workers}", ["fit", "workers"][workers - 1], workers=workers, **OPTIONS)
            assert run.wait() == [0] * workers, run.said()
            known[workers] = result(run.folder)
        return known[workers]

    return get


@pytest.fixture
def cut(tmp_path, group):
    """Starts the training that is disturbed; again, too."""

    def start(workers: int = 1, **options):
        return group(tmp_path / "cut", ["fit", "workers"][workers - 1], workers=workers, **OPTIONS, **options)

    return start


def fails(run, *words: str) -> None:
    """Waits for the end of all, which is one error on the chief; a note may say the same of the next write."""
    began, before = time.monotonic(), run.logs[0].stat().st_size
    codes = run.wait()
    said = run.logs[0].read_bytes()[before:].decode()
    raised = [line for line in said.splitlines() if line.startswith("tfgpu.errors.MachineError: ")]
    # Whose part did not fit, the chief's or the other worker's, is chance: then the cause is a MachineError as well.
    errors = [line for line in raised if not line.startswith("tfgpu.errors.MachineError: worker ")]
    print(f"\nexit codes {codes} after {time.monotonic() - began:.1f} s: {errors}")
    assert all(codes) and len(errors) == 1, run.said()
    assert said.splitlines()[-1].endswith("or choose another directory."), run.said()
    assert all(word in errors[0] for word in words), errors[0]


def names_of_whole_ones(folder: Path) -> list[str]:
    """The checkpoints; each is read, and nothing half written lies beside them."""
    found = storage.found(folder)
    for path in found:
        storage.read(path)
    assert {path.name for path in folder.iterdir()} - {"ballast"} == {path.name for path in found}
    return [path.name for path in found]


def goes_on(run, workers: int, whole, result) -> None:
    """Waits for the end, and compares it with an undisturbed training."""
    assert run.wait() == [0] * workers, run.said()
    (arrays, history), (found, found_history) = whole, result(run.folder)
    assert [a.tobytes() for a in arrays] == [a.tobytes() for a in found] and history == found_history
    assert run.epochs_begun() < OPTIONS["epochs"]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_disk_that_gets_full(workers, checkpoints, cut, whole, result):
    expected = whole(workers)
    run = cut(workers)
    run.wait_for_checkpoint("epoch-0001-step-*")
    with contextlib.suppress(OSError), open(checkpoints / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    fails(run, "Writing ", os.strerror(errno.ENOSPC), "Free space")
    saved = names_of_whole_ones(checkpoints)
    assert saved
    again = cut(workers)  # the room for a folder is there, or is not
    fails(again, os.strerror(errno.ENOSPC), "ree space")
    assert names_of_whole_ones(checkpoints)[0] >= saved[0]
    (checkpoints / "ballast").unlink()
    goes_on(cut(workers), workers, expected, result)


def test_files_that_must_not_grow(tmp_path, cut, whole, result):
    expected = whole(1)
    run = cut()
    run.wait_for_checkpoint("epoch-0001-step-*")
    resource.prlimit(run.processes[0].pid, resource.RLIMIT_FSIZE, (LIMIT, LIMIT))
    fails(run, "Writing ", os.strerror(errno.EFBIG), "Free space")
    assert names_of_whole_ones(tmp_path / "cut" / "checkpoints")
    goes_on(cut(), 1, expected, result)


@contextlib.contextmanager
def mounted_read_only(folder: Path):
    until = time.monotonic() + 500
    while subprocess.run(["mount", "-o", "remount,ro", folder], capture_output=True).returncode:
        assert time.monotonic() < until  # a file is being written
    yield
    subprocess.run(["mount", "-o", "remount,rw", folder], check=True)


@contextlib.contextmanager
def no_right_to_write(folder: Path):
    folder.chmod(0o500)
    yield
    folder.chmod(0o700)


@contextlib.contextmanager
def immutable(folder: Path):
    if not shutil.which("chattr") or subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
        pytest.skip("needs a file system on which `chattr +i` works, and root")
    yield
    subprocess.run(["chattr", "-i", folder], check=True)


def stays_locked(lock, code: str, folder: Path, cut, expected, result, **options) -> None:
    """Locks the folder under a training; starts another one, which must not train; unlocks it, and resumes."""
    run = cut(**options)
    run.wait_for_checkpoint("epoch-0001-step-*")
    with lock(folder):
        fails(run, "Writing ", code, "grant write access")
        steps = len(run.progress())
        again = cut(**options)
        fails(again, "Checkpoints cannot be written to", code, "Grant write access")
        assert len(again.progress()) == steps
        for path in storage.found(folder):
            storage.read(path)
    goes_on(cut(**options), 1, expected, result)


def test_a_folder_that_gets_read_only(checkpoints, cut, whole, result):
    stays_locked(mounted_read_only, os.strerror(errno.EROFS), checkpoints, cut, whole(1), result)


def test_a_folder_that_becomes_immutable(tmp_path, cut, whole, result):
    folder = tmp_path / "cut" / "checkpoints"
    stays_locked(immutable, os.strerror(errno.EPERM), folder, cut, whole(1), result)


def test_a_folder_without_the_right_to_write(tmp_path, cut, whole, result):
    if not shutil.which(PLAIN_USER[0]):
        pytest.skip(f"needs {PLAIN_USER[0]}, since this is root")
    folder = tmp_path / "cut" / "checkpoints"
    stays_locked(no_right_to_write, os.strerror(errno.EACCES), folder, cut, whole(1), result, under=PLAIN_USER)


@pytest.mark.parametrize(("workers", "file"), [(1, storage.FACTS), (2, manifest.file_name(1, 2))])
def test_a_bit_of_the_newest_flips(workers, file, tmp_path, cut, whole, result):
    expected = whole(workers)
    run = cut(workers)
    run.wait_for_checkpoint("epoch-0001-step-*")
    run.end()
    newest, before = storage.found(tmp_path / "cut" / "checkpoints")[:2]
    content = bytearray((newest / file).read_bytes())
    content[content.index(b"}") - 2] ^= 1  # a digit, in the facts as in the arrays' names and places
    (newest / file).write_bytes(content)
    again = cut(workers)
    goes_on(again, workers, expected, result)
    assert f"{newest.name} is damaged" in again.said() and "using the previous one" in again.said()
    print(f"\n{workers} workers, {file} of {newest.name}: it went on from {before.name}")
