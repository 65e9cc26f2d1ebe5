"""Questions that hang, crash or print too much are reported as errors."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.doctor.facts import asking

QUESTIONS = """
import os, signal, subprocess, sys, time
def hang(**_):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    open(os.environ["CHILD"], "w").write(str(child.pid))
    time.sleep(3600)
def die(**_): os.kill(os.getpid(), signal.SIGSEGV)
def talk(**_): sys.stdout.write("no new line"); sys.stderr.write("x" * 10**6); return {"talks": True}
def leave(**_): raise SystemExit(4)
QUESTIONS = {"fine": lambda **options: options, "hang": hang, "die": die, "talk": talk, "leave": leave}
"""


@pytest.fixture
def ask(tmp_path, clean):
    (tmp_path / "questions.py").write_text(QUESTIONS)

    def go(*names: str, seconds: float = 60, **options) -> dict:
        environ = asking.with_tfgpu(clean(PYTHONPATH=str(tmp_path), CHILD=str(tmp_path / "child")))
        return asking.ask("questions", names, environ=environ, seconds=seconds, **options)

    return go


def test_answers_before_a_death_are_kept(ask):
    assert ask("fine", "talk", "leave", "die", "fine", root="/x") == {
        "fine": {"root": "/x"},
        "talk": {"talks": True},
        "leave": {"error": "SystemExit: 4"},
        "die": {"error": "the process was ended by SIGSEGV"},
    }


def test_a_question_that_hangs_is_ended_with_all_that_it_started(ask, tmp_path):
    assert ask("fine", "hang", seconds=10) == {"fine": {}, "hang": {"error": "no answer within 10 s"}}
    child = Path(f"/proc/{(tmp_path / 'child').read_text()}/stat")
    until = time.monotonic() + 500
    while child.exists() and child.read_text().rpartition(") ")[2][0] != "Z":
        assert time.monotonic() < until
        time.sleep(0.05)


def test_a_command_that_is_not_there():
    ended = asking.run(["/nowhere/nvidia-smi"], environ={}, seconds=5)
    assert (ended.code, ended.how) == (None, "/nowhere/nvidia-smi cannot be started: No such file or directory")


def test_how_a_command_ended():
    code = f"import os; os.kill(os.getpid(), {signal.SIGABRT.value})"
    killed = asking.run([sys.executable, "-c", code], environ=os.environ, seconds=60)
    assert killed.how == "the process was ended by SIGABRT"
    ended = asking.run([sys.executable, "-c", "1/0"], environ=os.environ, seconds=60)
    assert ended.how == "the process ended with code 1: ZeroDivisionError: division by zero"


@given(st.dictionaries(st.text(), st.integers()), st.text(), st.text())
def test_an_answer_is_found_among_anything(found, before, after):
    import io
    from contextlib import redirect_stdout

    with redirect_stdout(io.StringIO()) as out:
        asking.tell("it", found)
    before, after = (text.replace("tfgpu-fact", "") for text in (before, after))
    assert asking.answers(f"{before}{out.getvalue()}{after}") == {"it": found}
