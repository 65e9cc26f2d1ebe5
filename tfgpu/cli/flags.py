"""Command-line options from dataclasses, and from the recipe schema."""

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from rich.markup import escape

from tfgpu import atomic
from tfgpu.cli import completion
from tfgpu.errors import InputError
from tfgpu.recipes import recipe as recipes

Options = TypeVar("Options")
# Options that several commands share, for `with_settings`.
RECIPE_NAME = (str | None, None, [], "RECIPE", "A ready recipe (tfgpu train --list) or a YAML file; flags override it.")
ALLOW_CODE = (
    *(bool, False, ["--allow-code"], None),
    "Allow files to name functions to call (module:function), as flags may.",
)
_JSON, _JSON_TO = "Print JSON instead of text.", "Write the JSON to a file."
OWN_JSON = {
    "as_json": (bool, False, ["--json"], None, _JSON),
    "json_to": (Path | None, None, ["--json-to"], "FILE", _JSON_TO),
}
AsJson = Annotated[bool, typer.Option("--json", help=_JSON)]
JsonTo = Annotated[Path | None, typer.Option("--json-to", metavar="FILE", help=_JSON_TO)]
DEBUG = (bool, False, ["--debug"], None, "Show a traceback on failure (also TFGPU_DEBUG=1).")


def with_options(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Decorates a command that takes its options as one object of a dataclass.

    Args:
        kind: the dataclass; each field is an option, annotated as a parameter of a Typer command.
    """

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(kind(**values))

        keyword, empty = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty
        run.__signature__ = inspect.Signature(
            [
                inspect.Parameter(
                    *(field.name, keyword),
                    default=empty if field.default is MISSING else field.default,
                    annotation=field.type,
                )
                for field in fields(kind)
            ]
        )
        run.__annotations__ = {field.name: field.type for field in fields(kind)}
        return run

    return decorate


def with_settings(
    own: Mapping[str, tuple], *, names: Mapping[str, completion.Names] | None = None
) -> Callable[[Callable], Callable]:
    """Decorates a command: it gets its own options, and one for each setting of the recipe schema.

    Args:
        own: options by name: type, default, flags (empty for a positional argument), placeholder and help.
        names: shell completions by name of the option: functions that list names.
    """
    signature = _signature(own, names or {})

    def decorate(command: Callable) -> Callable:
        command.__signature__ = signature
        command.__annotations__ = {name: p.annotation for name, p in signature.parameters.items()}
        return command

    return decorate


def check_json(json_to: Path | None) -> None:
    """Refuses a file that cannot be written, before the work whose result it gets.

    Raises:
        InputError: its folder does not exist, or it is a folder.
    """
    if json_to is not None and (json_to.is_dir() or not json_to.absolute().parent.is_dir()):
        raise InputError(f"--json-to needs a file in an existing folder. Received: {str(json_to)!r}.")


def put_json(value: Any, *, as_json: bool, json_to: Path | None) -> bool:
    """Writes a result, or its JSON, to the file of `--json-to` and, with `--json`, prints it; returns `as_json`."""
    text = value if isinstance(value, str) else json.dumps(value, indent=2, default=str)
    if json_to is not None:
        try:
            atomic.write_text(json_to, text + "\n")
        except OSError as error:
            raise InputError(f"--json-to {json_to} cannot be written: {error.strerror}. Give another file.") from error
    if as_json:
        print(text)
    return as_json


def flag_of(setting: str) -> str:
    """The flag of a setting of the recipe schema.

    Example:
        >>> flag_of("global_batch"), flag_of("learning_rate")
        ('--batch', '--learning-rate')
    """
    return recipes.Recipe.model_fields[setting].json_schema_extra.get("flag", f"--{setting.replace('_', '-')}")


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the options that were given, with KEY=VALUE pairs as a mapping."""
    kept = {name: value for name, value in flags.items() if value not in (None, [], ())}
    for name, value in kept.items():
        if get_origin(recipes.Recipe.model_fields[name].annotation) is dict:
            kept[name] = pairs(recipes.Recipe.model_fields[name].json_schema_extra["flag"], value)
    return kept


def _signature(own: Mapping[str, tuple], names: Mapping[str, completion.Names]) -> inspect.Signature:
    parameters = [
        _parameter(name, kind, _own(default, flags, metavar, text, names.get(name)))
        for name, (kind, default, flags, metavar, text) in own.items()
    ]
    for name, field in recipes.Recipe.model_fields.items():
        kind, flag, metavar = _flag(name, field)
        panel = field.json_schema_extra["panel"]
        shown = {"metavar": metavar, "help": _help(name, field), "rich_help_panel": panel}
        option = typer.Option(None, *flag, autocompletion=completion.of_setting(name), **shown)
        parameters.append(_parameter(name, kind, option))
    return inspect.Signature(parameters)


def _own(default: Any, flags: Sequence[str], metavar: str | None, text: str, names: completion.Names | None) -> Any:
    shown = {"metavar": metavar, "help": escape(text), "show_default": False}
    if names is not None:
        shown["autocompletion"] = completion.completing(names)
    return typer.Option(default, *flags, rich_help_panel="Run", **shown) if flags else typer.Argument(default, **shown)


def _flag(name: str, field: Any) -> tuple[Any, list[str], str | None]:
    """Returns a setting's type on the command line, its flag and its placeholder.

    Values stay text: the schema parses them, so that a flag and a file give the same error for an invalid value.
    """
    flag = flag_of(name)
    if field.annotation is bool:
        return bool | None, [f"{flag}/--no-{flag[2:]}"], None
    if get_origin(field.annotation) is dict:
        return list[str] | None, [flag], "KEY=VALUE"
    if isinstance(field.default, tuple):
        return list[str] | None, [flag], "NAME"
    if recipes.choices(name):
        return str | None, [flag], "NAME"
    placeholders = {"devices": "N|NAMES", "image_size": "HxW", int: "INTEGER", float: "NUMBER", str: "TEXT"}
    keys = (name, field.annotation, *get_args(field.annotation))
    return str | None, [flag], next(placeholders[key] for key in keys if key in placeholders)


def _help(name: str, field: Any) -> str:
    """Formats a setting's description, choices and default; backticks become bold."""
    parts = escape(field.description).split("`")
    text = "".join(f"[bold]{part}[/]" if i % 2 else part for i, part in enumerate(parts))
    if names := recipes.choices(name):
        text += f" One of: {', '.join(names)}."
    if field.default in (None, {}, ()):
        return text
    shown = ", ".join(field.default) if isinstance(field.default, tuple) else str(field.default)
    if field.annotation is bool:
        shown = "yes" if field.default else "no"
    return f"{text} [dim]{escape(f'[default: {shown}]')}[/]"


def _parameter(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def pairs(flag: str, words: Sequence[str]) -> dict[str, Any]:
    """Parses KEY=VALUE arguments; values are parsed as in a config file."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"{flag} must be KEY=VALUE. Received: {word!r}. Write, for example, {flag} name=0.5.")
        if key in found:
            raise InputError(f"{flag} gives {key!r} twice. Keep one of them.")
        found[key] = recipes.parse_value(text)
    return found
