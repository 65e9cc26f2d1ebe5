"""The help of commands: what matters first fits a terminal of 80 x 24 characters; `--help-all` shows every option."""

import contextlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from typer.core import TyperArgument, TyperCommand, TyperGroup, TyperOption

from tfgpu.cli import moved
from tfgpu.cli.start import complain
from tfgpu.errors import InputError, MachineError

HELP = {"help_option_names": ["-h", "--help", "--help-all"]}
_ALL = "--help-all"
_WIDEST = 120


def table(
    titles: Sequence[str], rows: Iterable[Iterable], *, right: Sequence[str] = (), fold: bool = False, **options: Any
) -> Table:
    """A table without lines.

    Args:
        titles: the columns' headings.
        rows: their cells.
        right: those of columns that are aligned to the right.
        fold: whether long cells take several lines.
        options: other arguments of `rich.table.Table`.
    """
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)
    for title in titles:
        made.add_column(title, justify="right" if title in right else "left", no_wrap=not fold, overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def examples(*lines: str, before: str = "") -> str:
    """The end of a command's help: a sentence, and examples of its use."""
    return "\n\n".join([*([before] if before else []), f"[bold]Example{'s' * (len(lines) > 1)}[/]", *lines])


def command(
    app: typer.Typer, name: str, first: str = "", *, of_script: bool = False, hidden: bool = False, **lines: str
):
    """Adds a function to an app as a command. Paragraphs of its docstring are its short help, its help and examples.

    Args:
        app: that gets the command.
        name: one word or two.
        first: the parameters of the short help, in their order; by default all.
        of_script: whether the words behind the first argument belong to a script.
        hidden: whether the list of commands lacks it.
        lines: by name, a line in place of the first sentence of a parameter's help.
    """

    def add(function: Callable[..., None]) -> Callable[..., None]:
        short, *texts = (inspect.getdoc(function) or "").split("\n\n")
        told, before = [" ".join(text.split()) for text in (*texts[:-1], "", "")][:2]
        shown = re.sub(r"\n +", " ", texts[-1] if texts else "").splitlines()  # an example may take several lines
        app.command(
            name,
            cls=type("Command", (Command,), {"first": {each: lines.get(each) for each in first.split()}}),
            context_settings={"allow_interspersed_args": not of_script},
            short_help=short,
            help=told or short,
            epilog=examples(*shown, before=before),
            hidden=hidden,
        )(function)
        return function

    return add


class Command(TyperCommand):
    """A command with a short help and a long one."""

    first: Mapping[str, str | None] = MappingProxyType({})
    """The lines of the short help; without any it shows all parameters."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ALL] = _ALL in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (InputError, MachineError) as error:
            error.parameters = self.params  # for `flags.in_flags`
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        shown = {each.name: each for each in self.params if not each.hidden}
        chosen = {} if ctx.meta.get(_ALL) else self.first
        siblings = ctx.parent.command.commands if ctx.parent else {}
        others = [
            (f"tfgpu {name}", each.short_help) for name, each in siblings.items() if name.startswith(f"{self.name} ")
        ]
        with _written(formatter) as console:
            _head(console, self, ctx, brief=bool(chosen))
            if chosen:
                lines = [(_names(shown[name], ctx), _line(shown[name], text)) for name, text in chosen.items()]
                _rows(console, "", lines)
            else:
                _panels(console, list(shown.values()), ctx)
            if others:
                _rows(console, "", others)
            _examples(console, self, ctx, whole=not chosen, left=len(shown) - len(chosen or shown))


class Group(TyperGroup):
    """Commands, some of two words (`tune batch-size`), whose first word may be a command too (`tune`)."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta[_ALL] = _ALL in args[:1]
        if not args and not ctx.resilient_parsing:
            typer.echo(ctx.get_help())
            raise typer.Exit(2)
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        for count in (2, 1):
            words = " ".join(args[:count])
            if words in self.commands and len(args) >= count:
                return words, self.commands[words], args[count:]
            if not ctx.resilient_parsing and (new := moved.command(words)):
                raise InputError(new)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as interrupt:  # Typer would end without a message.
            complain(str(interrupt) or "Interrupted.")
            raise typer.Exit(130) from None

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        return [item for item in super().shell_complete(ctx, incomplete) if " " not in item.value]

    def format_help(self, ctx: Any, formatter: Any) -> None:
        whole = ctx.meta.get(_ALL, False)
        listed = {name: each for name, each in self.commands.items() if whole or not (each.hidden or " " in name)}
        with _written(formatter) as console:
            _head(console, self, ctx)
            _rows(console, "", [(name, each.short_help or each.help or "") for name, each in listed.items()])
            if whole:
                _panels(console, self.params, ctx)
            _examples(console, self, ctx, whole=whole, left=len(self.commands) - len(listed))


@contextlib.contextmanager
def _written(formatter: Any) -> Iterator[Console]:
    """A console whose text goes to a formatter, without the spaces with which a table fills its lines."""
    console = Console(highlight=False)
    console.width = min(console.width, _WIDEST)
    with console.capture() as written:
        yield console
    formatter.write("".join(f"{line.rstrip()}\n" for line in written.get().splitlines()))


def _head(console: Console, command: Any, ctx: Any, *, brief: bool = False) -> None:
    pieces = " ".join(command.collect_usage_pieces(ctx)).replace("{", "").replace("}", "")
    console.print(f"Usage: {ctx.command_path} {pieces}", markup=False, style="bold")
    console.print(f"\n{(brief and command.short_help) or command.help}")


def _panels(console: Console, parameters: Sequence[Any], ctx: Any) -> None:
    """All parameters, by panel."""
    panels: dict[str, list[tuple[str, str]]] = {}
    for each in parameters:
        usual = "Arguments" if isinstance(each, TyperArgument) else "Options"
        panels.setdefault(each.rich_help_panel or usual, []).append(
            (_names(each, ctx), f"{each.help or ''}{_default(each)}")
        )
    for name, rows in panels.items():
        _rows(console, name, rows)


def _rows(console: Console, title: str, rows: Sequence[tuple[str, str]]) -> None:
    console.print(f"\n[bold]{title}[/]" if title else "")
    table = Table(box=None, show_header=False, padding=(0, 0, 0, 2))
    table.add_column(no_wrap=True, style="cyan")
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def _wrapped(line: str, width: int) -> str:
    """An example of a command, on lines that fit and can be pasted together."""
    if len(line) + 2 <= width:
        return f"  {line}"
    lines = textwrap.wrap(line, width - 6, break_long_words=False, break_on_hyphens=False)
    return " \\\n      ".join(["  " + lines[0], *lines[1:]])


def _names(parameter: Any, ctx: Any) -> str:
    """An option as one types it: `--output, -o DIR`."""
    if not isinstance(parameter, TyperOption):
        return str(parameter.metavar or parameter.name)
    names = ", ".join(sorted(parameter.opts, key=len, reverse=True))
    if parameter.secondary_opts:
        names += f"/{parameter.secondary_opts[0]}"
    return names if parameter.is_flag else f"{names} {_kind(parameter, ctx)}"


def _kind(option: TyperOption, ctx: Any) -> str:
    usual = {"int": "N", "INTEGER": "N", "float": "NUMBER"}
    found = option.metavar or str(option.display_type(ctx)).strip("<>").removesuffix(" range")
    return usual.get(found, found)


def _line(parameter: Any, text: str | None) -> str:
    """A line of the short help: the text, or the first sentence of the parameter's help with its default."""
    if text is not None:
        return escape(text)
    said, _, default = f"{parameter.help or ''}{_default(parameter)}".partition(" \\[default: ")
    said = said.partition(". ")[0].partition("; ")[0].rstrip(".")
    return f"{said} \\[{default}." if default else f"{said}."


def _default(parameter: Any) -> str:
    """The default of a parameter whose help does not have it."""
    value = parameter.default
    if not parameter.show_default or value is None or value is False or value == () or value == []:
        return ""
    return escape(f" [default: {'yes' if value is True else f'{value:g}' if isinstance(value, float) else value}]")


def _examples(console: Console, command: Any, ctx: Any, *, whole: bool, left: int) -> None:
    lines = (command.epilog or "").split("\n\n")
    at = next((at for at, line in enumerate(lines) if line.startswith("[bold]Example")), len(lines))
    for line in lines[:at]:
        console.print(f"\n{line}" if line else "")
    shown = lines[at + 1 :] if whole else lines[at + 1 : at + 3]
    if shown:
        console.print(f"\n{lines[at]}")
        for line in shown:
            console.print(_wrapped(line, console.width), soft_wrap=True)
    if left and not whole:
        kind = "option" if ctx.parent else "command"
        console.print(f"\n[dim]{ctx.command_path} {_ALL} shows {left} more {kind}{'s' * (left > 1)}.[/]")
