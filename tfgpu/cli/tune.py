"""`tfgpu tune`: searches a recipe's settings."""

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfgpu.cli import completion, screen
from tfgpu.cli.flags import ALLOW_CODE, DEBUG, RECIPE_NAME, given, with_settings
from tfgpu.cli.start import complain, debugging, imported, start_tensorflow
from tfgpu.errors import InputError
from tfgpu.recipes import reading, ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.trust import refuse_code, refuse_code_searched
from tfgpu.redact import printable
from tfgpu.tune import journal, space

app = typer.Typer()
OWN = {
    "name": RECIPE_NAME,
    "output": (Path | None, None, ["--output", "-o"], "DIR", "The study's folder."),
    "search": (
        list[str] | None,
        None,
        ["--search"],
        "NAME=VALUES",
        "A setting to search: learning_rate=1e-5..1e-1:log, global_batch=16..512:powers, optimizer=adam,sgd, "
        "model_options.depth=20,32 [learning rate, batch, optimizer, schedule; initializer, normalization, dropout].",
    ),
    "space": (Path | None, None, ["--space"], "FILE", "The same from a YAML file, one NAME: VALUES per line."),
    "trials": (int, 20, ["--trials"], "INTEGER", "Number of trials, including those of earlier starts [20]."),
    "parallel": (int, 1, ["--parallel"], "INTEGER", "Concurrent trials: one GPU or a share of the cores each [1]."),
    "use_ray": (bool, False, ["--ray"], None, "Run the trials on a Ray cluster whose machines share the folder."),
    "sampler": (str | None, None, ["--sampler"], "NAME", "How settings are drawn: tpe or random [tpe]."),
    "pruner": (str | None, None, ["--pruner"], "NAME", "Which trials end early: median, halving or none [median]."),
    "monitor": (str | None, None, ["--monitor"], "NAME", "What to minimize: val_error, val_loss, ... [val_error]."),
    "study_seed": (int | None, None, ["--study-seed"], "INTEGER", "Seed of the search; --seed is for training [0]."),
    "trial_timeout": (float | None, None, ["--trial-timeout"], "SECONDS", "Time limit of each trial [none]."),
    "resume": (bool, False, ["--resume"], None, "Resume the study in --output."),
    "allow_code": ALLOW_CODE,
    "debug": DEBUG,
}
NAMES = {
    "name": lambda: ["batch-size", "learning-rate", *completion.ready_recipes()],
    "sampler": lambda: journal.SAMPLERS,
    "pruner": lambda: journal.PRUNERS,
}


@app.command(
    "tune",
    cls=screen.first(
        name="A ready recipe (tfgpu train --list) or a YAML file.",
        output="The study's folder (required).",
        trials="Number of trials, with those of earlier starts [20].",
        search="A setting to search: learning_rate=1e-5..1e-1:log.",
        parallel="Concurrent trials [1].",
        pruner="Which trials end early: median, halving, none [median].",
        resume=None,
        epochs="Passes over the training examples [20].",
    ),
    short_help="Search a recipe's settings; find its batch size or learning rate.",
    help="Search a recipe's settings by parallel trainings with pruning; the best settings become a recipe.",
    epilog=(
        "[bold]Examples[/]\n\n"
        "tfgpu tune digits --trials 30 --output studies/digits\n\n"
        "tfgpu tune --model mlp --epochs 10 --search learning_rate=1e-5..1e-1:log --search optimizer=adam,sgd "
        "--output studies/mlp\n\n"
        "tfgpu tune cifar10 --parallel 4 --pruner halving --output studies/cifar10\n\n"
        "tfgpu tune --resume --output studies/digits --trials 60\n\n"
        "tfgpu train studies/digits/best.yaml"
    ),
)
@with_settings(OWN, names=NAMES)
def tune(
    *,
    name: str | None,
    output: Path | None,
    search: list[str] | None,
    space: Path | None,
    trials: int,
    parallel: int,
    use_ray: bool,
    sampler: str | None,
    pruner: str | None,
    monitor: str | None,
    study_seed: int | None,
    trial_timeout: float | None,
    resume: bool,
    allow_code: bool,
    debug: bool,
    **flags: Any,
) -> None:
    if name is not None:
        ready.path(name)  # `tfgpu tune batchsize` is no study
    if output is None:
        raise InputError("A study needs a folder. Add --output DIR.")
    recipe = _recipe(name, given(flags), resume=resume, allow_code=allow_code)
    searched = _searched(search, space, allow_code=allow_code)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with Console(stderr=True).status("starting TensorFlow"):
            start_tensorflow(quiet=not debugging(["--debug"] if debug else []))
            studies = imported("tfgpu.tune.study")
        result = studies.study(
            recipe,
            output,
            trials=trials,
            search=searched,
            parallel=parallel,
            use_ray=use_ray,
            sampler=sampler,
            pruner=pruner,
            monitor=monitor,
            seed=study_seed,
            timeout_s=trial_timeout,
            resume=resume,
            allow_code=allow_code,
            on_trial=lambda trial: console.print(_line(trial), markup=False),
        )
    except KeyboardInterrupt:
        complain(f"Interrupted. Resume with: tfgpu tune --resume --output {output} --trials {trials}")
        raise typer.Exit(130) from None
    _show(console, result)


