"""The line of the user's code that is named."""

import functools
import threading
from pathlib import Path

import pytest

import tfgpu
from tfgpu.core.workers import user_line

KERAS = "/env/lib/python3.11/site-packages/keras/src/trainer.py"
OURS = str(Path(tfgpu.__file__).parent / "core" / "step_loop.py")


def through(files: list[str], inner: str):
    """Runs `inner` in the last file, which the others have called in turn, each from its second line."""
    scope = {"user_line": user_line}
    exec(compile(f"def last():\n    {inner}", files[-1], "exec"), scope)
    then = scope["last"]
    for name in reversed(files[:-1]):
        exec(compile("def call(inner):\n    return inner()", name, "exec"), scope)
        then = functools.partial(scope["call"], then)
    return then()


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["train.py", KERAS, OURS], "train.py:2"),
        (["train.py", KERAS, "callbacks.py", KERAS], "callbacks.py:2"),
        (["train.py", "/elsewhere/code.py"], "/elsewhere/code.py:2"),
        (["<string>", KERAS], "<string>:2"),
    ],
)
def test_the_innermost_line_outside_installed_packages(files, expected, here):
    files = [str(here / name) if name in ("train.py", "callbacks.py") else name for name in files]
    assert through(files, "return user_line.of_thread()") == expected
    with pytest.raises(ValueError) as caught:
        through(files, "raise ValueError")
    assert user_line.of_error(caught.value.__traceback__) == expected


def test_of_another_thread():
    begin, end = threading.Event(), threading.Event()

    def wait():
        begin.set()
        end.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    assert begin.wait(500)
    assert "test_user_line.py:" in user_line.of_thread(thread.ident)
    end.set()
    thread.join()
    assert user_line.of_thread(thread.ident) == ""
