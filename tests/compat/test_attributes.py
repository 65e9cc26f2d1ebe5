"""Attributes that TensorFlow gives objects are known by their names, and those of users are not among them."""

import keras
import tensorflow as tf

from tfgpu.compat import attributes


class Own(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self._self_attention = keras.layers.Dense(2)


def test_what_tracking_sets_is_known():
    checkpoint = tf.train.Checkpoint(layer=Own())
    names = {name for each in (checkpoint, checkpoint.layer) for name in vars(each) if name.startswith("_self_")}
    assert names - attributes.OF_TRACKING == {"_self_attention"} and attributes.OF_TRACKING <= names
