"""The command line. Each command calls one library function; the options of `train` come from the recipe schema.

Nothing here imports TensorFlow before the input is validated, so that `--help` and errors are fast.
Exit codes: 0 success, 1 training failed or the doctor found a problem, 2 invalid input, 75 preempted (SIGTERM) and
saved, 130 interrupted.
"""

import runpy
import sys
import traceback
from collections.abc import Sequence
from types import TracebackType
from typing import Annotated

import typer

from tfgpu.cli import (
    bench,
    compare,
    data,
    doctor,
    export,
    find,
    kernel,
    launch,
    plan,
    profile,
    run,
    top,
    train,
    tune,
    verify,
)
from tfgpu.cli.start import complain, debugging
from tfgpu.errors import InputError, MachineError

app = typer.Typer(
    help="Change the hardware, not the result: Keras training on one GPU, eight, or many machines.",
    epilog=(
        "Start with [bold]tfgpu train[/], or [bold]tfgpu doctor[/] to see what this machine has.\n\n"
        "[bold]Examples[/]\n\n"
        "tfgpu train\n\n"
        "tfgpu doctor\n\n"
        "tfgpu run train.py --epochs 3\n\n"
        "tfgpu launch -n 4 train.py"
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code.

    Args:
        arguments: the arguments after `tfgpu`; None takes those of the process.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_execute(words))


def _execute(words: list[str]) -> int:
    try:
        return app(words, prog_name="tfgpu", standalone_mode=False) or 0
    except typer.Abort as error:  # An interrupt in a command that does not report it itself.
        ended = error.__cause__ or error.__context__
        if isinstance(ended, EOFError):  # Typer treats it as an interrupt.
            return _complain_of(ended, words)
        complain("Interrupted.")
        return 130
    except typer.TyperException as error:
        if message := error.format_message():  # Empty after the help that a command without arguments prints.
            context = getattr(error, "ctx", None)
            stop = "" if message.endswith((".", "?", ")")) else "."
            complain(f"{message}{stop} See `{context.command_path if context else 'tfgpu'} --help`.")
        return error.exit_code
    except Exception as error:
        return _complain_of(error, words)


def _complain_of(error: Exception, words: list[str]) -> int:
    """Prints an error as one line, or as a traceback if a script failed; returns the exit code."""
    is_in_script, lines = _within_script(error)
    if is_in_script:
        traceback.print_exception(type(error), error, lines)
    elif isinstance(error, InputError | MachineError):
        complain(str(error))
    elif debugging(words):
        traceback.print_exception(error)
        complain(_one_line(error))
    else:
        complain(f"{_one_line(error)} Set TFGPU_DEBUG=1 for a traceback.")
    return 2 if isinstance(error, InputError) else 1


def _within_script(error: Exception) -> tuple[bool, TracebackType | None]:
    """Whether a script run by `runpy` failed, and its part of the traceback (None for a syntax error)."""
    found, is_run = error.__traceback__, False
    while found is not None:
        is_runpy = found.tb_frame.f_code.co_filename in (runpy.__file__, "<frozen runpy>")
        if is_run and not is_runpy:
            return True, found
        is_run, found = is_run or is_runpy, found.tb_next
    return is_run, None


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


app.add_typer(train.app)
app.add_typer(run.app)
app.add_typer(launch.app)
app.add_typer(data.app, name="data")
app.add_typer(doctor.app)
app.add_typer(plan.app)
app.add_typer(bench.app, name="bench")
app.add_typer(profile.app)
app.add_typer(tune.app)
app.add_typer(find.app, name="find")
app.add_typer(export.app)
app.add_typer(compare.app)
app.add_typer(verify.app)
app.add_typer(kernel.app)
app.add_typer(top.app)


def _one_line(error: Exception) -> str:
    """The first line of an error, with its type: the message of a `KeyError` is only the key."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return said if said.endswith((".", "!", "?")) else f"{said}."
