"""`tfgpu run`: runs a user's script."""

import typer

from tfgpu import rendezvous
from tfgpu.cli import screen
from tfgpu.cli.flags import argument, option
from tfgpu.run import OPTION, interrupted, run

app = typer.Typer()


@app.command(
    "run",
    cls=screen.Command,
    help="Run your script, unmodified, with the Keras repairs installed.",
    epilog=screen.examples("tfgpu run train.py --epochs 3"),
    context_settings={"allow_interspersed_args": False},
)
def run_script(
    script: argument(str, "SCRIPT", "The Python file."),
    arguments: argument(list[str] | None, "ARGUMENTS", "Arguments of the script.") = None,
    startup_timeout: option(
        str | None,
        "Seconds to wait for the other processes of the cluster; 0 does not wait [60]. Put it before SCRIPT.",
        metavar="SECONDS",
    ) = None,
) -> None:
    seconds = None if startup_timeout is None else rendezvous.timeout_s({OPTION: startup_timeout}, name=OPTION)
    try:
        run(script, arguments or [], startup_timeout_s=seconds)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(interrupted(interrupt, script)) from None
