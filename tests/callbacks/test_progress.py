import io
import re

import keras
import numpy as np
import pytest
from rich.console import Console

from tfgpu.callbacks.progress import Progress, line


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=120, highlight=False, _environ={"TERM": "xterm"})


@pytest.fixture
def model():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def fit(model, screen, **settings):
    x, y = np.zeros((40, 2), "float32"), np.zeros(40, int)
    progress = Progress(console=screen)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=[progress], **settings)
    return screen.file.getvalue()


@pytest.mark.slow
def test_a_log_file_gets_one_line_per_epoch(model):
    lines = fit(model, console(False), epochs=10, validation_split=0.1).splitlines()
    assert len(lines) == 10
    assert re.fullmatch(
        r"epoch  1/10  accuracy \d+\.\d%  loss \d+\.\d{4}  val_accuracy \d+\.\d%  val_loss \d+\.\d{4}  \d+\.\d s",
        lines[0],
    )
    assert lines[9].startswith("epoch 10/10")
    assert "\x1b" not in "".join(lines)


def test_a_terminal_gets_a_transient_bar(model):
    text = fit(model, console(True), epochs=2)
    assert "0/10" in text and "━" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # The cursor is hidden and given back.
    assert "epoch 1/2  accuracy" in text and "epoch 2/2  accuracy" in text


def test_blocks_of_steps_as_the_loop_reports_them():
    screen = console(True)
    progress = Progress(console=screen)
    progress.set_params({"epochs": 1, "steps": 100})
    progress.on_train_begin()
    progress.on_epoch_begin(0)
    progress.on_train_batch_end(49, {"loss": 2.0})
    progress.on_epoch_end(0, {"loss": 1.0})
    progress.close()
    assert "50/100" in screen.file.getvalue() and "epoch 1/1  loss 1.0000" in screen.file.getvalue()


def test_the_terminal_is_given_back_after_an_error(model):
    screen = console(True)
    progress = Progress(console=screen)
    stop = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.fit(np.zeros((4, 2)), np.zeros(4), verbose=0, callbacks=[progress, stop])
    progress.close()
    assert screen.file.getvalue().count("\x1b[?25h") == 1


def test_an_unknown_number_of_steps_is_known_from_the_second_epoch():
    screen = console(True)
    progress = Progress(console=screen)
    progress.set_params({"epochs": 2, "steps": None})
    progress.on_train_begin()
    for epoch in range(2):
        progress.on_epoch_begin(epoch)
        progress.on_train_batch_end(6, {})
        progress.on_epoch_end(epoch, {})
    progress.close()
    assert "/7" in screen.file.getvalue()


@pytest.mark.parametrize(
    "terminal, width, shown",
    [
        (True, 120, "epoch 1/1  accuracy 50.0%  loss 1.0000  host 1.00 GiB  lr 1.0e-03"),
        (True, 75, "epoch 1/1  accuracy 50.0%  loss 1.0000  lr 1.0e-03  2000.0 ms/step  0.0 s"),
        (True, 65, "epoch 1/1  accuracy 50.0%  loss 1.0000  2000.0 ms/step  0.0 s"),
        (True, 50, "epoch 1/1  accuracy 50.0%  loss 1.0000  0.0 s"),
        (True, 45, "epoch 1/1  accuracy 50.0%  loss 1.0000  0.0 s"),
        (True, 44, "epoch 1/1  accuracy 50.0%  loss 1.0000"),
        (False, 50, "epoch 1/1  accuracy 50.0%  loss 1.0000  host 1.00 GiB  lr 1.0e-03"),
    ],
)
def test_a_narrow_terminal_gets_fewer_numbers(terminal, width, shown):
    screen = console(terminal)
    screen.width, screen.soft_wrap = width, True
    progress = Progress(console=screen)
    progress.set_params({"epochs": 1, "steps": 1})
    progress.on_epoch_begin(0)
    logs = {"accuracy": 0.5, "loss": 1.0, "host_peak_bytes": 2.0**30, "learning_rate": 1e-3, "step_time_s": 2.0}
    progress.on_epoch_end(0, logs)
    assert shown in re.sub(r"\d\.\d s$", "0.0 s", screen.file.getvalue().rstrip(), count=1)


def test_line():
    logs = {
        "loss": 0.08121,
        "val_accuracy": 0.9861,
        "learning_rate": 0.003,
        "step_time_s": 0.0053,
        "epoch_time_s": 9.0,
    }
    assert line(logs) == "loss 0.0812  val_accuracy 98.6%  lr 3.0e-03  5.3 ms/step"
    assert line(None) == ""
