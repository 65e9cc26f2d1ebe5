import pytest

pytest.importorskip("optuna", reason="needs Optuna: pip install 'tfgpu[tune]'")

from tfgpu.errors import InputError
from tfgpu.tune.journal import FILE, Journal, remove_partial_line, settings_of
from tfgpu.tune.space import parse_search

SPACE = parse_search(
    [
        "learning_rate=1e-5..1e-1:log",
        "global_batch=16..512:powers",
        "optimizer=adam,sgd",
        "model_options.widths=[8],[16]",
    ]
)


def opened(folder, **changes):
    return Journal(folder, SPACE, **{"sampler": "tpe", "pruner": "median", "epochs": 4, "seed": 3, **changes})


def value(settings):
    """An optimum that TPE can find."""
    return abs(settings["learning_rate"] - 0.01) + (settings["optimizer"] == "sgd") + settings["global_batch"] / 5120


def go(journal, count):
    for _ in range(count):
        trial = journal.ask()
        journal.tell(trial, {"end": "complete", "value": value(journal.settings(trial))}, 0.0)


def drawn(journal):
    return [settings_of(trial, SPACE) for trial in journal.trials]


def test_a_resumed_study_draws_like_an_uninterrupted_one(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    whole = opened(tmp_path / "one")
    go(whole, 16)
    go(opened(tmp_path / "other"), 5)
    go(opened(tmp_path / "other"), 9)
    halves = opened(tmp_path / "other")
    go(halves, 2)
    assert drawn(halves) == drawn(whole)
    assert len({settings["learning_rate"] for settings in drawn(whole)}) == 16


def test_another_seed_draws_differently(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    one, other = opened(tmp_path / "one"), opened(tmp_path / "other", seed=4)
    go(one, 3)
    go(other, 3)
    assert drawn(one) != drawn(other)


def test_a_trial_of_a_dead_process_resumes_with_its_number_and_settings(tmp_path):
    journal = opened(tmp_path)
    go(journal, 2)
    lost = journal.ask()
    settings = journal.settings(lost)
    assert not journal.report(lost, 1, 0.5)
    again = opened(tmp_path)
    (found,) = again.unfinished()
    assert (found.number, again.settings(found)) == (2, settings)
    again.report(found, 1, 0.7)  # The epoch is trained again; what was noted stays.
    again.report(found, 2, 0.4)
    again.tell(found, {"end": "complete", "value": 0.4, "val_loss": 0.2}, 1.5)
    assert again.unfinished() == []
    told = opened(tmp_path).trials[2]
    assert (told.value, told.intermediate_values) == (0.4, {1: 0.5, 2: 0.4})
    assert told.user_attrs == {"val_loss": 0.2, "status": "complete", "time_s": 1.5}


def test_a_torn_line_and_a_lock_of_a_killed_process_are_removed(tmp_path):
    go(opened(tmp_path), 3)
    file = tmp_path / FILE
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":4,"wor')
    file.with_name(f"{FILE}.lock").symlink_to(file)
    journal = opened(tmp_path)
    assert file.read_bytes()[: len(whole)] == whole
    go(journal, 1)
    assert len(opened(tmp_path).trials) == 4
    remove_partial_line(tmp_path / "none.log")


def test_a_damaged_journal_is_refused(tmp_path):
    go(opened(tmp_path), 2)
    path = tmp_path / FILE
    lines = path.read_bytes().splitlines(keepends=True)
    for damage in (b"{half\n", b'{"op_code": 99}\n', b"[]\n", b"\x00\xff\n"):
        path.write_bytes(b"".join([*lines[:3], damage, *lines[4:]]))
        with pytest.raises(InputError, match="is damaged"):
            opened(tmp_path)


def test_given_settings_come_first_and_once(tmp_path):
    own = {"learning_rate": 0.003, "global_batch": 32, "optimizer": "adam", "model_options.widths": [16]}
    journal = opened(tmp_path)
    journal.enqueue(own)
    go(journal, 2)
    journal.enqueue(own)
    go(journal, 1)
    assert drawn(journal)[0] == own
    assert own not in drawn(journal)[1:]


@pytest.mark.parametrize("status", ["diverged", "out of memory", "timed out", "failed", "pruned"])
def test_the_sampler_knows_what_did_not_work(tmp_path, status):
    from optuna.trial import TrialState

    journal = opened(tmp_path)
    trial = journal.ask()
    journal.settings(trial)
    journal.tell(trial, {"end": status, "reason": "why"}, 0.0)
    assert journal.trials[0].state == (TrialState.FAIL if status == "failed" else TrialState.PRUNED)
    assert journal.trials[0].user_attrs["reason"] == "why"


def test_the_worse_half_is_pruned_after_the_first_trials(tmp_path):
    journal = opened(tmp_path, epochs=8)
    for number in range(6):
        trial = journal.ask()
        journal.settings(trial)
        pruned = [journal.report(trial, epoch, 0.1 * number) for epoch in (1, 2, 3)]
        if number < 5:
            assert not any(pruned)
            journal.tell(trial, {"end": "complete", "value": 0.1 * number}, 0.0)
    assert pruned == [False, True, True]  # Not before a quarter of its epochs.
