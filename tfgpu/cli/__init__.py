"""The command line. Each command calls one library function; the options of `train` come from the recipe schema.

Nothing here imports TensorFlow before the input is validated, so that `--help` and errors are fast.
Exit codes: 0 success, 1 training failed or the doctor found a problem, 2 invalid input, 75 preempted (SIGTERM) and
saved, 130 interrupted.
"""

import re
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from tfgpu.cli import compare, data, doctor, export, launch, moved, plan, profile, screen, top, train, tune
from tfgpu.cli.flags import in_flags
from tfgpu.cli.start import complain, debugging
from tfgpu.errors import InputError, MachineError
from tfgpu.launch import ending
from tfgpu.run import show, within_script

_INTERRUPTED = 130
app = typer.Typer(
    cls=screen.Group,
    help="Change the hardware, not the result: Keras training on one GPU, eight, or many machines.",
    epilog=screen.examples(
        "tfgpu train digits", "tfgpu run train.py --epochs 3", "tfgpu launch -n 4 train.py", "tfgpu doctor"
    ),
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings=screen.HELP,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code.

    Args:
        arguments: the arguments after `tfgpu`; None takes those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    code = _execute(words)
    if code == _INTERRUPTED and arguments is None:
        ending.leave(code)  # to destroy all objects first takes seconds
    sys.exit(code)


def _execute(words: list[str]) -> int:
    try:
        return app(words, prog_name="tfgpu", standalone_mode=False) or 0
    except typer.Abort as error:  # An interrupt in a command that does not report it itself.
        ended = error.__cause__ or error.__context__
        if isinstance(ended, EOFError):  # Typer treats it as an interrupt.
            return _complain_of(ended, words)
        complain("Interrupted.")
        return _INTERRUPTED
    except typer.TyperException as error:
        if message := error.format_message():  # Empty after the help that a command without arguments prints.
            context = getattr(error, "ctx", None)
            path = context.command_path if context else "tfgpu"
            name = getattr(error, "option_name", None)
            known = [each for option in context.command.params for each in option.opts] if context else []
            better = moved.option(path.removeprefix("tfgpu").strip(), name, words) or moved.foreign(name, known)
            stop = "" if message.endswith((".", "?", "?)")) else "."
            complain(f"{better or _plain(message) + stop} See `{path} --help`.")
        return error.exit_code
    except Exception as error:
        return _complain_of(error, words)


def _plain(message: str) -> str:
    """The parser's message without its words about parsing."""
    return re.sub(r"Input should be (.*), unable to parse .*", r"This must be \1", message).replace(
        "a valid integer", "a whole number"
    )


def _complain_of(error: Exception, words: list[str]) -> int:
    """Prints an error as one line, or as a traceback if a script failed; returns the exit code."""
    is_in_script, lines = within_script(error)
    if is_in_script:
        show(error, lines)
    elif isinstance(error, InputError | MachineError):
        complain(in_flags(str(error), getattr(error, "parameters", ())))
    elif debugging(words):
        traceback.print_exception(error)
        complain(_one_line(error))
    else:
        complain(f"{_one_line(error)} Set TFGPU_DEBUG=1 for a traceback.")
    return 2 if isinstance(error, InputError) else 1


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"tfgpu {version('tfgpu')}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


# In the order of the help. A command of two words comes after its first.
for _commands in (train, launch, tune, profile, plan, doctor, top, data, export, compare):
    app.add_typer(_commands.app, name="data" if _commands is data else None)


def _one_line(error: Exception) -> str:
    """The first line of an error, with its type: the message of a `KeyError` is only the key."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return said if said.endswith((".", "!", "?")) else f"{said}."
