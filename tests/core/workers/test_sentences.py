"""The errors for workers that do different things."""

import pytest

from tfgpu.core.workers import sentences
from tfgpu.core.workers.sentences import Event
from tfgpu.errors import InputError, MachineError

FIT = Event("called `fit`", "train.py:3", {"epochs": "2"})
TEST = Event("called `evaluate`", "train.py:5")


def raised() -> Event:
    try:
        raise ValueError("of my own\nand more")
    except ValueError as error:
        return sentences.of_error("left `fit`", error)


def test_the_same_calls_are_no_difference():
    other = Event("called `fit`", "elsewhere.py:9", {"epochs": "2"}, stop=True)
    assert sentences.difference({"worker 0": FIT, "worker 1": other}) is None


@pytest.mark.parametrize("facts", [{"epochs": "3"}, {"epochs": "2", "steps": "4"}, {}])
def test_other_arguments_are_named(facts):
    found = sentences.difference({"worker 0": FIT, "worker 1": FIT, "worker 2": Event(FIT.what, "b.py:7", facts)})
    name, value = ("steps", "4") if "steps" in facts else ("epochs", facts.get("epochs"))
    one = FIT.facts.get(name)
    assert isinstance(found, InputError)
    assert f"{name}={one} on worker 0 (train.py:3), {name}={value} on worker 2 (b.py:7)" in str(found)


def test_other_calls_are_named():
    found = sentences.difference({"chief": FIT, "worker 0": TEST})
    told = "chief called `fit` (train.py:3), while worker 0 called `evaluate` (train.py:5)."
    assert isinstance(found, InputError) and told in str(found)


def test_a_failure_comes_first_and_may_be_tried_again():
    found = sentences.apart("worker 0", FIT, "worker 1", raised())
    assert isinstance(found, MachineError)
    assert str(found).startswith("worker 1 left `fit` by ValueError: of my own (")
    assert "while worker 0 called `fit` (train.py:3). See the error of worker 1" in str(found)


def test_they_travel_as_text():
    event = Event("ended its script", "a.py:1", {"a": "b"}, stop=True, is_failure=True)
    assert sentences.read(event.as_json()) == event
    error = sentences.from_text(sentences.as_text(InputError("no")))
    assert type(error) is InputError and str(error) == "no" and sentences.from_text('{"kind": null}') is None
