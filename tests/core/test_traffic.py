"""The bytes that a model's steps pass to collectives, counted from their traces."""

import tensorflow as tf

from tfgpu.core import traffic


def test_bytes_are_those_of_the_traced_steps_and_of_each_call():
    meter = traffic.Meter()
    with meter.tracing("plain"):
        traffic.note([tf.zeros([3]), None, tf.IndexedSlices(tf.zeros([2, 2]), tf.constant([0, 1]))])
        traffic.note([tf.zeros([8])], part=0.25)
    with meter.tracing(None):
        traffic.note([tf.zeros([1])])
    traffic.note([tf.zeros([100])])  # outside any step
    meter.count(2, "plain")
    assert meter.bytes == 2 * (12 + 16 + 8 + 8) + 4 and meter.is_whole
    meter.count(3, "of another kind")
    assert meter.bytes == 92 + 4


def test_an_unknown_shape_is_reported():
    meter = traffic.Meter()
    with meter.tracing("plain"):
        traffic.note([tf.TensorSpec([None, 2])])
    assert not meter.is_whole
