"""The YAML text."""

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from tfgpu.launch.kubernetes import documents
from tfgpu.launch.kubernetes.jobs import literal

# What YAML 1.1, YAML 1.2 or Go's parser between them take for a number, a truth value, nothing or a date.
MISREAD = ["1e3", "0o17", "017", "0x1F", "1_000", "12:30:45", "yes", "NO", "on", "y", "N", "~", "null", "Null", "true"]
MISREAD += [".inf", "-.INF", ".nan", "2026-11-22", "1.", ".5", "+1", "=", "<<", "", " a", "a ", "a: b", "a #b", "- a"]
MISREAD += ["&a", "*a", "!a", "%a", "@a", "`a", "{a", "[a", "'a", '"a', "a\n", "\ta", "a\\b", "\u2028", "\x85", "é"]
MISREAD += ["? a", "---", "...", "|", ">"]


def both(text: str) -> list:
    """What a reader of YAML 1.1 and one of YAML 1.2 make of it."""
    ruamel = pytest.importorskip("ruamel.yaml", reason="pip install ruamel.yaml")
    return [yaml.safe_load(text), ruamel.YAML(typ="safe", pure=True).load(text)]


@pytest.mark.parametrize("text", MISREAD)
def test_a_string_stays_a_string(text):
    assert both(documents([{"value": text, "list": [text]}])) == [{"value": text, "list": [text]}] * 2


@given(st.text())
@example("a\n b\n\n")
@example("\n")
@example(" a\nb")
def test_any_string_stays_what_it_is(text):
    assert both(documents([{"value": text}])) == [{"value": text}] * 2


def test_numbers_and_truth_values_stay_theirs():
    assert documents([{"a": 1, "b": True, "c": "1", "d": "true"}]) == 'a: 1\nb: true\nc: "1"\nd: "true"\n'


def test_the_same_part_twice_is_written_twice():
    part = {"x": ["y"]}
    assert "&" not in documents([{"a": part, "b": part}])


@given(st.text(alphabet="$()AB "))
def test_a_literal_has_no_reference_to_a_variable(text):
    doubled = literal(text)
    assert doubled.replace("$$", "$") == text
    assert "$(" not in doubled.replace("$$", "")
