"""The coordination service, without a cluster: its errors and Ctrl-C."""

import signal

import pytest
import tensorflow as tf

from tfgpu.compat import coordination


def test_without_the_service_it_is_unreachable():
    with pytest.raises(coordination.Unreachable):
        coordination.get("a")


def test_ctrl_c_while_tensorflow_makes_an_error_stays_ctrl_c(monkeypatch):
    """It was taken for an unreachable service: training went on."""
    stock = tf.errors.OpError.__init__

    def init(self, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        stock(self, *args, **kwargs)

    monkeypatch.setattr(tf.errors.OpError, "__init__", init)
    for call in (
        lambda: coordination.get("a"),
        lambda: coordination.put("a", "b"),
        lambda: coordination.delete("a"),
        lambda: coordination.answers("/job:worker/replica:0/task:1"),
    ):
        with pytest.raises(KeyboardInterrupt):
            call()
