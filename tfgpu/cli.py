"""The command line. Each command calls one library function; `train` has its flags from the schema.

Nothing here imports TensorFlow before the input is validated, so that `--help` and errors are quick.
Exit codes: 0 done, 1 training failed or the doctor found a problem, 2 wrong input, 130 interrupted.
"""

import importlib
import inspect
import json
import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, get_args, get_origin

import typer
from rich.console import Console
from rich.markup import escape

from tfgpu.cluster import Cluster
from tfgpu.errors import InputError, MachineError
from tfgpu.measure import rates
from tfgpu.recipes import recipe as recipes
from tfgpu.run import run

app = typer.Typer(
    help="Change the hardware, not the result: Keras training on one GPU, eight, or many machines.",
    epilog="Start with [bold]tfgpu train[/], or [bold]tfgpu doctor[/] to see what this machine has.",
    add_completion=False,
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
        _complain("Interrupted.")
        return 130
    except typer.TyperException as error:
        if message := error.format_message():  # None after a help that was asked for by saying nothing.
            _complain(f"{message} See `tfgpu {_command(words)}--help`.")
        return error.exit_code
    except InputError as error:
        _complain(str(error))
        return 2
    except MachineError as error:
        _complain(str(error))
        return 1
    except Exception as error:
        if _debugging(words):
            traceback.print_exc()
        _complain(_one_line(error) + ("" if _debugging(words) else " Set TFGPU_DEBUG=1 to see where."))
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


def _train(
    *,
    config: Path | None,
    output: Path | None,
    resume: bool,
    overwrite: bool,
    debug: bool,
    **flags: Any,
) -> None:
    from tfgpu.recipes import directory

    settings = (recipes.read(config) if config else {}) | _given(flags)
    if resume:
        if output is None:
            raise InputError("--resume needs the run to go on with. Add --output DIR.")
        settings = directory.recorded(output) | settings
    recipe = recipes.make(settings, source=str(config) if config else None)
    recipes.check(recipe)
    Cluster.from_environment()
    directory.check(output, resume=resume, overwrite=overwrite)
    try:
        with Console().status("starting TensorFlow"):  # On a terminal only.
            _start_tensorflow(quiet=not _debugging(["--debug"] if debug else []))
            runner = _imported("tfgpu.recipes.runner")
        result = runner.run(recipe, output=output, resume=resume, overwrite=overwrite, show=True)
    except KeyboardInterrupt as interrupt:  # Typer would swallow the message.
        _complain(str(interrupt) or "Interrupted.")
        raise typer.Exit(130) from None
    if result.run_directory is not None:
        print(f"test accuracy: {result.accuracy:.1%}")
        print(result.run_directory)


def _train_signature() -> inspect.Signature:
    """Makes a parameter of each setting of the schema, then the few that are about the run and not in it."""
    own = {
        "config": (
            Path | None,
            None,
            ["--config", "-c"],
            "FILE",
            "Settings from a YAML file; flags win over it.",
        ),
        "output": (Path | None, None, ["--output", "-o"], "DIR", "The run directory [runs/<time>-<model>]."),
        "resume": (
            bool,
            False,
            ["--resume"],
            None,
            "Go on with the run in --output, after its last checkpoint.",
        ),
        "overwrite": (bool, False, ["--overwrite"], None, "Replace the run in --output."),
        "debug": (
            bool,
            False,
            ["--debug"],
            None,
            "Show a traceback when training fails (also TFGPU_DEBUG=1).",
        ),
    }
    return _recipe_signature(own)


def _recipe_signature(own: Mapping[str, tuple]) -> inspect.Signature:
    """Makes a command's own parameters, then one of each setting of the schema."""
    parameters = [
        _parameter(
            name,
            kind,
            typer.Option(
                default, *flags, metavar=metavar, help=escape(text), show_default=False, rich_help_panel="Run"
            ),
        )
        for name, (kind, default, flags, metavar, text) in own.items()
    ]
    for name, field in recipes.Recipe.model_fields.items():
        kind, flag, metavar = _flag(name, field)
        panel = field.json_schema_extra["panel"]
        option = typer.Option(None, *flag, metavar=metavar, help=_help(name, field), rich_help_panel=panel)
        parameters.append(_parameter(name, kind, option))
    return inspect.Signature(parameters)


def _flag(name: str, field: Any) -> tuple[Any, list[str], str | None]:
    """Gives a setting's type on the command line, its flag and its placeholder.

    Values stay text: the schema reads them, so that a flag and a file get the same sentence for a wrong one.
    """
    words = name.replace("_", "-")
    flag = field.json_schema_extra.get("flag", f"--{words}")
    if field.annotation is bool:
        return bool | None, [f"{flag}/--no-{words}"], None
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
    """Writes a setting's description, choices and default; backticks become bold."""
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


def _given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Keeps the flags that were written, with KEY=VALUE pairs as a mapping."""
    given = {name: value for name, value in flags.items() if value not in (None, [], ())}
    for name, value in given.items():
        if get_origin(recipes.Recipe.model_fields[name].annotation) is dict:
            given[name] = _pairs(recipes.Recipe.model_fields[name].json_schema_extra["flag"], value)
    return given


def _pairs(flag: str, words: Sequence[str]) -> dict[str, Any]:
    pairs = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals or not key.isidentifier():
            raise InputError(f"{flag} must be KEY=VALUE. Received: {word!r}. Write for example {flag} name=0.5.")
        if key in pairs:
            raise InputError(f"{flag} gives {key!r} twice. Keep one of them.")
        pairs[key] = recipes.parse_value(text)
    return pairs


_train.__signature__ = _train_signature()
_train.__annotations__ = {name: p.annotation for name, p in _train.__signature__.parameters.items()}
app.command(
    "train",
    help="Train a model and leave a run directory with the model, its metrics and a report.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu train\n\n"
        "tfgpu train --data photos/ --image-size 64 --model resnet --model-option depth=18 --epochs 30\n\n"
        "tfgpu train --strategy mirrored --virtual-devices 4 --path loop\n\n"
        "tfgpu train --config runs/best/config.yaml --output again --seed 1\n\n"
        "tfgpu train --resume --output runs/best"
    ),
)(_train)


@app.command(
    "run",
    help="Run a script of your own, unmodified, with the Keras repairs in force.",
    epilog="[bold]Example[/]\n\ntfgpu run train.py --epochs 3",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
)
def run_script(
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="The Python file.")],
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")] = None,
) -> None:
    run(script, arguments or [])


data_app = typer.Typer(
    help="Write data as shards, check them, and let other processes prepare it.", no_args_is_help=True
)
app.add_typer(data_app, name="data")


@data_app.command(
    "write",
    help="Write any source as TFRecord shards with checksums and an index; training on them gives the same batches.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu data write photos/ shards/ --shards 64\n\n"
        "tfgpu data write 'flowers.csv#species' shards/"
    ),
)
def write_data(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="What [bold]train --data[/] takes.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder for the shards.")],
    shards: Annotated[int, typer.Option(metavar="N", help="Files of the training part.")] = 8,
    name: Annotated[str | None, typer.Option(metavar="TEXT", help="What the files' names begin with.")] = None,
    image_size: Annotated[str | None, typer.Option(metavar="HxW", help="Resize images; they become PNG.")] = None,
    skip_corrupt: Annotated[bool, typer.Option("--skip-corrupt", help="Leave corrupt examples out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace shards that lie in OUT already.")] = False,
) -> None:
    from tfgpu.data import manifest, parse_source

    parse_source(source)
    manifest.check_shard_count(shards)
    manifest.check_output(out, overwrite=overwrite)
    size = recipes.make({"image_size": image_size}).image_size if image_size else None
    with Console(stderr=True).status("writing shards"):
        _start_tensorflow()
        write_shards = _imported("tfgpu.data.writer").write_shards
        listed = write_shards(
            source, out, shards=shards, name=name, image_size=size, skip_corrupt=skip_corrupt, overwrite=overwrite
        )
    _show_shards(listed, out)


@data_app.command("check", help="Read the shards in a folder and compare their checksums with the index.")
def check_data(
    folder: Annotated[Path, typer.Argument(metavar="OUT", help="What [bold]data write[/] wrote.")],
) -> None:
    from tfgpu.data import check_shards

    with Console(stderr=True).status("comparing checksums"):
        listed = check_shards(folder)
    _show_shards(listed, folder)


@data_app.command(
    "serve",
    help=(
        "Start a tf.data service: processes that decode and augment for training, until Ctrl-C. It prints the address "
        "that [bold]pipeline(service=...)[/] takes."
    ),
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu data serve --workers 4\n\n"
        "tfgpu data serve --host node1 --port 5050 --workers 16\n\n"
        "tfgpu data serve --host node2 --join node1:5050 --workers 16"
    ),
)
def serve_data(
    workers: Annotated[int, typer.Option(metavar="N", help="Processes that make batches.")] = 1,
    port: Annotated[int, typer.Option(metavar="N", help="The dispatcher's port; 0 takes a free one.")] = 0,
    host: Annotated[str, typer.Option(metavar="NAME", help="This machine, as others reach it.")] = "localhost",
    join: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Add workers to this dispatcher.")] = None,
) -> None:
    _start_tensorflow()
    serve = _imported("tfgpu.data.service").serve
    serve(workers, port=port, host=host, join=join, say=lambda line: print(line, flush=True))


def _show_shards(listed: Any, folder: Path) -> None:
    counts = ", ".join(f"{part} {count:,}" for part, count in listed.examples.items())
    print(f"{listed.name}: {counts} examples in {len(listed.shards)} shards, {listed.bytes:,} bytes")
    print(folder)


@app.command(help="Look for what stops or slows training on this machine, and say how to mend it.")
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Also advise on the layer sizes of this model."),
    ] = None,
) -> None:
    _start_tensorflow()
    from tfgpu.doctor import examine, stops_training, to_json

    with Console(stderr=True).status("looking at this machine; trying the faults of Keras takes some 20 s"):
        checks = examine(model=model)
    if as_json:
        print(to_json(checks))
    else:
        _show_checks(checks)
    if stops_training(checks):
        raise typer.Exit(1)


bench = typer.Typer(help="Measure how fast this machine does your own job.", no_args_is_help=True)
app.add_typer(bench, name="bench")


def _bench_input(*, config: Path | None, seconds: float, repeats: int, as_json: bool, **flags: Any) -> None:
    recipe = recipes.make((recipes.read(config) if config else {}) | _given(flags), source=str(config or "") or None)
    recipes.check(recipe)
    rates.check(seconds, repeats)
    with Console(stderr=True).status("starting TensorFlow") as status:
        _start_tensorflow()
        measured = _imported("tfgpu.measure.input").measure_input(
            recipe,
            seconds=seconds,
            repeats=repeats,
            progress=lambda text: status.update(f"measuring: {text}"),
        )
    if as_json:
        print(json.dumps(measured.as_json(), indent=2))
    else:
        _show_input(measured)


def _bench_input_signature() -> inspect.Signature:
    """Makes a parameter of each setting of the schema, and those of the measuring."""
    own = {
        "config": (Path | None, None, ["--config", "-c"], "FILE", "Settings from a YAML file; flags win over it."),
        "seconds": (float, 1.0, ["--seconds"], "NUMBER", "How long each single measurement takes [1]."),
        "repeats": (int, 3, ["--repeats"], "INTEGER", "How many there are of each [3]."),
        "as_json": (bool, False, ["--json"], None, "Print everything that was measured as JSON."),
    }
    return _recipe_signature(own)


def _show_input(measured: Any) -> None:
    from rich.table import Table

    console = Console(highlight=False)
    about = measured.facts
    shape = "×".join(str(n) for n in about["input_shape"])
    console.print(
        f"{measured.recipe.model} on {measured.recipe.data}: examples of {shape}, "
        f"batches of {about['global_batch']:,}, {', '.join(about['devices'])}, {about['cores']} processor cores\n",
        markup=False,
    )
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("", "left"), ("examples/s", "right"), ("spread", "right"), ("", "left")):
        table.add_column(heading, justify=justify, overflow="fold")
    for name, label in (("input", "input alone"), ("model", "model alone"), ("together", "together")):
        rate = getattr(measured, name)
        mark = "[yellow]the bottleneck[/]" if name == measured.bottleneck else ""
        table.add_row(f"[bold]{label}[/]", f"{rate.median:,.0f}", f"{rate.spread:.0%}", mark)
    console.print(table)
    console.print(f"\n{escape(measured.advice)}\n", soft_wrap=True)
    tried = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading, justify in (("the input with", "left"), ("examples/s", "right"), ("ratio", "right"), ("", "left")):
        tried.add_column(heading, justify=justify, overflow="fold")
    for trial in measured.trials:
        colour = "green" if trial.ratio >= 1.1 else "red" if trial.ratio <= 0.9 else "none"
        tried.add_row(
            escape(trial.setting),
            f"{trial.rate.median:,.0f}",
            f"[{colour}]{trial.ratio:.2f}[/]",
            f"[dim]{escape(trial.note)}[/]",
        )
    console.print(tried)


_bench_input.__signature__ = _bench_input_signature()
_bench_input.__annotations__ = {name: p.annotation for name, p in _bench_input.__signature__.parameters.items()}
bench.command(
    "input",
    help="Measure the input alone, the model alone and both together; say which is the bottleneck and what moves it.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu bench input --data photos/ --image-size 224 --model resnet --global-batch 64\n\n"
        "tfgpu bench input --config runs/best/config.yaml --json"
    ),
)(_bench_input)


def _show_checks(checks: Sequence[Any]) -> None:
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "warning": "[yellow]warning[/]", "problem": "[red]problem[/]"}
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("check", "status", "found"):
        table.add_column(heading, overflow="fold")
    for check in _summed_up(checks):
        fix = f"\n[bold]fix:[/] {escape(check.fix)}" if check.fix else ""
        table.add_row(escape(check.name), marks[check.status], escape(check.found) + fix)
    console = Console()
    console.print(table)
    counts = Counter(check.status for check in checks)
    if counts["problem"] or counts["warning"]:
        console.print(f"\n{counts['problem']} problem(s), {counts['warning']} warning(s).")
    else:
        console.print("\nNothing stands in the way of training.")


def _summed_up(checks: Sequence[Any]) -> list[Any]:
    """Puts the Keras repairs that need no attention into one line; `--json` has them all."""
    repairs = [check for check in checks if check.name.startswith("Keras repair") and check.status == "ok"]
    if len(repairs) < 2:
        return list(checks)
    needed = sum("needed here;" in check.found for check in repairs)
    text = f"{needed} of {len(repairs)} faults are in this Keras; tfgpu.strategy() mends them (--json lists them)"
    at = checks.index(repairs[0])
    kept = [check for check in checks if check not in repairs]
    return [*kept[:at], replace(repairs[0], name="Keras repairs", found=text), *kept[at:]]


def _start_tensorflow(*, quiet: bool = True) -> None:
    """Imports TensorFlow without its start-up notes, unless the user has asked for a level of them."""
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    if not quiet or "TF_CPP_MIN_LOG_LEVEL" in os.environ:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    # The first notes are written before TensorFlow reads that variable, past Python's own stderr.
    sys.stderr.flush()
    with tempfile.TemporaryFile() as aside:
        screen = os.dup(2)
        os.dup2(aside.fileno(), 2)
        try:
            _imported("tensorflow")
        except Exception:
            aside.seek(0)
            os.write(screen, aside.read())
            raise
        finally:
            os.dup2(screen, 2)
            os.close(screen)


def _imported(name: str) -> ModuleType:
    """Imports a module that takes seconds; Ctrl-C ends that whatever the module makes of the interrupt.

    A library's C++ code may turn it into an error of its own, or an `except` without a name may swallow it.
    """
    from tfgpu.recipes.directory import NOTHING_WRITTEN

    interrupts = []

    def interrupt(*_: Any) -> None:
        interrupts.append(True)
        raise KeyboardInterrupt

    heeded = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    try:
        if heeded:
            signal.signal(signal.SIGINT, interrupt)
        return importlib.import_module(name)
    finally:
        if heeded:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        if interrupts:
            raise KeyboardInterrupt(NOTHING_WRITTEN) from None


def _debugging(words: Sequence[str]) -> bool:
    return "--debug" in words or os.environ.get("TFGPU_DEBUG", "0") not in ("", "0")


def _command(words: Sequence[str]) -> str:
    if words[:1] in (["data"], ["bench"]) and words[1:2] in (["write"], ["check"], ["input"]):
        return f"{words[0]} {words[1]} "
    return f"{words[0]} " if words and words[0] in ("train", "run", "doctor", "data", "bench") else ""


def _one_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _complain(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]error:[/] {escape(message)}")
