"""`tfgpu tune`: searches a recipe's settings; its batch size and learning rate alone, by short trainings."""

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tfgpu import atomic
from tfgpu.cli import flags, screen
from tfgpu.cli.flags import AllowCode, AsJson, Debug, JsonTo, RecipeName, check_json, option, put_json, recipe_of
from tfgpu.cli.start import imported, started
from tfgpu.errors import InputError
from tfgpu.parallel.planning.hardware import bytes_of, shown
from tfgpu.recipes import ready
from tfgpu.recipes import recipe as recipes
from tfgpu.recipes.reading import read, refuse_code_searched
from tfgpu.redact import printable
from tfgpu.tune import space as spaces
from tfgpu.tune.results import by_value, setting_text, text_of
from tfgpu.tune.scaling import rate_text

app = typer.Typer()
_run = functools.partial(option, panel="Run")
_ROWS = 10
PLOT, RESULT, RECIPE = "plot.png", "result.json", "recipe.yaml"
_Output = _run(
    Path | None,
    "A folder for result.json and recipe.yaml (for `tfgpu train`); learning-rate adds plot.png.",
    "--output -o DIR",
)
_Scale = _run(
    str,
    "How the learning rate scales: linear, sqrt, none or auto. auto: linear for sgd, momentum, lars, else sqrt.",
    "NAME",
)


@screen.command(app, "tune", "name output trials search parallel pruner resume epochs")
@flags.with_settings
def tune(
    name: RecipeName = None,
    output: _run(Path | None, "The study's folder (required).", "--output -o DIR") = None,
    search: _run(
        list[str] | None,
        "A setting to search: learning_rate=1e-5..1e-1:log. Also global_batch=16..512:powers, optimizer=adam,sgd, "
        "model_options.depth=20,32 [learning rate, batch, optimizer, schedule; initializer, normalization, dropout].",
        "NAME=VALUES",
    ) = None,
    space: _run(Path | None, "The same from a YAML file, one NAME: VALUES per line.", "FILE") = None,
    trials: _run(int, "Number of trials in all, earlier starts included.") = 20,
    parallel: _run(int, "Concurrent trials; each gets its own GPU or an equal share of the cores.") = 1,
    use_ray: _run(bool, "Run the trials on a Ray cluster whose machines share the folder.", "--ray") = False,
    sampler: _run(str | None, "How settings are drawn: tpe or random [tpe].", "NAME") = None,
    pruner: _run(str | None, "Which trials to stop early: median, halving or none [median].", "NAME") = None,
    monitor: _run(str | None, "What to minimize: val_error, val_loss, ... [val_error].", "NAME") = None,
    study_seed: _run(int | None, "Seed of the search [0]. --seed is for training.") = None,
    timeout_s: _run(float | None, "Time limit of each trial.", "--trial-timeout SECONDS") = None,
    resume: _run(bool, "Resume the study in --output.", "--resume") = False,
    allow_code: AllowCode = False,
    debug: Debug = False,
    **settings: Any,
) -> None:
    """Search a recipe's settings; find its batch size or learning rate.

    Train a recipe with many settings, stop poor trials early, and save the best settings as a recipe.

    tfgpu tune digits --trials 30 --output studies/digits
    tfgpu tune --model mlp --epochs 10 --search learning_rate=1e-5..1e-1:log --search optimizer=adam,sgd --output
        studies/mlp
    tfgpu tune cifar10 --parallel 4 --pruner halving --output studies/cifar10
    tfgpu tune --resume --output studies/digits --trials 60
    tfgpu train studies/digits/best.yaml
    """
    if name is not None:
        ready.path(name)  # `tfgpu tune batchsize` is not a study
    if output is None:
        raise InputError("A study needs a folder. Add --output DIR.")
    recipe = None  # of the study that is resumed
    if not resume or name is not None or flags.given(settings):
        recipe = recipe_of(name, settings, allow_code=allow_code)
        recipes.check(recipe)
    searched = _searched(search, space, allow_code=allow_code)
    console = Console(highlight=False, soft_wrap=True)
    how = dict(trials=trials, parallel=parallel, use_ray=use_ray, sampler=sampler, pruner=pruner, monitor=monitor)
    how |= dict(seed=study_seed, timeout_s=timeout_s, resume=resume, allow_code=allow_code)
    try:
        studies = started("tfgpu.tune.study", debug=debug, says=True)
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
        values = read(file)
        refuse_code_searched(values, str(file), allow=allow_code)
        return dict(spaces.parse_search(values))
    return dict(spaces.parse_search(words)) if words else None


