"""`tfgpu launch`: a script in many processes, on this machine or on several."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tfgpu.errors import InputError
from tfgpu.launch.attempts import GRACE_S
from tfgpu.launch.job import Job
from tfgpu.launch.screen import default_folder

app = typer.Typer()
_SSH = "Several machines"


@app.command(
    "launch",
    help="Run a script in several processes that train together, stay with them, and start them again after a failure.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu launch -n 4 train.py --epochs 3\n\n"
        "tfgpu launch -n 2 --ps 1 --max-restarts 3 train.py\n\n"
        "tfgpu launch --nodes gpu1,gpu2 -n 8 train.py"
    ),
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
)
def launch_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The Python file.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-n", metavar="N", help="Processes that train, on all machines together \\[1 each]."),
    ] = None,
    parameter_servers: Annotated[
        int, typer.Option("--ps", metavar="N", help="Parameter servers; with them a chief is added, too.")
    ] = 0,
    evaluator: Annotated[
        bool, typer.Option("--evaluator", help="Add a process that evaluates what the others save.")
    ] = False,
    gpus_per_worker: Annotated[
        int | None, typer.Option(metavar="G", help="GPUs of each worker \\[an equal share]; 0 trains on the CPU.")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option(metavar="R", help="How often to start all processes again after a failure.")
    ] = 0,
    startup_timeout: Annotated[
        float, typer.Option(metavar="S", help="Seconds until a process that does not answer at the start is named.")
    ] = 60.0,
    silence: Annotated[
        float, typer.Option(metavar="S", help="Seconds without a sign of life until a process counts as stopped.")
    ] = 60.0,
    grace: Annotated[
        float, typer.Option(metavar="S", help="Seconds to save after Ctrl-C, SIGTERM or a preemption.")
    ] = GRACE_S,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder for a log file each \\[tfgpu-logs/<time>-<script>].")
    ] = None,
    no_logs: Annotated[bool, typer.Option("--no-logs", help="Write no log files.")] = False,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=VALUE]", help="A variable for every process; its value here if none is given."),
    ] = None,
    nodes: Annotated[
        str | None, typer.Option(metavar="HOSTS", help="Machines reached by ssh: host1,host2.", rich_help_panel=_SSH)
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PATH", help="The interpreter there \\[as here].", rich_help_panel=_SSH)
    ] = None,
    directory: Annotated[
        str | None, typer.Option(metavar="DIR", help="Where to run there \\[as here].", rich_help_panel=_SSH)
    ] = None,
    ssh: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="ssh with options of your own.", rich_help_panel=_SSH)
    ] = None,
) -> None:
    hosts = nodes.split(",") if nodes is not None else []
    if no_logs and logs:
        raise InputError("--logs and --no-logs exclude each other. Give one of them.")
    job = Job(
        script,
        tuple(arguments or ()),
        workers=max(1, len(hosts)) if workers is None else workers,
        parameter_servers=parameter_servers,
        evaluator=evaluator,
        gpus_per_worker=gpus_per_worker,
        max_restarts=max_restarts,
        startup_timeout_s=startup_timeout,
        silence_s=silence,
        logs=None if no_logs else logs or default_folder(script),
        environment=_variables(env or ()),
    )
    if hosts:
        from tfgpu.launch.ssh import launch

        code = launch(job, hosts, python=python, directory=directory, ssh=ssh or "ssh", grace_s=grace)
    else:
        from tfgpu.launch.local import launch

        _only_for_nodes(python=python, directory=directory, ssh=ssh)
        code = launch(job, grace_s=grace)
    raise typer.Exit(code)


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals and name not in os.environ:
            raise InputError(f"--env {name}: there is no such variable here. Write --env {name}=VALUE.")
        found[name] = value if equals else os.environ[name]
    return found


def _only_for_nodes(**given: str | None) -> None:
    for name, value in given.items():
        if value is not None:
            raise InputError(f"--{name} is for other machines. Add --nodes HOSTS, or leave it out.")
