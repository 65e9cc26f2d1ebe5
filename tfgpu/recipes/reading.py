"""Reads config files and the values of flags as safe YAML. Imports no TensorFlow.

Untrusted files run no code: `module:function` needs the command line or the user's permission.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tfgpu.errors import InputError

_LONGEST = 1 << 18  # the most characters; PyYAML needs some seconds for that many
_MOST = 100_000  # the most values
_BITS = 4096  # the most bits of a whole number; Python refuses to format one of 15,000, which an error message would do
FACTS = "run"  # the key of config.yaml with a run's facts, which a recipe ignores
_CODE_NAMES = ("data", "model")
_SOURCES = ("tfds:", "corpus:", "csv:", "parquet:", "images:", "coco:", "masks:")
_CODE = re.compile(r"\s*[\w.]+:\w+\s*")


def read(path: str | Path) -> dict[str, Any]:
    """Reads a config file's settings, without validation and without a run's facts.

    Raises:
        InputError: the file is missing, is not YAML or is not a mapping.
    """
    content = _parse(path)
    content.pop(FACTS, None)
    return content


def read_facts(path: str | Path) -> dict[str, Any]:
    """Reads the facts that a run wrote to its config file; empty if no run wrote it.

    Raises:
        InputError: the file is missing, is not YAML or is not a mapping.
    """
    facts = _parse(path).get(FACTS)
    return facts if isinstance(facts, dict) else {}


def parse_value(text: str) -> Any:
    """Parses a flag's value as YAML: `0.3` is a number, `true` a boolean, `[1, 2]` a list."""
    try:
        return _loaded(text)
    except yaml.YAMLError:
        return text


def _loaded(text: str) -> Any:
    """Parses YAML.

    Raises:
        yaml.YAMLError: it is not YAML, or larger than any recipe. Errors of PyYAML's number and date parsers become
            this too.
    """
    if len(text) > _LONGEST:
        raise yaml.YAMLError(f"it has more than {_LONGEST} characters")
    try:
        content = yaml.load(text, Loader=_Loader)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from error
    _size(content, {}, set())
    return content


def _size(value: Any, known: dict[int, int], within: set[int]) -> int:
    """Counts the values after expanding aliases; nested aliases can expand to billions, which an error would print."""
    if isinstance(value, int) and value.bit_length() > _BITS:
        raise yaml.YAMLError(f"a number in it has {value.bit_length()} bits")
    if not isinstance(value, dict | list | tuple | set):
        return 1
    if id(value) in within:
        raise yaml.YAMLError("it contains itself")
    if id(value) not in known:
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        known[id(value)] = 1 + sum(_size(part, known, within | {id(value)}) for part in parts)
        if known[id(value)] > _MOST:
            raise yaml.YAMLError(f"it expands to more than {_MOST} values")
    return known[id(value)]


def _parse(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            content = _loaded(file.read(_LONGEST + 1))
    except (OSError, ValueError) as error:
        is_text = not isinstance(error, UnicodeDecodeError)
        reason = getattr(error, "strerror", None) or (str(error) if is_text else "it is not text")
        raise InputError(f"Cannot read the config file {str(path)!r}: {reason}. Use a YAML file of settings.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        reason = getattr(error, "problem", None) or str(error) or "it does not parse"
        raise InputError(f"{path}{where} is not YAML: {reason}. Write one `name: value` per line.") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise InputError(f"{path} must contain settings. Received: {str(content)[:60]!r}. Write `name: value` lines.")
    return content


class _Loader(yaml.SafeLoader):
    """The safe loader, which also parses `1e-3` as a number and rejects duplicate settings.

    It does not support merging (`<<`): ten lines of nested merges would fill the memory before they could be counted.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.tag == "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, "'<<' is not supported", key.start_mark)
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


# YAML 1.1 parses `1e-3`, which has no point, as a string.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d+(?:\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings that would import a module and call one of its functions.

    Args:
        settings: from a file, not validated.

    Example:
        >>> code_in({"model": "os:system", "data": "tfds:mnist"})
        {'model': 'os:system'}
    """
    named = {name: value for name in _CODE_NAMES if isinstance(value := settings.get(name), str)}
    return {
        name: value
        for name, value in named.items()
        if (":" in value if name == "model" else _CODE.fullmatch(value) and not value.strip().startswith(_SOURCES))
    }


def refuse_code(
    settings: Mapping[str, Any], source: str, *, allow: bool = False, given: Mapping[str, Any] | None = None
) -> None:
    """Rejects a file that names code to run.

    It could call a function of the working directory, or of any installed package (`os:system`), with its own
    arguments.

    Args:
        settings: the file's content.
        source: its name, for errors.
        allow: whether the user has allowed it.
        given: settings that override the file's; these come from the user.

    Raises:
        InputError: names the code, and how to allow it.
    """
    _refuse({n: v for n, v in code_in(settings).items() if n not in (given or {})}, source, allow)


def refuse_code_searched(search: Mapping[str, Any], source: str, *, allow: bool = False) -> None:
    """Like `refuse_code`, for the settings that a study tries: lists, or names separated by commas.

    Raises:
        InputError: as `refuse_code`.
    """
    for name in _CODE_NAMES:
        values = search.get(name, ())
        for value in values.split(",") if isinstance(values, str) else values if isinstance(values, list) else ():
            _refuse(code_in({name: value}), source, allow)


def _refuse(found: Mapping[str, str], source: str, allow: bool) -> None:
    if found and not allow:
        named = ", ".join(f"{name}: {value}" for name, value in found.items())
        flags = " ".join(f"--{name} {value}" for name, value in found.items())
        raise InputError(
            f"{source} names code to run: {named}. If you trust it, add --allow-code, or pass {flags} yourself."
        )
