"""`tfgpu doctor`: finds what stops or slows training on this machine."""

import functools
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from tfgpu.cli import screen
from tfgpu.cli.flags import AsJson, JsonTo, argument, check_json, option, put_json, with_options
from tfgpu.cli.start import complain
from tfgpu.errors import InputError

app = typer.Typer()
_train, _bundle = functools.partial(option, panel="Self-test"), functools.partial(option, panel="Bug report")
_WIDTHS = (len("Training parameter_server"), len("problem"), None)
"""Column widths of the self-test, which prints each check as a separate table as soon as it is done."""
_PIECES_WIDTH = 110
"""The least width of a terminal for the table of pieces; in a narrower one, names would break within words."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `tfgpu doctor`."""

    script: argument(
        list[str] | None,
        "SCRIPT",
        "Check this script's training step instead. Shows which losses, metrics and layers need all rows, why, and the "
        "bytes sent. The script runs to the end of its first step; its own options follow --.",
    ) = None
    as_json: AsJson = False
    json_to: JsonTo = None
    fix: option(bool, "Print a shell script that fixes what was found. Nothing is run.", "--fix") = False
    model: option(str | None, "Also advise on the layers of this model.", "NAME") = None
    train: _train(
        bool,
        "Also measure devices and links, and train with every strategy (two minutes). Each check is shown as it ends; "
        "Ctrl-C keeps the checks so far.",
        "--train",
    ) = False
    hosts: _train(str | None, "Machines to reach by ssh, for --train: host1,host2 [two processes here].", "HOSTS") = (
        None
    )
    ssh: _train(str | None, "The ssh command, with your own options.", "COMMAND") = None
    bundle: _bundle(bool, "Write a .zip to attach to a bug report.", "--bundle") = False
    run: _bundle(Path | None, "A run, or the logs of a launch, to include.", "DIR") = None
    output: _bundle(Path | None, "The bundle [tfgpu-doctor-<time>.zip].", "--output -o FILE") = None


@screen.command(app, "doctor", "script fix model train hosts bundle as_json json_to")
@with_options(Options)
def doctor(options: Options) -> None:
    """Find what stops or slows training here, and how to fix it.

    Find what stops or slows training on this machine, and how to fix it.

    tfgpu doctor
    tfgpu doctor --fix > fix.sh
    tfgpu doctor --train --hosts host1,host2
    tfgpu doctor --bundle --run runs/best
    tfgpu doctor train.py -- --epochs 3
    """
    check_json(options.json_to)
    if options.script:
        _examine_script(options)
        return
    if options.as_json and options.fix:
        raise InputError("--json and --fix cannot be combined: --json includes each command. Give one of them.")
    _only_with("--train", options.train, {"--hosts": options.hosts, "--ssh": options.ssh})
    _only_with("--bundle", options.bundle, {"--run": options.run, "--output": options.output})
    from tfgpu.doctor import advise, gather, judge, selftest, stops_training
    from tfgpu.doctor import bundle as bundles

    hosts = [] if options.hosts is None else selftest.checked(options.hosts.split(","))
    path = bundles.checked(options.output or bundles.default_path(), options.run) if options.bundle else None
    environ = dict(os.environ)
    for_programs = options.as_json or options.fix
    with Console(stderr=True).status("checking this machine; probing Keras takes about 20 s"):
        advice = advise(options.model)
        facts = gather(environ)
        checks = [*judge(facts, environ), *advice]
    if not for_programs:
        Console().print(_table(_summed_up(checks)))
    console = Console(stderr=for_programs)
    examine = functools.partial(selftest.examine, facts, environ, workers=hosts, ssh=options.ssh)
    interrupted = options.train and _self_test(checks, examine, console)
    _show_result(checks, options, interrupted)
    if interrupted:
        complain("Interrupted: the checks above are done; the rest of the self-test is not.")
        raise typer.Exit(130)
    if path:
        bundles.write(path, checks, facts, environ=environ, run=options.run)
        words = f"Wrote {path}. Read it before you send it; {bundles.LEFT_OUT} in it lists what was removed."
        Console(stderr=True, soft_wrap=True, highlight=False).print(words, markup=False)
    if stops_training(checks):
        raise typer.Exit(1)


