"""The command line in real processes: output, files and exit codes."""

import builtins
import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest
import rich.markup
import typer
import yaml

from tfgpu import __main__, cli
from tfgpu.cli.flags import in_flags
from tfgpu.recipes.recipe import Recipe, choices

ROOT = Path(__file__).parent.parent
SMALL = ["--model", "mlp", "--model-option", "widths=[16]", "--batch", "64"]


def environ(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("TF_CPP_MIN_LOG_LEVEL", "TF_CONFIG")}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200", "TERM": "dumb", "CUDA_VISIBLE_DEVICES": ""} | changes


def tfgpu(*words: str, cwd: Path, **changes: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tfgpu", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=cwd, env=environ(**changes))


def complaint(*words: str, cwd: Path, code: int = 2, **changes: str) -> str:
    """Runs a command that must fail with one line on stderr and no new files."""
    before = sorted(cwd.rglob("*"))
    done = tfgpu(*words, cwd=cwd, **changes)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == code, done.stdout + done.stderr
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    assert sorted(path for path in cwd.rglob("*") if "__pycache__" not in path.parts) == before
    return lines[0]


def rows(run: Path) -> list[list[str]]:
    """metrics.csv without its last columns, times and memory."""
    lines = [line.split(",") for line in (run / "metrics.csv").read_text().splitlines()]
    return [line[: lines[0].index("step_time_s")] for line in lines]


def weights(run: Path) -> list[np.ndarray]:
    return keras.models.load_model(run / "model.keras", compile=False).get_weights()


def equal(one: Path, other: Path) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


# Help


def test_ctrl_c_while_the_command_line_is_imported_is_one_line(monkeypatch, capsys):
    stock = builtins.__import__

    def pressed(name, globals=None, locals=None, fromlist=(), level=0):
        if "cli" in (fromlist or ()):
            raise KeyboardInterrupt
        return stock(name, globals, locals, fromlist, level)

    monkeypatch.setattr(builtins, "__import__", pressed)
    with pytest.raises(SystemExit, match="130"):
        __main__.main()
    assert capsys.readouterr().err == "error: Interrupted.\n"


def test_help_has_every_setting_of_the_schema_with_its_default_and_choices(tmp_path):
    text = tfgpu("train", "--help-all", cwd=tmp_path).stdout
    joined = re.sub(r"[\s│]+", " ", text)
    for name, field in Recipe.model_fields.items():
        flag = field.json_schema_extra.get("flag", "--" + name.replace("_", "-"))
        assert re.search(rf"{flag}[ /]", joined), flag
        for choice in choices(name):
            assert choice in joined
    for expected in (
        "[default: digits]",
        "[default: cosine]",
        "--no-jit",
        "--deterministic",
        "--recompute",
        "--resume",
        "--overwrite",
        "Examples",
    ):
        assert expected in joined
    for panel in ("Run", "Data", "Model", "Hardware", "Training", "Optimizer"):
        assert f"\n{panel}\n" in text


def commands():
    """Every command with its path, including `tfgpu` itself and command groups."""
    waiting = [((), typer.main.get_command(cli.app))]
    while waiting:
        words, command = waiting.pop()
        waiting += [((*words, *name.split()), each) for name, each in getattr(command, "commands", {}).items()]
        yield words, command


COMMANDS = dict(sorted(commands(), key=lambda pair: pair[0]))


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(("tfgpu", *words)))
def test_the_help_of_each_command_ends_with_an_example(words, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([*words, "--help"])
    assert not ended.value.code
    _, found, examples = capsys.readouterr().out.rpartition("Example")
    assert found and f"tfgpu {' '.join(words)}" in examples


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(("tfgpu", *words)))
def test_the_help_fits_a_terminal_of_80_by_24(words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        cli.main([*words, "--help"])
    short = capsys.readouterr().out
    rows = sum(max(1, math.ceil(len(line) / 80)) for line in short.splitlines())
    assert rows <= 23, f"{rows} rows, and the prompt takes one"
    with pytest.raises(SystemExit):
        cli.main([*words, "--help-all"])
    whole = re.sub(r"\s+", " ", capsys.readouterr().out)
    options = [each for each in COMMANDS[words].params if each.param_type_name == "option" and not each.hidden]
    assert all(max(each.opts, key=len) in whole for each in options)


def test_the_reference_has_every_command_and_option(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(ROOT / "docs" / "site"), *sys.path])
    import commands as reference

    page = reference.page()
    for words, command in COMMANDS.items():
        section = page.split(f"## {' '.join(('tfgpu', *words))}\n")[1].split("\n## ")[0]
        options = [each for each in command.params if each.param_type_name == "option" and not each.hidden]
        assert all(max(each.opts, key=len) in section for each in options)


