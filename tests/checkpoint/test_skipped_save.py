"""What a worker does that takes no part in a save, or whose `Checkpoint` raises the errors of a shared writer."""

import threading
import time

import keras
import numpy as np
import pytest

from tfgpu.callbacks import EventsFile, MetricsFile
from tfgpu.checkpoint import Writer, parts_writer
from tfgpu.checkpoint.disks import Disks
from tfgpu.checkpoint.manifest import Position
from tfgpu.core.state.parts import StateParts
from tfgpu.errors import MachineError


def messages_of(texts):
    """Stands for `Messages`, with the texts of all workers in a dict."""

    class Messages:
        def __init__(self, scope):
            self._scope = scope

        def put(self, key, text, seconds=0.0):
            texts.setdefault((self._scope, key), text)

        def wait(self, key, rank):
            while (self._scope, key) not in texts:
                time.sleep(0.01)
            return texts[self._scope, key]

    return Messages


@pytest.mark.parametrize("is_leader_first", [True, False])
def test_the_first_worker_of_a_disk_that_takes_no_part_leaves_nothing_there(tmp_path, monkeypatch, is_leader_first):
    monkeypatch.setattr(parts_writer, "Messages", messages_of({}))
    first, second = (parts_writer.PartsWriter(tmp_path, Disks(rank, (0, 0), "run", writes=True)) for rank in range(2))
    position = Position(3)
    skip = threading.Thread(target=first.no_job(position), daemon=True)
    write = threading.Thread(target=second.job(position, StateParts([], {}, {}), None, lambda path: None), daemon=True)
    both = [skip, write] if is_leader_first else [write, skip]
    for thread in both:
        thread.start()
        thread.join(0.2)
    for thread in both:
        thread.join(60)
    assert not skip.is_alive() and not write.is_alive() and not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [EventsFile, lambda path, **how: MetricsFile(path / "a.csv", **how)])
def test_other_callbacks_leave_a_shared_writer_s_errors_to_the_checkpoint_of_several_workers(tmp_path, make):
    (tmp_path / "file").write_text("in the way")
    writer = Writer()
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with writer.led():
        model.fit(
            np.ones((2, 1)), np.ones((2, 1)), epochs=3, verbose=0, callbacks=[make(tmp_path / "file", writer=writer)]
        )
    with pytest.raises(MachineError, match="Writing .* failed"):
        writer.wait()
    assert not writer.is_led
