"""`tfgpu tune`: searches a recipe's settings."""

import functools
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfgpu.cli import screen
from tfgpu.cli.flags import AllowCode, Debug, RecipeName, given, option, recipe_of, with_settings
from tfgpu.cli.start import imported, start_tensorflow
from tfgpu.errors import InputError
from tfgpu.recipes import reading, ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.trust import refuse_code_searched
from tfgpu.redact import printable
from tfgpu.tune import space as spaces

app = typer.Typer()
_run = functools.partial(option, panel="Run")


@app.command(
    "tune",
    cls=screen.first("name", "output", "trials", "search", "parallel", "pruner", "resume", "epochs"),
    short_help="Search a recipe's settings; find its batch size or learning rate.",
    help="Search a recipe's settings by parallel trainings with pruning; the best settings become a recipe.",
    epilog=screen.examples(
        "tfgpu tune digits --trials 30 --output studies/digits",
        "tfgpu tune --model mlp --epochs 10 --search learning_rate=1e-5..1e-1:log --search optimizer=adam,sgd "
        "--output studies/mlp",
        "tfgpu tune cifar10 --parallel 4 --pruner halving --output studies/cifar10",
        "tfgpu tune --resume --output studies/digits --trials 60",
        "tfgpu train studies/digits/best.yaml",
    ),
)
@with_settings
def tune(
    name: RecipeName = None,
    output: _run(Path | None, "The study's folder (required).", "--output", "-o", metavar="DIR") = None,
    search: _run(
        list[str] | None,
        "A setting to search: learning_rate=1e-5..1e-1:log. Also global_batch=16..512:powers, optimizer=adam,sgd, "
        "model_options.depth=20,32 [learning rate, batch, optimizer, schedule; initializer, normalization, dropout].",
        metavar="NAME=VALUES",
    ) = None,
    space: _run(Path | None, "The same from a YAML file, one NAME: VALUES per line.", metavar="FILE") = None,
    trials: _run(int, "Number of trials in all, earlier starts included.") = 20,
    parallel: _run(int, "Concurrent trials; each gets its own GPU or an equal share of the cores.") = 1,
    use_ray: _run(bool, "Run the trials on a Ray cluster whose machines share the folder.", "--ray") = False,
    sampler: _run(str | None, "How settings are drawn: tpe or random [tpe].", metavar="NAME") = None,
    pruner: _run(str | None, "Which trials to stop early: median, halving or none [median].", metavar="NAME") = None,
    monitor: _run(str | None, "What to minimize: val_error, val_loss, ... [val_error].", metavar="NAME") = None,
    study_seed: _run(int | None, "Seed of the search [0]. --seed is for training.") = None,
    timeout_s: _run(float | None, "Time limit of each trial.", "--trial-timeout", metavar="SECONDS") = None,
    resume: _run(bool, "Resume the study in --output.", "--resume") = False,
    allow_code: AllowCode = False,
    debug: Debug = False,
    **flags: Any,
) -> None:
    if name is not None:
        ready.path(name)  # `tfgpu tune batchsize` is not a study
    if output is None:
        raise InputError("A study needs a folder. Add --output DIR.")
    recipe = None  # of the study that is resumed
    if not resume or name is not None or given(flags):
        recipe = recipe_of(name, flags, allow_code=allow_code)
        recipes.check(recipe)
    searched = _searched(search, space, allow_code=allow_code)
    console = Console(highlight=False, soft_wrap=True)
    how = dict(trials=trials, parallel=parallel, use_ray=use_ray, sampler=sampler, pruner=pruner, monitor=monitor)
    how |= dict(seed=study_seed, timeout_s=timeout_s, resume=resume, allow_code=allow_code)
    try:
        with Console(stderr=True).status("starting TensorFlow"):
            start_tensorflow(debug=debug)
            studies = imported("tfgpu.tune.study")
        result = studies.study(
            recipe, output, search=searched, **how, on_trial=lambda trial: console.print(_line(trial), markup=False)
        )
    except KeyboardInterrupt:
        resume_with = f"tfgpu tune --resume --output {output} --trials {trials}"
        raise KeyboardInterrupt(f"Interrupted. Resume with: {resume_with}") from None
    _show(console, result)


def _searched(words: list[str] | None, file: Path | None, *, allow_code: bool) -> dict[str, Any] | None:
    if words and file is not None:
        raise InputError("--search and --space cannot be combined. Keep one of them.")
    if file is not None:
        values = reading.read(file)
        refuse_code_searched(values, str(file), allow=allow_code)
        return dict(spaces.parse_search(values))
    return dict(spaces.parse_search(words)) if words else None


def _line(trial: Any) -> str:
    from tfgpu.tune.results import setting_text

    value = f"{trial.value:.4f}" if trial.value is not None else trial.status
    settings = " ".join(f"{name}={setting_text(setting)}" for name, setting in trial.settings.items())
    reason = f"  ({printable(trial.reason)})" if trial.reason and trial.status != "pruned" else ""
    return f"trial {trial.number:<3} {value:<10} {trial.time_s:5.1f} s  {settings}{reason}"


def _show(console: Console, result: Any) -> None:
    from tfgpu.tune.results import text_of

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
    console.print(str(result.recipe_file), markup=False)


def _table(result: Any, width: int) -> Table:
    """The five best trials; one column per setting if `width` allows, else one for all."""
    from tfgpu.tune.results import by_value, setting_text, text_of

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
    table = screen.table(*headings, fold=True)
    for row in rows:
        table.add_row(*row)
    return table