def _line(trial: Any) -> str:
    value = f"{trial.value:.4f}" if trial.value is not None else trial.status
    settings = " ".join(f"{name}={setting_text(setting)}" for name, setting in trial.settings.items())
    reason = f"  ({printable(trial.reason)})" if trial.reason and trial.status != "pruned" else ""
    return f"trial {trial.number:<3} {value:<10} {trial.time_s:5.1f} s  {settings}{reason}"


def _show(console: Console, result: Any) -> None:
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
    return screen.table(headings, rows, fold=True)


@screen.command(
    app, "tune batch-size", "name lowest highest rate_only scale memory_limit_bytes timeout_s output as_json json_to"
)
@flags.with_settings
def find_batch_size(
    name: RecipeName = None,
    output: _Output = None,
    as_json: AsJson = False,
    json_to: JsonTo = None,
    allow_code: AllowCode = False,
    debug: Debug = False,
    lowest: _run(int | None, "The smallest batch to try [8 per replica].") = None,
    highest: _run(int | None, "The largest batch to try [the training examples].") = None,
    granularity: _run(int | None, "Precision of the largest batch that fits [a sixteenth of it].") = None,
    rate_only: _run(bool, "Do not search for the largest batch that fits.", "--rate-only") = False,
    scale: _Scale = "auto",
    repeats: _run(int, "Number of half-second measurements of each batch size.") = 5,
    memory_limit_bytes: _run(
        str | None,
        "Memory of each GPU, such as 16GB. Without GPUs, memory that the process may reserve.",
        "--device-memory SIZE",
    ) = None,
    timeout_s: _run(float, "A batch that takes longer is too large.", "--timeout SECONDS") = 600.0,
    **settings: Any,
) -> None:
    """Find the batch sizes that fit, and the fastest.

    Train some steps with each batch size, and show which fit and their rate in examples per second.

    tfgpu tune batch-size digits
    tfgpu tune batch-size cifar10 --lowest 64 --highest 4096 --output found/cifar10
    tfgpu tune batch-size imagenet --rate-only --device-memory 16GB --precision mixed_bfloat16
    tfgpu train found/cifar10/recipe.yaml
    """
    recipe = recipe_of(name, settings, allow_code=allow_code)
    limit = None if memory_limit_bytes is None else bytes_of(memory_limit_bytes)
    how = dict(lowest=lowest, highest=highest, granularity=granularity, largest=not rate_only, scale=scale)
    how |= dict(repeats=repeats, memory_limit_bytes=limit, timeout_s=timeout_s)
    folder = _folder(output)
    check_json(json_to)
    finder = imported("tfgpu.tune.batch_search")
    try:
        with Console(stderr=True).status("reading the recipe") as status:

            def tell(one: Any) -> None:
                status.update(f"a batch of {one.batch:,} {'fits' if one.fits else 'does not fit'}")

            found = finder.batch_size(recipe, **how, on_try=tell)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Nothing was written.") from None
    result = _finite(found.as_json())
    if folder is not None:
        head = f"# The fastest of {len(found.tries)} batches tried with {found.device}: {found.fastest}.\n"
        _write(folder, result, found.recipe, head)
    if put_json(result, as_json=as_json, json_to=json_to):
        return
    console = Console(highlight=False)
    _show_batches(console, found)
    _show_settings(console, found.settings, folder)


@screen.command(app, "tune learning-rate", "name lowest highest steps optimizer output as_json json_to")
@flags.with_settings
def find_learning_rate(
    name: RecipeName = None,
    output: _Output = None,
    as_json: AsJson = False,
    json_to: JsonTo = None,
    allow_code: AllowCode = False,
    debug: Debug = False,
    lowest: _run(float, "Learning rate of the first step.") = 1e-6,
    highest: _run(float, "Learning rate of the last step.") = 1.0,
    steps: _run(int, "Number of steps, at least 20.") = 200,
    **settings: Any,
) -> None:
    """Find the learning rates at which the loss falls.

    Train some steps with a rising learning rate, and show where the loss falls. The model is discarded.

    tfgpu tune learning-rate digits
    tfgpu tune learning-rate digits --optimizer momentum --steps 400 --output found/rate
    tfgpu train found/rate/recipe.yaml
    """
    recipe = recipe_of(name, settings, allow_code=allow_code)
    recipes.check(recipe)
    folder = _folder(output)
    check_json(json_to)
    try:
        finder = started("tfgpu.tune.range_test", debug=debug, says=True)
        with Console(stderr=True).status("training with a rising learning rate"):
            tested = finder.of_recipe(recipe, lowest=lowest, highest=highest, steps=steps)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("Interrupted. Nothing was written.") from None
    found = {} if tested.suggestion is None else {"learning_rate": float(rate_text(tested.suggestion))}
    result = {**vars(tested), "settings": found}
    if folder is not None:
        made = recipes.make({**recipe.model_dump(mode="json"), **found}) if found else None
        _write(folder, result, made, f"# The range test's learning rate: {tested.reason}\n", tested.plot)
    console = Console(highlight=False)
    if not put_json(_finite(result), as_json=as_json, json_to=json_to):
        _show_rates(console, tested)
        _show_settings(console, found, folder)
    if not found:
        raise typer.Exit(1)


