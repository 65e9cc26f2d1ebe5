"""A checkpoint is written only where all workers have got as far as saving it."""

import threading

import pytest

from tfgpu.checkpoint import Writer
from tfgpu.checkpoint.parts_writer import Agreement


def test_what_fails_on_one_worker_is_written_on_none():
    written = []
    with Writer(most=3) as writer:
        failing, agreed, alone = Agreement(), Agreement(), Agreement(is_open=True)
        writer.put("first", lambda: failing.wait() and written.append("first"))
        writer.put("second", lambda: agreed.wait() and written.append("second"))
        writer.put("third", lambda: alone.wait() and written.append("third"))
        assert threading.active_count() > 1 and not written
        with pytest.raises(OSError), failing:
            raise OSError
        with agreed:
            pass
    assert written == ["second", "third"]
