"""Untrusted recipes run no code: `module:function` needs the command line or the user's permission."""

import re
from collections.abc import Mapping
from typing import Any

from tfgpu.errors import InputError

_NAMES = ("data", "model")
_SOURCES = ("tfds:", "corpus:", "csv:", "parquet:", "images:", "coco:", "masks:")
_CODE = re.compile(r"\s*[\w.]+:\w+\s*")


def code_in(settings: Mapping[str, Any]) -> dict[str, str]:
    """Returns the settings that would import a module and call one of its functions.

    Args:
        settings: from a file, not validated.

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
    for name in _NAMES:
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
