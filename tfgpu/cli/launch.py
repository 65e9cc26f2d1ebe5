"""`tfgpu run`: runs a script; `tfgpu launch`: in many processes, here or by ssh, through Slurm or on Kubernetes."""

import functools
import math
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from tfgpu import rendezvous
from tfgpu.cli import screen
from tfgpu.cli.flags import argument, chosen, option, with_options
from tfgpu.errors import InputError
from tfgpu.launch.job import Job
from tfgpu.launch.local import GRACE_S
from tfgpu.launch.screen import default_folder
from tfgpu.redact import Cleaner, is_secret
from tfgpu.run import OPTION, interrupted, run

app = typer.Typer()
_ssh, _slurm = functools.partial(option, panel="Several machines"), functools.partial(option, panel="Slurm")
_k8s = functools.partial(option, panel="Kubernetes")
_BATCH_GRACE_S = 60
_OF_SSH = ("python", "directory", "ssh")
_OF_SLURM = ("nodes", "time", "partition", "account", "sbatch", "dry_run", "wait")
_OF_KUBERNETES = (
    *("name", "image", "claim", "claim_size", "storage_class", "namespace", "mount", "cpu", "memory", "shared_memory"),
    *("port", "user", "pull_secret", "scheduling_s", "node_selector", "labels", "in_image"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tfgpu launch`."""

    script: argument(str, "SCRIPT", "The Python file, before its own arguments.")
    arguments: argument(list[str] | None, "ARGUMENTS", "Arguments of the script.") = None
    workers: option(int | None, "Training processes, on all machines together [one on each].", "--workers -n N") = None
    parameter_servers: option(int, "Number of parameter servers, which also add a chief.", "--ps N") = 0
    evaluator: option(bool, "Add a process that evaluates the checkpoints.", "--evaluator") = False
    gpus_per_worker: option(int | None, "GPUs per worker [an equal share]; 0 trains on the CPU.", "N") = None
    max_restarts: option(int, "How often to restart all processes after a failure.", "N") = 0
    startup_timeout_s: option(float, "Seconds to wait for all processes at the start.", "--startup-timeout SECONDS") = (
        60.0
    )
    heartbeat_timeout_s: option(
        float, "Seconds without a heartbeat after which a process has failed; 0: never.", "--heartbeat-timeout SECONDS"
    ) = 60.0
    grace_period_s: option(
        float | None,
        f"Seconds to save after Ctrl-C, SIGTERM or preemption [{GRACE_S:g}; Slurm, Kubernetes: {_BATCH_GRACE_S}].",
        "--grace-period SECONDS",
    ) = None
    logs: option(Path | None, "Folder for the log files [tfgpu-logs/<time>-<script>].", "DIR") = None
    no_logs: option(bool, "Write no log files.", "--no-logs") = False
    environment: option(
        list[str] | None, "A variable for every process; without VALUE, its value here.", "--env NAME[=VALUE]"
    ) = None
    hosts: _ssh(str | None, "Machines to reach by ssh: host1,host2.", "HOSTS") = None
    python: _ssh(str | None, "Python interpreter on the machines [as here].", "PATH") = None
    directory: _ssh(str | None, "Working directory on the machines [as here].", "DIR") = None
    ssh: _ssh(str | None, "The ssh command, with your own options.", "COMMAND") = None
    slurm: _slurm(bool, "Submit to Slurm; -n: processes on all nodes together.", "--slurm") = False
    nodes: _slurm(str | None, "Number of machines [1].", "N") = None
    time: _slurm(str | None, "Time limit: minutes, 12:00:00 or 2-12:00:00 [the partition's].", "LIMIT") = None
    partition: _slurm(str | None, "Partition of the job [the default one].", "NAME") = None
    account: _slurm(str | None, "Account to charge [your default].", "NAME") = None
    sbatch: _slurm(list[str] | None, "Another option for sbatch: --sbatch=--qos=high.", "OPTION") = None
    dry_run: _slurm(bool, "Show the batch file without submitting it.", "--dry-run") = False
    wait: _slurm(bool, "Wait for the job to end, and exit with its code.", "--wait") = False
    kubernetes: _k8s(str | None, "Print manifests (job, tfjob); start nothing.", "KIND") = None
    name: _k8s(str | None, "Name of the objects and pods.", "NAME") = None
    image: _k8s(str | None, "The container image.", "IMAGE") = None
    in_image: _k8s(bool, "The script is a path in the image.", "--in-image") = False
    claim: _k8s(str | None, "The volume claim for the checkpoints.", "NAME") = None
    claim_size: _k8s(str | None, "Create the claim with this size, such as 100Gi.", "SIZE") = None
    storage_class: _k8s(str | None, "Storage class of a created claim [the cluster's default].", "NAME") = None
    namespace: _k8s(str | None, "Namespace of the objects [kubectl's].", "NAME") = None
    mount: _k8s(str | None, "Mount path of the claim [/checkpoints].", "DIR") = None
    cpu: _k8s(str | None, "Cores of each pod [4].", "N") = None
    memory: _k8s(str | None, "Memory of each pod [16Gi].", "SIZE") = None
    shared_memory: _k8s(str | None, "/dev/shm of each pod [2Gi].", "SIZE") = None
    scheduling_s: _k8s(int | None, "Limit for the start of all pods [600].", "--scheduling-timeout SECONDS") = None
    port: _k8s(int | None, "Port of the workers [2222].", "PORT") = None
    user: _k8s(int | None, "User that the container runs as [10001].", "UID") = None
    pull_secret: _k8s(str | None, "Secret for the image registry.", "NAME") = None
    node_selector: _k8s(list[str] | None, "A label that nodes must have.", "KEY=VALUE") = None
    labels: _k8s(list[str] | None, "A label for all objects.", "--label KEY=VALUE") = None


@screen.command(app, "run", of_script=True)
def run_script(
    script: argument(str, "SCRIPT", "The Python file."),
    arguments: argument(list[str] | None, "ARGUMENTS", "Arguments of the script.") = None,
    startup_timeout: option(
        str | None,
        "Seconds to wait for the other processes of the cluster; 0 does not wait [60]. Put it before SCRIPT.",
        "SECONDS",
    ) = None,
) -> None:
    """Run your script, unmodified, with the Keras repairs installed.

    tfgpu run train.py --epochs 3
    """
    seconds = None if startup_timeout is None else rendezvous.timeout_s({OPTION: startup_timeout}, name=OPTION)
    try:
        run(script, arguments or [], startup_timeout_s=seconds)
    except KeyboardInterrupt as interrupt:
        raise KeyboardInterrupt(interrupted(interrupt, script)) from None


@screen.command(
    app,
    "launch",
    "script workers gpus_per_worker parameter_servers max_restarts hosts slurm kubernetes environment logs",
    of_script=True,
)
@with_options(Options)
def launch_script(options: Options) -> None:
    """Run a script as several processes that train together.

    Run a script in several processes that train together, supervise them, and restart them after a failure.

    tfgpu launch -n 4 train.py --epochs 3
    tfgpu launch -n 2 --ps 1 --max-restarts 3 train.py
    tfgpu launch --hosts gpu1,gpu2 -n 8 train.py
    tfgpu launch --slurm --nodes 2 -n 8 --gpus-per-worker 1 --time 12:00:00 train.py
    tfgpu launch --kubernetes job -n 4 --gpus-per-worker 1 --name digits --image IMAGE --claim runs train.py
    """
    _check(options)
    job = _job(options)
    if options.slurm or options.kubernetes is not None:
        _warn_of_secrets(job, options)
    if options.kubernetes is None:
        raise typer.Exit(_launch(job, options))
    print(_manifests(job, options), end="")


def _check(options: Options) -> None:
    """Rejects options that cannot be combined, or that belong to another engine."""
    if options.nodes is not None and not options.nodes.isdecimal():
        raise InputError(
            f"--nodes is the number of machines, for --slurm. Received: {options.nodes!r}. "
            "For machines to reach by ssh, write --hosts host1,host2."
        )
    engines = [name for name in ("hosts", "slurm", "kubernetes") if getattr(options, name) not in (None, False)]
    if len(engines) > 1:
        raise InputError(f"--{engines[0]} and --{engines[1]} cannot be combined. Give one of them.")
    own = (("hosts", "HOSTS", _OF_SSH), ("slurm", "", _OF_SLURM), ("kubernetes", "KIND", _OF_KUBERNETES))
    for engine, value, names in own:
        for name in chosen(options, names) if engine not in engines else ():
            raise InputError(
                f"`{name}` is an option of {f'--{engine} {value}'.strip()}. Add --{engine}, or omit `{name}`."
            )
    if options.no_logs and options.logs:
        raise InputError("--logs and --no-logs cannot be combined. Give one of them.")
    if options.kubernetes is not None and options.logs is not None:
        raise InputError("--logs is not for Kubernetes, which keeps the pods' logs itself. Use `kubectl logs`.")


def _hosts(options: Options) -> list[str]:
    return [] if options.hosts is None else options.hosts.split(",")


def _machines(options: Options) -> int:
    return int(options.nodes or 1) if options.slurm else max(1, len(_hosts(options)))


def _job(options: Options) -> Job:
    same = ("parameter_servers", "evaluator", "gpus_per_worker", "max_restarts", "startup_timeout_s")
    has_logs = not options.no_logs and options.kubernetes is None
    return Job(
        options.script,
        tuple(options.arguments or ()),
        workers=_machines(options) if options.workers is None else options.workers,
        logs=options.logs or default_folder(options.script) if has_logs else None,
        environment=_variables(options.environment or ()),
        **{name: getattr(options, name) for name in (*same, "heartbeat_timeout_s")},
    )


def _launch(job: Job, options: Options) -> int:
    if options.slurm:
        from tfgpu.launch.slurm.submission import Allocation, launch

        limits = options.time, options.partition, options.account, _batch_grace_s(options), tuple(options.sbatch or ())
        allocation = Allocation(_machines(options), *limits)
        return launch(job, allocation, dry_run=options.dry_run, wait=options.wait)
    grace_period_s = GRACE_S if options.grace_period_s is None else options.grace_period_s
    if hosts := _hosts(options):
        from tfgpu.launch.ssh import launch

        remote = dict(python=options.python, directory=options.directory, ssh=options.ssh or "ssh")
        return launch(job, hosts, **remote, grace_period_s=grace_period_s)
    from tfgpu.launch.local import launch

    return launch(job, grace_period_s=grace_period_s)


def _batch_grace_s(options: Options) -> int:
    return _BATCH_GRACE_S if options.grace_period_s is None else math.ceil(options.grace_period_s)


def _warn_of_secrets(job: Job, options: Options) -> None:
    """Says on stderr how to keep secrets out of batch files and manifests, which others may read."""
    words = shlex.join(job.arguments)
    if Cleaner(job.environment).hide(words) != words:
        typer.echo(
            "The script's arguments seem to contain a secret, and are written to a file that others may read. "
            "Pass it with --env NAME.",
            err=True,
        )
    names = [name for name in job.environment if is_secret(name)]
    if names and options.kubernetes is not None:
        where = f" --namespace={options.namespace}" if options.namespace else ""
        values = " ".join(f'--from-literal={name}="${name}"' for name in names)
        typer.echo(
            f"{', '.join(names)}: read from a Secret. Create it with: "
            f"kubectl create secret generic {options.name}-secrets{where} {values}",
            err=True,
        )


def _manifests(job: Job, options: Options) -> str:
    from tfgpu.launch.kubernetes import Kubernetes, render

    given = chosen(options, _OF_KUBERNETES)
    for needed in ("name", "image", "claim"):
        if needed not in given:
            raise InputError(f"--kubernetes needs --name, --image and --claim. Missing: --{needed}. Add it.")
    path, in_image = Path(job.script), given.pop("in_image", False)
    if not in_image and not path.is_file():
        raise InputError(f"There is no script {job.script!r}. Give a file, or add --in-image for one in the image.")
    for field in ("node_selector", "labels"):
        if field in given:
            pairs = [text.partition("=") for text in given[field]]
            if wrong := [key for key, equals, _ in pairs if not equals]:
                raise InputError(f"A label must be KEY=VALUE. Received: {wrong[0]!r}.")
            given[field] = {key: value for key, _, value in pairs}
    how = {"source": None if in_image else path.read_text(), "grace_period_s": _batch_grace_s(options)}
    return render(job, Kubernetes(kind=options.kubernetes, **how, **given))


def _variables(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals and name not in os.environ:
            raise InputError(f"--env {name}: the variable is not set here. Write --env {name}=VALUE.")
        found[name] = value if equals else os.environ[name]
    return found
