"""What the package needs comes from an index, by versions that fit each other. Known faults: `make audit`."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement


def needed(name, extras=frozenset({""})):
    """The requirements of a distribution that hold here."""
    for text in metadata.requires(name) or ():
        requirement = Requirement(text)
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            yield requirement


def closure():
    """(who, what it needs) of everything that the package brings along."""
    waiting, seen = [("tfgpu", each) for each in needed("tfgpu")], set()
    while waiting:
        who, requirement = waiting.pop()
        key = requirement.name.lower(), frozenset(requirement.extras)
        yield who, requirement
        if key not in seen:
            seen.add(key)
            waiting += [(requirement.name, each) for each in needed(requirement.name, {"", *requirement.extras})]


def test_every_dependency_is_there_in_a_version_that_all_take():
    found = list(closure())
    assert len(found) > 40
    for who, requirement in found:
        version = metadata.version(requirement.name)
        assert requirement.specifier.contains(version, prereleases=True), f"{who} needs {requirement}, not {version}"


def test_no_dependency_comes_from_an_address():
    assert [f"{who}: {each}" for who, each in closure() if each.url] == []


@pytest.mark.parametrize("text", metadata.requires("tfgpu") or ())
def test_ours_have_a_least_version(text):
    requirement = Requirement(text)
    ours = requirement.name == "tfgpu" or requirement.name.lower() in ("tensorflow", "keras")
    assert ours or any(each.operator == ">=" for each in requirement.specifier), text