def _examine_script(options: Options) -> None:
    """Shows how each piece of a script's step runs on replicas."""
    others = replace(options, script=None, as_json=False, json_to=None)
    if others != Options():
        raise InputError(
            "With a script, `tfgpu doctor` takes only --json and --json-to. To check the machine, omit the script."
        )
    from tfgpu.doctor import pieces

    script, *arguments = options.script or []
    with Console(stderr=True).status("running the script up to its first step"):
        found = pieces.rehearse(script, arguments, environ=dict(os.environ))
    if not put_json(pieces.to_json(found), as_json=options.as_json, json_to=options.json_to):
        _show_pieces(found)
    if found.failed:
        raise typer.Exit(1)


def _show_pieces(found: Any) -> None:
    console = Console()
    if found.pieces:
        names = ("name", "verdict", "source", "why", "traffic")
        rows = [[escape(piece[name]) for name in names] for piece in found.pieces]
        if console.width >= _PIECES_WIDTH:
            console.print(screen.table(("piece", "computed", "known by", "why", "sent"), rows, fold=True))
        else:
            for name, verdict, source, why, traffic in rows:
                said = "; ".join(filter(None, (f"{verdict} ({source})", why, traffic)))
                console.print(f"[bold]{name}[/]", Padding(said, (0, 0, 0, 2)))
    if found.error:
        complain(f"The script ended before its first step: {found.error}")
    elif not found.replicas:
        console.print("The script ran no training step on several replicas. Make its strategy with `tfgpu.strategy()`.")
    elif not found.pieces:
        console.print("Every piece of the step is Keras's own, and is computed by rows.")


def _show_result(checks: Sequence[Any], options: Options, interrupted: bool) -> None:
    from tfgpu.doctor import script, to_json

    if put_json(to_json(checks), as_json=options.as_json, json_to=options.json_to):
        return
    if options.fix:
        print(script(checks), end="")
    elif not interrupted:
        _show_counts(checks)


def _self_test(checks: list[Any], examine: Callable[..., object], console: Console) -> bool:
    """Runs the self-test, and shows each check as soon as it is done; returns whether Ctrl-C ended it."""

    def tell(check: Any) -> None:
        checks.append(check)
        status.stop()  # It occupies the terminal's last line, whichever stream the check is written to.
        console.print(_table([check], _WIDTHS, show_header=False))
        status.start()

    words = "measuring and training; a minute or two on an idle machine, longer on a busy one"
    with Console(stderr=True).status(words) as status:
        try:
            examine(on_check=tell)
        except KeyboardInterrupt:
            return True
    return False


def _only_with(flag: str, is_given: bool, others: dict[str, object]) -> None:
    for name, value in others.items():
        if value is not None and not is_given:
            raise InputError(f"{name} is for {flag}. Add {flag}, or omit {name}.")


def _table(checks: Sequence[Any], widths: Sequence[int | None] = (None, None, None), **options: Any) -> Table:
    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), **options)
    for heading, width in zip(("check", "status", "found"), widths, strict=True):
        table.add_column(heading, overflow="fold", min_width=width)
    for check in checks:
        fix = f"\n[bold]fix:[/] {escape(check.fix)}" if check.fix else ""
        table.add_row(escape(check.name), marks[check.status], escape(check.found) + fix)
    return table


def _show_counts(checks: Sequence[Any]) -> None:
    console = Console()
    counts = Counter(check.status for check in checks)
    if counts["problem"] or counts["warning"]:
        text = f"\n{counts['problem']} problem(s), {counts['warning']} warning(s)."
        console.print(text + (" --fix prints a script." if any(check.command for check in checks) else ""))
    else:
        console.print("\nNo problems found.")


def _summed_up(checks: Sequence[Any]) -> list[Any]:
    """Merges the Keras repairs that need no attention into one line; `--json` lists them all."""
    repairs = [check for check in checks if check.name.startswith("Keras repair") and check.status == "ok"]
    if len(repairs) < 2:
        return list(checks)
    needed = sum("needed here;" in check.found for check in repairs)
    text = f"{needed} of {len(repairs)} faults are in this Keras; tfgpu.strategy() repairs them (--json lists them)"
    at = checks.index(repairs[0])
    kept = [check for check in checks if check not in repairs]
    return [*kept[:at], replace(repairs[0], name="Keras repairs", found=text), *kept[at:]]
