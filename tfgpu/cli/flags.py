"""Command-line options: how they are declared, and those that several commands share."""

import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import typer
from rich.markup import escape

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.reading import parse_value, refuse_code

Options = TypeVar("Options")


def option(kind: Any, text: str, usage: str = "", *, panel: str | None = None, **more: Any) -> Any:
    """The annotation of a parameter that is an option.

    Args:
        kind: its type; None is allowed too if the parameter's default is None.
        text: its help. Backticks become bold; the short help shows the first sentence.
        usage: such as `--output -o DIR`: its names, by default made of the parameter's, and what stands for the value
            in the help.
        panel: the heading in the long help.
        more: other arguments of `typer.Option`.
    """
    words = usage.split()
    names = [word for word in words if word.startswith("-")]
    metavar = " ".join(words[len(names) :]) or None
    return Annotated[kind, typer.Option(*names, metavar=metavar, help=marked(text), rich_help_panel=panel, **more)]


def argument(kind: Any, metavar: str, text: str, **more: Any) -> Any:
    """The annotation of a positional parameter."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=marked(text), **more)]


def marked(text: str) -> str:
    """Text as rich markup, in which backticks are bold.

    Example:
        >>> marked("As `--json`.")
        'As [bold]--json[/].'
    """
    parts = escape(text).split("`")
    return "".join(f"[bold]{part}[/]" if at % 2 else part for at, part in enumerate(parts))


RecipeName = argument(
    str | None,
    "RECIPE",
    "A built-in recipe (tfgpu train --list) or a YAML file. Flags override it.",
    show_default=False,
)
AllowCode = option(
    bool, "Allow recipe files to call functions (module:function), as flags may.", "--allow-code", panel="Run"
)
Debug = option(bool, "Show a traceback on failure (also TFGPU_DEBUG=1).", "--debug", panel="Run")
AsJson = option(bool, "Print JSON instead of text.", "--json")
JsonTo = option(Path | None, "Write the JSON to a file.", "FILE")


def with_options(kind: type[Options]) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Decorates a command that takes its options as one object of a dataclass.

    Args:
        kind: the dataclass; each field is an option, annotated as a parameter of a Typer command.
    """
    known = fields(kind)
    parameters = [
        _parameter(each.name, each.type, inspect.Parameter.empty if each.default is MISSING else each.default)
        for each in known
    ]

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            command(kind(**values))

        return _signed(run, parameters)

    return decorate


def with_settings(command: Callable) -> Callable:
    """Decorates a command whose `**flags` are settings of the recipe schema: each becomes an option."""
    own = [each for each in inspect.signature(command).parameters.values() if each.kind is not each.VAR_KEYWORD]
    settings = [_setting(name, field) for name, field in recipes.Recipe.model_fields.items()]
    return _signed(command, [*own, *settings])


def _signed(command: Callable, parameters: Sequence[inspect.Parameter]) -> Callable:
    command.__signature__ = inspect.Signature(parameters)
    command.__annotations__ = {each.name: each.annotation for each in parameters}
    return command


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def check_exists(path: Path, what: str) -> None:
    """Rejects a path that is not there, before TensorFlow starts.

    Args:
        path: as it was typed.
        what: what to give instead.

    Raises:
        InputError: nothing is there.
    """
    if not path.exists():
        raise InputError(f"There is nothing at {str(path)!r}. Give {what}.")


def check_json(json_to: Path | None) -> None:
    """Rejects a file that cannot be written, before the work begins.

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


def settings_of(name: str | None, flags: Mapping[str, Any], *, allow_code: bool) -> dict[str, Any]:
    """The settings of a command's RECIPE and flags."""
    settings, flags = {} if name is None else ready.read(name), given(flags)
    refuse_code(settings, str(name), allow=allow_code, given=flags)
    return {**settings, **flags}


def recipe_of(name: str | None, flags: Mapping[str, Any], *, allow_code: bool) -> recipes.Recipe:
    """The recipe of a command's RECIPE and flags."""
    return recipes.make(settings_of(name, flags, allow_code=allow_code), source=file_of(name))


def file_of(name: str | None) -> str | None:
    """The user's file that a command's RECIPE names; what is wrong with a ready recipe comes from flags."""
    return None if name is None or name in ready.names() else str(ready.path(name))


def in_flags(message: str, parameters: Sequence[Any]) -> str:
    """Replaces the names of Python arguments in an error's message by a command's options.

    A command's parameter has the name of the Python argument that it becomes. If the command takes a recipe, the names
    of a recipe's settings stay, because they may come from a file.

    Args:
        message: in which `` `name` `` or `name=` is an argument.
        parameters: of the command, as Click knows them.
    """
    options, flags = {}, {}
    settings = recipes.Recipe.model_fields if any(each.metavar == "RECIPE" for each in parameters) else ()
    for each in parameters:
        if each.name not in settings:
            is_option = each.param_type_name == "option"
            options[each.name] = max(each.opts, key=len) if is_option else each.metavar
            if is_option and not each.is_flag:
                flags[each.name] = options[each.name]
    message = re.sub(r"`(\w+)`", lambda found: options.get(found[1], found[0]), message)
    return re.sub(r"(?<![\w.\-])(\w+)(?==[^=])", lambda found: flags.get(found[1], found[0]), message)


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


def _setting(name: str, field: Any) -> inspect.Parameter:
    """A setting's option. Values stay text: the schema parses them, so that a flag and a file give the same error."""
    flag, kind, metavar = flag_of(name), str | None, "NAME"
    if field.annotation is bool:
        flag, kind, metavar = f"{flag}/--no-{flag[2:]}", bool | None, ""
    elif get_origin(field.annotation) is dict:
        kind, metavar = list[str] | None, "KEY=VALUE"
    elif isinstance(field.default, tuple):
        kind = list[str] | None
    elif not recipes.choices(name):
        placeholders = {"devices": "N|NAMES", "image_size": "HxW", int: "INTEGER", float: "NUMBER", str: "TEXT"}
        keys = (name, field.annotation, *get_args(field.annotation))
        metavar = next(placeholders[key] for key in keys if key in placeholders)
    usage = f"{flag} {metavar}"
    text = option(kind, _help(name, field), usage, panel=field.json_schema_extra["panel"])
    return _parameter(name, text, None)


def _help(name: str, field: Any) -> str:
    """A setting's description, choices and default."""
    text = " ".join(field.description.split())
    if names := recipes.choices(name):
        text += f" One of: {', '.join(names)}."
    if field.default in (None, {}, ()):
        return text
    shown = ", ".join(field.default) if isinstance(field.default, tuple) else str(field.default)
    if field.annotation is bool:
        shown = "yes" if field.default else "no"
    return f"{text} [default: {shown}]"


def chosen(options: Any, names: Sequence[str]) -> dict[str, Any]:
    """The options among `names` that were given, from an object of `with_options`."""
    values = {name: getattr(options, name) for name in names}
    return {name: value for name, value in values.items() if value is not None and value is not False}


def pairs(flag: str, words: Sequence[str]) -> dict[str, Any]:
    """Parses KEY=VALUE arguments; values are parsed as in a config file."""
    found = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"{flag} must be KEY=VALUE. Received: {word!r}. Write, for example, {flag} name=0.5.")
        if key in found:
            raise InputError(f"{flag} gives {key!r} twice. Keep one of them.")
        found[key] = parse_value(text)
    return found
