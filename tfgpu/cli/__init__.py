"""The command line. Each command calls one library function; `train` has its flags from the schema.

Nothing here imports TensorFlow before the input is validated, so that `--help` and errors are quick.
Exit codes: 0 done, 1 training failed or the doctor found a problem, 2 wrong input, 75 asked to leave
(SIGTERM) and saved, 130 interrupted.
"""

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated

import typer

from tfgpu.cli import bench, compare, data, doctor, export, find, kernel, launch, plan, profile, run, top, train, tune
from tfgpu.cli.start import complain, debugging
from tfgpu.errors import InputError, MachineError

app = typer.Typer(
    help="Change the hardware, not the result: Keras training on one GPU, eight, or many machines.",
    epilog="Start with [bold]tfgpu train[/], or [bold]tfgpu doctor[/] to see what this machine has.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits with its code.

    Args:
        arguments: the words after `tfgpu`; None takes the process's own.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_execute(words))


def _execute(words: list[str]) -> int:
    try:
        return app(words, prog_name="tfgpu", standalone_mode=False) or 0
    except typer.Abort:  # An interrupt in a command that has no words of its own for it.
        complain("Interrupted.")
        return 130
    except typer.TyperException as error:
        if message := error.format_message():  # None after a help that was asked for by saying nothing.
            context = getattr(error, "ctx", None)
            stop = "" if message.endswith((".", "?", ")")) else "."
            complain(f"{message}{stop} See `{context.command_path if context else 'tfgpu'} --help`.")
        return error.exit_code
    except InputError as error:
        complain(str(error))
        return 2
    except MachineError as error:
        complain(str(error))
        return 1
    except Exception as error:
        if debugging(words):
            traceback.print_exc()
        complain(_one_line(error) + ("" if debugging(words) else " Set TFGPU_DEBUG=1 to see where."))
        return 1


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
app.add_typer(kernel.app)
app.add_typer(top.app)


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
