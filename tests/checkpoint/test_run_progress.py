"""A run's steps are counted over interruptions and several `fit`s, and data that counts epochs is positioned."""

from types import SimpleNamespace

from tfgpu.checkpoint.data_position import DataSource
from tfgpu.checkpoint.run_progress import DataSeeker, RunProgress
from tfgpu.checkpoint.storage import Position


def test_steps_and_history_continue_from_a_checkpoint():
    progress = RunProgress()
    progress.restore(Position(2, history=({"loss": 3.0}, {"loss": 2.0}), step=25, done=5, first=0))
    progress.first = 0  # resumed: the interrupted epoch does not begin again
    progress.done = 10
    progress.end_epoch(2, {"loss": 1.0})
    found = progress.position(epoch=3)
    assert (found.epoch, found.step, found.done) == (3, 30, 0)
    assert [row["loss"] for row in found.history] == [3.0, 2.0, 1.0]


def test_a_second_fit_counts_on_and_one_from_the_first_epoch_starts_over():
    progress = RunProgress()
    for epoch in (0, 1):
        progress.begin_epoch(epoch)
        progress.done = 4
        progress.end_epoch(epoch, {"loss": float(epoch)})
    progress.first = None  # the next `fit`
    assert progress.begin_epoch(2) and progress.step == 8
    assert not progress.begin_epoch(3)
    progress.first = None
    assert progress.begin_epoch(0) and progress.step == 0
    assert progress.position().history == () and progress.position().first == 0


def test_data_that_counts_epochs_is_sought_by_the_run_s_epoch():
    counter = SimpleNamespace(next=7)  # an earlier `fit` has read seven epochs
    seeker = DataSeeker(None, DataSource(counter, False, None))
    seeker.begin(0)
    seeker.seek(2)
    assert seeker.is_possible and (seeker.first_epoch, counter.next) == (7, 9)


def test_one_stream_for_all_epochs_cannot_be_sought():
    assert not DataSeeker(None, DataSource(SimpleNamespace(next=0), True, None)).is_possible
    assert not DataSeeker(None, DataSource(None, False, None)).is_possible