def _recipe(name: str | None, flags: dict[str, Any], *, resume: bool, allow_code: bool) -> recipes.Recipe | None:
    if resume and name is None and not flags:
        return None
    settings = ready.read(name) if name is not None else {}
    refuse_code(settings, str(name), allow=allow_code, given=flags)
    recipe = recipes.make({**settings, **flags}, source=str(ready.path(name)) if name is not None else None)
    recipes.check(recipe)
    return recipe


def _searched(words: list[str] | None, file: Path | None, *, allow_code: bool) -> dict[str, Any] | None:
    if words and file is not None:
        raise InputError("--search and --space exclude each other. Keep one of them.")
    if file is not None:
        values = reading.read(file)
        refuse_code_searched(values, str(file), allow=allow_code)
        return dict(space.parse_search(values))
    return dict(space.parse_search(words)) if words else None


def _line(trial: Any) -> str:
    from tfgpu.tune.report import setting_text

    value = f"{trial.value:.4f}" if trial.value is not None else trial.status
    settings = " ".join(f"{name}={setting_text(setting)}" for name, setting in trial.settings.items())
    reason = f"  ({printable(trial.reason)})" if trial.reason and trial.status != "pruned" else ""
    return f"trial {trial.number:<3} {value:<10} {trial.time_s:5.1f} s  {settings}{reason}"


def _show(console: Console, result: Any) -> None:
    from tfgpu.tune.report import text_of

    console.print()
    console.print(_table(result, console.width))
    console.print()
    if result.own is not None and result.own_test_accuracy is not None:
        console.print(
            f"recipe's own settings: {result.monitor} {text_of(result.own.value, result.monitor)}, "
            f"test error {1 - result.own_test_accuracy:.2%}"
        )
    tested = "unknown" if result.test_accuracy is None else f"{1 - result.test_accuracy:.2%}"
    console.print(
        f"best of {len(result.trials)} trials:   {result.monitor} {text_of(result.best.value, result.monitor)} "
        f"(selected by it, so optimistic), test error {tested}"
    )
    if result.missing:
        console.print(result.missing_text)
    console.print(f"{result.recipe_file}  {result.folder / 'report.html'}", markup=False)


def _table(result: Any, width: int) -> Table:
    """The five best trials; one column per setting if `width` allows, else one for all."""
    from tfgpu.tune.report import by_value, setting_text, text_of

    rows = []
    for trial in by_value(result.trials)[:5]:
        if trial.value is not None:
            mark = "best" if trial.number == result.best.number else ""
            mark = f"{mark} own".strip() if result.own and trial.number == result.own.number else mark
            settings = [escape(setting_text(trial.settings[name])) for name in result.best.settings]
            rows.append([mark, str(trial.number), text_of(trial.value, result.monitor), *settings])
    headings = ["", "trial", result.monitor, *result.best.settings]
    if sum(max(map(len, column)) + 2 for column in zip(headings, *rows, strict=True)) - 2 > width:
        rows = [[*row[:3], "  ".join(map("=".join, zip(headings[3:], row[3:], strict=True)))] for row in rows]
        headings[3:] = ["settings"]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for at, heading in enumerate(headings):
        table.add_column(heading, overflow="fold", no_wrap=at < 3)
    for row in rows:
        table.add_row(*row)
    return table
