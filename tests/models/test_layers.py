"""tfgpu's two layers: values by hand, saving and loading."""

import keras
import numpy as np

from tfgpu.models import layers


def test_the_class_token_stands_first():
    layer = layers.ClassToken()
    layer.build((None, 2, 3))
    layer.token.assign([[[7.0, 8.0, 9.0]]])
    np.testing.assert_array_equal(layer(np.ones((2, 2, 3), "float32")), [[[7, 8, 9], [1, 1, 1], [1, 1, 1]]] * 2)


def test_positions_are_added():
    layer = layers.PositionEmbedding()
    layer.build((None, 2, 2))
    layer.positions.assign([[1.0, 2.0], [3.0, 4.0]])
    np.testing.assert_array_equal(layer(np.full((1, 2, 2), 10.0, "float32")), [[[11, 12], [13, 14]]])


def test_positions_start_small():
    layer = layers.PositionEmbedding(stddev=0.5)
    layer.build((None, 100, 100))
    assert 0.4 < np.std(layer.positions) < 0.55


def test_half_precision_stays_half():
    for kind in (layers.ClassToken, layers.PositionEmbedding):
        layer = kind(dtype="mixed_float16")
        assert layer(np.ones((1, 2, 3), "float16")).dtype == "float16"
        assert layer.variables[0].dtype == "float32"


def test_configurations_go_around():
    for layer in (layers.ClassToken(name="a"), layers.PositionEmbedding(stddev=0.1, name="b")):
        again = keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(layer))
        assert type(again) is type(layer) and again.get_config() == layer.get_config()
        assert keras.saving.get_registered_name(type(layer)).startswith("tfgpu>")
