"""Earlier spellings of commands and options are refused, with the new one named; a script's own stay its own."""

import sys

import pytest

from tfgpu import cli
from tfgpu.cli import compare, export, moved

HERE = "runs.py"


def refused(words: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and not out
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


@pytest.mark.parametrize("old", sorted(moved.COMMANDS))
def test_an_old_command_names_the_new_one(old, capsys):
    assert f"`tfgpu {old}` is now `tfgpu {moved.COMMANDS[old]}`." in refused([*old.split(), "digits"], capsys)


OPTIONS = sorted((command, old) for command, known in moved.OPTIONS.items() if command for old in known)


@pytest.mark.parametrize(("command", "old"), OPTIONS, ids=lambda word: word)
def test_an_old_option_names_the_new_one(command, old, capsys):
    line = refused([*command.split(), old.split()[0], "1"], capsys)
    new = moved.OPTIONS[command][old]
    assert f"`tfgpu {command} {old}` is now " in line and new in line


@pytest.mark.parametrize("command", ["train", "tune", "tune batch-size", "profile input"])
def test_every_recipe_takes_batch(command, capsys):
    line = refused([*command.split(), "--global-batch", "8"], capsys)
    assert f"`tfgpu {command} --global-batch` is now `--batch`." in line


def test_hosts_are_no_nodes(capsys):
    assert "write --hosts host1,host2" in refused(["launch", "--nodes", "a,b", HERE], capsys)


def test_a_scripts_own_options_may_have_any_name(tmp_path, monkeypatch, capsys):
    (tmp_path / HERE).write_text("import sys; print(sys.argv[1:])\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", HERE, "--config", "a", "--global-batch", "8", "--help-all"])
    assert (
        not ended.value.code and capsys.readouterr().out == "['--config', 'a', '--global-batch', '8', '--help-all']\n"
    )


@pytest.mark.parametrize(
    ("words", "new"),
    [
        (["train", "--lr", "0.1"], "--learning-rate"),
        (["train", "--batch-size", "8"], "--batch"),
        (["launch", "--nproc_per_node", "2", HERE], "--workers"),
    ],
)
def test_an_option_of_another_tool_names_ours(words, new, capsys):
    line = refused(words, capsys)
    assert f"No such option: {words[1]}. Did you mean {new}? See `tfgpu {words[0]} --help`." in line


def test_a_value_that_is_no_number_is_called_so(capsys):
    line = refused(["launch", "-n", "two", HERE], capsys)
    assert "This must be a whole number. See" in line and "parse" not in line


@pytest.mark.parametrize("words", [["export", "missing", "out"], ["compare", "weights", "missing", "."]])
def test_a_missing_model_is_refused_before_tensorflow_starts(words, monkeypatch, capsys):
    for module in (export, compare):
        monkeypatch.setattr(module, "started", lambda _: pytest.fail("TensorFlow was started"))
    assert "There is nothing at 'missing'. Give " in refused(words, capsys)