def _folder(output: Path | None) -> Path | None:
    """Checks the output folder, which is created later."""
    if output is not None and output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise InputError(f"--output must be a new or empty folder. Received: {str(output)!r}. Give another one.")
    return output


def _write(folder: Path, result: Mapping[str, Any], recipe: recipes.Recipe | None, head: str, plot: Any = None) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if plot is not None:
            with atomic.replacing(folder / PLOT) as aside:
                plot(aside)
        atomic.write_text(folder / RESULT, json.dumps(_finite(result), indent=2) + "\n")
        if recipe is not None:
            text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
            atomic.write_text(folder / RECIPE, head + text)
    except OSError as error:
        raise InputError(f"Cannot write in {str(folder)!r}: {error.strerror}. Give another folder.") from error


def _finite(value: Any) -> Any:
    """Replaces NaN and infinity, which JSON lacks, by None."""
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def _show_batches(console: Console, found: Any) -> None:
    on = "GPU" if any(name.startswith("gpu") for one in found.tries for name in one.peaks) else "process"
    replicas = f"{found.replicas} replicas" if found.replicas > 1 else "one device"
    console.print(f"{found.recipe.model} on {found.recipe.data}: {replicas}, {found.device}", markup=False)
    console.print()
    rows = []
    for one in sorted(found.tries, key=lambda one: one.batch):
        if not one.fits:
            rows.append([f"{one.batch:,}", "-", "", "", "", "does not fit"])
            continue
        marks = [word for word, at in (("fastest", found.fastest), ("largest", found.largest)) if at == one.batch]
        spread = "-".join(f"{end:,.0f}" for end in one.spread)
        memory = "" if one.memory_bytes is None else shown(one.memory_bytes)
        step = f"{one.step_s * 1e3:,.3g} ms" if one.step_s < 1 else f"{one.step_s:,.3g} s"
        rows.append([f"{one.batch:,}", f"{one.examples_per_s:,.0f}", spread, step, memory, ", ".join(marks)])
    numbers = ("batch", "examples/s", "spread", "step", "memory")
    console.print(screen.table((*numbers, ""), rows, right=numbers))
    console.print()
    console.print(f"Memory: {on} peak. Fastest: smallest batch within 5 % of the best rate.", markup=False)
    for line in (*(f"{one.batch:,}: {one.reason}" for one in found.tries if not one.fits), *found.notes):
        console.print(line, markup=False)


def _show_rates(console: Console, tested: Any) -> None:
    rows, count = [], len(tested.rates)
    marked: dict[int, tuple[str, float]] = {}
    for word, rate in (("lowest loss", tested.lowest), ("suggestion", tested.suggestion)):
        if rate is not None:
            marked[min(range(count), key=lambda at: abs(math.log(tested.rates[at] / rate)))] = word, rate
    for at in sorted({*marked, *(round(part * (count - 1) / (_ROWS - 1)) for part in range(_ROWS))}):
        word, rate = marked.get(at, ("", tested.rates[at]))
        rows.append([rate_text(rate), f"{tested.smoothed[at]:.3f}", word])
    numbers = ("learning rate", "loss, smoothed")
    console.print(screen.table((*numbers, ""), rows, right=numbers))
    console.print()
    console.print(f"{count} steps. {tested.reason}", markup=False)


def _show_settings(console: Console, settings: Mapping[str, Any], folder: Path | None) -> None:
    if settings:
        words = " ".join(f"{flags.flag_of(name)} {value:g}" for name, value in settings.items())
        console.print(f"Settings: {words}", markup=False, soft_wrap=True)
    if folder is not None:
        wrote = f"tfgpu train {folder / RECIPE}" if settings else str(folder / PLOT)
        console.print(f"{wrote}", markup=False, soft_wrap=True)