def examples():
    for words, command in COMMANDS.items():
        lines = re.sub(r"\[/?[a-z]*\]", "", command.epilog or "").split("\n\n")
        for line in (line for line in lines if line.startswith("tfgpu ")):
            yield pytest.param(line, id=f"{' '.join(words)}: {line}")


@pytest.mark.parametrize("line", list(examples()))
def test_each_example_is_read_by_the_command_that_it_names(line, tmp_path, monkeypatch):
    """Parameter names, numbers of values and types."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name in ("fused.cc", "fused.cu"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    words = shlex.split(re.split(" [>#]", line)[0])[1:]
    at = max(at for at in (1, 2) if tuple(words[:at]) in COMMANDS)
    command = COMMANDS[tuple(words[:at])]
    command.make_context(command.name, words[at:])


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(("tfgpu", *words)))
def test_the_help_shows_what_stands_in_brackets(words):
    """Unescaped brackets, which contain defaults, would be dropped as markup."""
    for parameter in COMMANDS[words].params:
        written = getattr(parameter, "help", None) or ""
        plain = re.sub(r"\[/?(bold|dim)?\]", "", written).replace("\\[", "[")
        assert rich.markup.render(written).plain == plain, parameter.name


def test_help_and_version_are_there(tmp_path):
    data = tfgpu("data", cwd=tmp_path)
    assert "serve" in data.stdout and not data.stderr
    assert "SCRIPT" in tfgpu("run", "--help", cwd=tmp_path).stdout
    assert "train" in tfgpu("--help", cwd=tmp_path).stdout and "doctor" in tfgpu("-h", cwd=tmp_path).stdout


# Wrong input: one line, exit code 2, nothing written


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "--epoch", "3"], "--epochs"),
        (["train", "--epcohs", "3"], "(Possible options: --epochs, --warmup-epochs). See `tfgpu train --help`."),
        (["train", "--epochs"], "requires an argument"),
        (["train", "--epochs", "0"], "`epochs` should be greater than or equal to 1"),
        (["train", "finetune-text", "--lora", "0"], "error: `lora` should be greater than or equal to 1"),
        (["train", "--strategy", "mirored"], "Did you mean 'mirrored'?"),
        (["train", "--data", "digts"], "Did you mean 'digits'?"),
        (["train", "--augment", "flp"], "Did you mean 'flip'?"),
        (["train", "--optimizer-option", "beta"], "--optimizer-option must be KEY=VALUE. Received: 'beta'."),
        (["train", "--model-option", "a=1", "--model-option", "a=2"], "gives 'a' twice"),
        (["train", "--cache", "dsk"], "Did you mean 'disk'?"),
        (["profile", "input", "--seconds", "0"], "--seconds must be above 0"),
        (["profile", "input", "--cache", "dsk"], "Did you mean 'disk'?"),
        (["train", "none.yaml"], "Cannot read the config file 'none.yaml'"),
        (["train", "--resume"], "Add --output DIR"),
        (["train", "--resume", "--output", "none"], "has no run to resume"),
        (["train", "--output", "thesis"], "is not empty and contains no tfgpu run"),
        (["train", "--output", "thesis", "--overwrite"], "is not empty and contains no tfgpu run"),
        (["train", "--output", "foreign", "--overwrite"], "a config.yaml that tfgpu did not write"),
    ],
)
def test_wrong_input_found_without_tensorflow(tmp_path, words, expected):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "one.tex").write_text("mine")
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "config.yaml").write_text("epochs: 3\n")
    assert expected in complaint(*words, cwd=tmp_path)


def test_errors_name_the_option_in_place_of_the_argument():
    parameters = COMMANDS["tune", "batch-size"].params
    message = "`timeout_s` must be above 0. Received: lowest=3, replicas=2, `epochs`, rate_only=True, a.lowest=1."
    expected = "--timeout must be above 0. Received: --lowest=3, replicas=2, `epochs`, rate_only=True, a.lowest=1."
    assert in_flags(message, parameters) == expected


def test_a_malformed_cluster(tmp_path):
    assert "TF_CONFIG" in complaint("train", cwd=tmp_path, TF_CONFIG='{"cluster": ')


# One process for all that need TensorFlow, which takes seconds to start.
LIBRARY_ERRORS = [
    (
        ["--batch", "3", "--virtual-devices", "4"],
        "Received: global_batch=3, replicas=4. Use 4 or more",
    ),
    (["--devices", "5"], "5"),
    (["--model", "cn"], "Did you mean 'cnn'?"),
    (["--model-option", "dropot=0.1"], "Did you mean 'dropout'?"),
    (["--optimizer", "adm"], "Did you mean 'adam'?"),
    (["--optimizer-option", "beta1=0.9"], "Did you mean 'beta_1'?"),
    (["--schedule-option", "finale=0.1"], "Did you mean 'final'?"),
    (["--strategy", "parameter_server"], "does not support parameter servers"),
    (["--batch", "5000"], "5000"),
    (["--data", "photos"], "photos"),
    (["--data", "broken", "--image-size", "8"], "bad.png"),
    (["--data", "own:leave"], "raised SystemExit: 0"),
    (["--data", "own:one_class"], "at least two classes"),
    (["--model", "own:three"], "Received: 3 outputs, 10 classes in digits."),
    (["--output", "/proc/x"], "Cannot write in '/proc"),
]

OWN = """
import sys, keras, numpy as np
def leave():
    sys.exit(0)
