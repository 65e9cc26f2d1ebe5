"""Recipes of strangers run no code: `module:function` counts on the command line, or where the user allows it."""

import re
from collections.abc import Mapping
from typing import Any

from tfgpu.errors import InputError

_NAMES = ("data", "model")
_SOURCES = ("tfds:", "text:", "corpus:", "csv:", "parquet:")
_CODE = re.compile(r"\s*[\w.]+:\w+\s*")


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """The settings that would import a module and call a function of it.

    Args:
        settings: as a file has them, not validated.

    Example:
        >>> code_in({"model": "os:system", "data": "tfds:mnist"})
        {'model': 'os:system'}
    """
    named = {name: value for name in _NAMES if isinstance(value := settings.get(name), str)}
    return {
        name: value
        for name, value in named.items()
        if (":" in value if name == "model" else _CODE.fullmatch(value) and not value.strip().startswith(_SOURCES))
    }


def refuse_code(
    settings: Mapping[str, Any], source: str, *, allow: bool = False, given: Mapping[str, Any] | None = None
) -> None:
    """Refuses a file that names code to be run.

    A model of the working directory, or any function of an installed package (`os:system`), could be called with
    arguments of the file's choice.

    Args:
        settings: what the file says.
        source: its name, for the message.
        allow: the user has said that it may.
        given: settings that win over the file's; what stands there is the user's own word.

    Raises:
        InputError: says what the file would run, and how to let it.
    """
    _refuse({n: v for n, v in code_in(settings).items() if n not in (given or {})}, source, allow)


def refuse_code_searched(search: Mapping[str, Any], source: str, *, allow: bool = False) -> None:
    """The same for the settings that a study is to try, as a file has them: a list, or names with commas.

    Raises:
        InputError: as `refuse_code`.
    """
    for name in _NAMES:
        values = search.get(name, ())
        for value in values.split(",") if isinstance(values, str) else values if isinstance(values, list) else ():
            _refuse(code_in({name: value}), source, allow)


def _refuse(found: Mapping[str, str], source: str, allow: bool) -> None:
    if found and not allow:
        named = ", ".join(f"{name}: {value}" for name, value in found.items())
        flags = " ".join(f"--{name} {value}" for name, value in found.items())
        raise InputError(
            f"{source} names code to be run: {named}. If you trust it, add --allow-code, or write {flags} yourself."
        )
