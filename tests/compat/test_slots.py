"""State on foreign objects is in one namespace, which Keras does not track."""

import keras
import tensorflow as tf

from tfgpu.compat import slots


def test_a_layer_tracks_nothing_of_it():
    layer = keras.layers.Dense(2)
    layer.build((None, 3))
    slots.of(layer).held = keras.Variable(1.0)
    assert len(layer.variables) == 2 and slots.get(layer, "held").numpy() == 1.0


def test_a_subclass_does_not_inherit_it():
    class Below(keras.Model):
        pass

    class Lower(Below):
        pass

    slots.of(Below).seen = True
    assert slots.get(Below, "seen") and slots.get(Lower, "seen") is None and slots.get(Below(), "seen") is None


def test_reading_creates_nothing():
    thing = keras.layers.Dense(1)
    assert slots.get(thing, "nothing", 5) == 5 and "_tfgpu" not in vars(thing)


def test_a_graph_keeps_it():
    graph = tf.function(lambda: tf.constant(1)).get_concrete_function().graph
    slots.of(graph).seen = 3
    slots.of(graph).other = 4
    assert (slots.get(graph, "seen"), slots.get(graph, "other")) == (3, 4)