def one_class():
    return np.zeros([60, 2]), np.zeros([60], int)
def three(input_shape):
    return keras.Sequential([keras.layers.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(3)])
"""


@pytest.mark.slow
def test_wrong_input_found_by_the_library(tmp_path):
    (tmp_path / "photos" / "cats").mkdir(parents=True)
    for kind in ("cats", "dogs"):
        (tmp_path / "broken" / kind).mkdir(parents=True)
        for number in range(4):
            picture = np.full((8, 8, 3), 40 * number, "uint8")
            keras.utils.save_img(tmp_path / "broken" / kind / f"{number}.png", picture)
    (tmp_path / "broken" / "cats" / "bad.png").write_bytes(b"no picture")
    (tmp_path / "own.py").write_text(OWN)
    before = sorted(tmp_path.rglob("*"))
    code = (
        "import json, sys; from tfgpu.cli import _execute\n"
        "for words in json.loads(sys.argv[1]): print('exit', _execute(['train', *words]), file=sys.stderr)"
    )
    commands = json.dumps([words for words, _ in LIBRARY_ERRORS])
    done = subprocess.run(
        [sys.executable, "-c", code, commands],
        capture_output=True,
        text=True,
        timeout=550,
        cwd=tmp_path,
        env=environ(PYTHONDONTWRITEBYTECODE="1"),
    )
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2 * len(LIBRARY_ERRORS), done.stderr
    for (words, expected), line, code in zip(LIBRARY_ERRORS, lines[::2], lines[1::2], strict=True):
        assert line.startswith("error: ") and expected in line, (words, line)
        assert code == "exit 2", (words, line)
    assert sorted(tmp_path.rglob("*")) == before


# Runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One short run, only read by the tests below."""
    folder = tmp_path_factory.mktemp("runs")
    done = tfgpu("train", *SMALL, "--epochs", "4", "--output", "first", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_a_run_says_what_it_does_and_leaves_a_directory(runs):
    folder, done = runs
    lines = done.stdout.splitlines()
    assert lines[0].startswith("mlp on digits: ") and "one_device" in lines[1]
    assert sum(line.startswith("epoch ") for line in lines) == 4
    assert re.fullmatch(r"test accuracy: \d+\.\d%", lines[-2]) and lines[-1] == "first"
    assert done.stderr == ""
    run = folder / "first"
    names = {path.name for path in run.iterdir()}
    assert names == {"model.keras", "config.yaml", "metrics.csv", "logs", "monitor", "checkpoints", "report.html"}
    assert list((run / "logs" / "train").glob("events.*")) and len(rows(run)) == 5
    facts = yaml.safe_load((run / "config.yaml").read_text())["run"]
    assert facts["strategy"] == "one_device" and facts["replicas"] == 1 and facts["versions"]["keras"]
    assert f"{facts['test_accuracy']:.1%}" in lines[-2]
    page = (run / "report.html").read_text()
    assert "<svg" in page and re.search(r"host \d\.\d\d GiB", page) and "CPU, busy (of its cores)" in page


@pytest.mark.slow
def test_the_main_job_reaches_its_accuracy(tmp_path):
    done = tfgpu("train", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy, folder = done.stdout.splitlines()[-2:]
    assert float(accuracy.removeprefix("test accuracy: ").removesuffix("%")) >= 98.5
    assert re.fullmatch(r"runs/\d{8}-\d{6}-cnn", folder) and (tmp_path / folder / "model.keras").exists()


@pytest.mark.slow
def test_the_config_repeats_the_run(runs):
    folder, _ = runs
    done = tfgpu("train", "first/config.yaml", "--output", "again", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert equal(folder / "first", folder / "again") and rows(folder / "first") == rows(folder / "again")


@pytest.mark.slow
@pytest.mark.parametrize("more", [["--strategy", "mirrored", "--virtual-devices", "2"], ["--deterministic"]], ids=str)
def test_cpus_repeat_a_convolutional_network_bit_for_bit(tmp_path, more):
    for name in ("one", "other"):
        words = ["--model", "cnn", "--epochs", "2", "--batch", "64", "--dropout", "0.2", *more]
        done = tfgpu("train", *words, "--output", name, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert equal(tmp_path / "one", tmp_path / "other")


@pytest.mark.slow
def test_a_run_learns_the_same_with_and_without_recomputation(runs):
    folder, _ = runs
    done = tfgpu("train", *SMALL, "--epochs", "4", "--recompute", "--output", "recomputed", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load((folder / "recomputed" / "config.yaml").read_text())["recompute"]
    saved = zipfile.ZipFile(folder / "recomputed" / "model.keras").read("config.json").decode()
    assert "Recompute" not in saved  # it opens in stock Keras
    pairs = zip(weights(folder / "first"), weights(folder / "recomputed"), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) <= 1e-6


@pytest.mark.slow
def test_an_average_of_too_few_updates_is_told_before_the_training(tmp_path):
    done = tfgpu("train", *SMALL, "--epochs", "2", "--weight-average", "ema", "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    steps = 2 * math.ceil(yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["run"]["train_examples"] / 64)
    assert f"have a share of {0.99 ** (steps - 1):.1%}" in line


@pytest.mark.slow
def test_a_directory_with_a_run_is_safe(runs):
    folder, _ = runs
    assert "contains another run. Add --resume or --overwrite" in complaint("train", "--output", "first", cwd=folder)
    words = ["train", "--resume", "--output", "first", "--seed", "1"]
    assert "`seed` was 0, received 1" in complaint(*words, cwd=folder)
    config = (folder / "first" / "config.yaml").read_text()
    failing = ["train", "--overwrite", "--output", "first", "--model", "cn"]
    assert "Did you mean 'cnn'?" in complaint(*failing, cwd=folder)
    assert (folder / "first" / "config.yaml").read_text() == config


SCHEDULES = {
    "cosine": ["--schedule", "cosine"],
    "accumulate": ["--checkpoint-steps", "7", "--accumulate", "2"],
    "plateau": ["--schedule", "plateau", "--schedule-option", "patience=1", "--optimizer", "sgd"],
    "ema": ["--weight-average", "ema", "--early-stopping", "2", "--checkpoint-steps", "7", "--optimizer", "lars"],
    "smooth": ["--schedule", "exponential", "--model-option", "normalization=batch", "--label-smoothing", "0.1"],
}
SCHEDULES["ema"] += ["--weight-average-option", "momentum=0.97"]  # 0.99 has too few updates, and says so


LEFT_AT_THE_END = """
import os, signal, sys
from tfgpu import cli
from tfgpu.recipes import runner
runner._save = lambda model, path: os.kill(os.getpid(), signal.SIGTERM)
cli.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_run_that_left_before_its_end_ends_with_the_weights_of_one_that_did_not(tmp_path):
    best = ["--early-stopping", "9", "--learning-rate", "0.3"]  # the best epoch is not the last one
    words = ["train", *SMALL, *best, "--epochs", "4"]
    whole = tfgpu(*words, "--output", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    command = [sys.executable, "-c", LEFT_AT_THE_END, *words, "--output", "cut"]
    left = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=550)
    assert left.returncode == 75, left.stderr
    resumed = tfgpu("train", "--resume", "--output", "cut", cwd=tmp_path)
    assert resumed.returncode == 0 and resumed.stderr == "", resumed.stderr
    assert equal(tmp_path / "whole", tmp_path / "cut") and rows(tmp_path / "whole") == rows(tmp_path / "cut")
    facts = [yaml.safe_load((tmp_path / name / "config.yaml").read_text())["run"] for name in ("whole", "cut")]
    assert facts[0]["final_weights"] == facts[1]["final_weights"] and "last epoch" not in facts[0]["final_weights"]


@pytest.mark.slow
def test_a_run_that_must_leave_after_its_last_epoch_is_finished_by_resume(tmp_path):
    command = [sys.executable, "-c", LEFT_AT_THE_END, "train", *SMALL, "--epochs", "1", "--output", "cut"]
    left = subprocess.run(command, cwd=tmp_path, env=environ(), capture_output=True, text=True, timeout=550)
    assert left.returncode == 75, left.stderr
    assert left.stderr.splitlines()[-1].endswith("incomplete. Resume with: tfgpu train --resume --output cut")
    assert not (tmp_path / "cut" / "model.keras").exists()
    resumed = tfgpu("train", "--resume", "--output", "cut", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert (tmp_path / "cut" / "model.keras").exists() and (tmp_path / "cut" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "number", "code"),
    [
        pytest.param("cosine", signal.SIGINT, 130, id="ctrl-c"),
        pytest.param("plateau", signal.SIGTERM, 75, id="sigterm", marks=pytest.mark.slow),
        pytest.param("accumulate", signal.SIGTERM, 75, id="sigterm-accumulate", marks=pytest.mark.slow),
        pytest.param("ema", signal.SIGTERM, 75, id="sigterm-ema", marks=pytest.mark.slow),
        pytest.param("smooth", signal.SIGTERM, 75, id="sigterm-smooth", marks=pytest.mark.slow),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_end(tmp_path, schedule, number, code):
    words = ["train", *SMALL, *SCHEDULES[schedule], "--epochs", "8"]
    whole = tfgpu(*words, "--output", "whole", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr

    command = [sys.executable, "-m", "tfgpu", *words, "--output", "cut"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A shell's background job ignores SIGINT and hands that on: tests may run in one.
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=tmp_path, env=environ(PYTHONUNBUFFERED="1"), preexec_fn=heed, **pipes)
    try:
        next(line for line in process.stdout if line.startswith("epoch 2/8"))
        process.send_signal(number)
        _, stderr = process.communicate(timeout=550)
    finally:
        process.kill()
    assert process.returncode == code, stderr
    (line,) = stderr.splitlines()
    assert "cut/checkpoints" in line and line.endswith("Resume with: tfgpu train --resume --output cut")
    assert not (tmp_path / "cut" / "model.keras").exists() and 3 <= len(rows(tmp_path / "cut")) < 9

    resumed = tfgpu("train", "--resume", "--output", "cut", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "epoch 1/8" not in resumed.stdout and "epoch 8/8" in resumed.stdout
    assert equal(tmp_path / "whole", tmp_path / "cut")
    assert rows(tmp_path / "whole") == rows(tmp_path / "cut")


def start(*words: str, cwd: Path) -> subprocess.Popen:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    heed = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    command = [sys.executable, "-m", "tfgpu", *words]
    return subprocess.Popen(command, cwd=cwd, env=environ(PYTHONUNBUFFERED="1"), preexec_fn=heed, **pipes)


def test_an_interrupt_while_tensorflow_starts_writes_nothing(tmp_path):
    process = start("train", *SMALL, "--output", "cut", cwd=tmp_path)
    maps = Path(f"/proc/{process.pid}/maps")
    if not maps.exists():
        pytest.skip("needs /proc to see how far the import is")
    try:
        while process.poll() is None and "tensorflow" not in maps.read_text():
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=550)
    finally:
        process.kill()
    assert stderr == "error: Interrupted before the first step; nothing was written.\n"
    assert process.returncode == 130 and list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_resuming_a_finished_run_ends_with_the_same_averaged_weights(tmp_path):
    words = [*SMALL, "--epochs", "1", "--optimizer-option", "use_ema=true"]
    averaged = [*words, "--optimizer-option", "ema_momentum=0.999", "--output", "run"]
    assert tfgpu("train", *averaged, cwd=tmp_path).returncode == 0
    before = weights(tmp_path / "run")
    done = tfgpu("train", "--resume", "--output", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert all(np.array_equal(a, b) for a, b in zip(before, weights(tmp_path / "run"), strict=True))


@pytest.mark.slow
@pytest.mark.processes
def test_two_workers_learn_what_one_process_learns_and_only_the_chief_writes(tmp_path, addresses):
    workers = addresses(2)
    words = [*SMALL, "--optimizer", "sgd", "--clip-norm", "0.5", "--accumulate", "2", "--epochs", "2"]
    (tmp_path / "other").mkdir()
    processes = []
    for index, folder in enumerate((tmp_path, tmp_path / "other")):
        place = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": index}}
        command = [sys.executable, "-m", "tfgpu", "train", *words, "--output", str(tmp_path / "two")]
        command += ["--virtual-devices", "2"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, cwd=folder, env=environ(TF_CONFIG=json.dumps(place)), **pipes))
    try:
        outputs = [process.communicate(timeout=550) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "multi_worker" in outputs[0][0] and "× 4" in outputs[0][0] and outputs[1][0] == ""
    assert list((tmp_path / "other").iterdir()) == []
    alone = tfgpu("train", *words, "--output", "one", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    pairs = zip(weights(tmp_path / "one"), weights(tmp_path / "two"), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) <= 1e-5
    for a, b in zip(rows(tmp_path / "one")[1:], rows(tmp_path / "two")[1:], strict=True):
        assert [float(x) for x in a] == pytest.approx([float(x) for x in b], abs=1e-5)


@pytest.mark.slow
def test_a_loss_that_is_no_number_stops_the_run(tmp_path):
    words = ["train", *SMALL, "--optimizer", "sgd", "--learning-rate", "1e30", "--schedule", "constant"]
    done = tfgpu(*words, "--output", "bad", cwd=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "The loss became" in line and "Lower --learning-rate" in line


@pytest.mark.slow
def test_doctor_as_json(tmp_path):
    done = tfgpu("doctor", "--json", cwd=tmp_path)
    checks = json.loads(done.stdout)
    assert {"name", "status", "found", "fix"} <= checks[0].keys()
    assert done.returncode == (1 if any(check["status"] == "problem" for check in checks) else 0)
