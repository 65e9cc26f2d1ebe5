"""Closures that are waited for while TensorFlow loses the worker that ran them."""

import threading
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf
from tensorflow.python.distribute.coordinator.values import RemoteValueImpl
from tensorflow.python.eager import context

from tfgpu.core import step_blocks
from tfgpu.parameter_server import scheduled_closures
from tfgpu.parameter_server.scheduled_closures import ScheduledClosures

LOST = tf.errors.UnavailableError(None, None, "Additional GRPC error information from remote target /job:worker/task:1")


@pytest.fixture
def closures():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    found = ScheduledClosures(model, 1, None, counts_updates=False)
    yield found
    found.close()


@pytest.mark.parametrize("moment", ["before", "while it is fetched"])
def test_a_worker_that_is_lost_while_its_result_is_fetched(closures, moment, monkeypatch):
    remote, retried = RemoteValueImpl(None, None), threading.Event()
    state = [tf.constant(value) for value in (6.0, 3.0)]  # the sum and the number of losses
    remote._set_values((state, [tf.constant(1.0)], tf.constant(0.5)))
    if moment == "before":
        remote._set_error(LOST)
    else:
        remote._values = None  # as `_set_error` leaves it for an instant, before it puts the error down

    def sleep(seconds):
        remote._set_values((state, [tf.constant(1.0)], tf.constant(0.5)))  # of the worker that ran it again
        retried.set()

    monkeypatch.setattr(scheduled_closures.time, "sleep", sleep)
    monkeypatch.setattr(context, "get_server_def", lambda: SimpleNamespace(job_name="localhost"))  # no cluster here
    closures.follow(closures.enter(), remote, 1, step_blocks.Pace())
    closures.wait()
    assert retried.is_set()
    assert [float(each) for each in closures._totals] == [6.0, 3.0]
