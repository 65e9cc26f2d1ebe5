"""Features join the engine by registering: core asks them in order, and imports none of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfgpu import strategies
from tfgpu.core import extensions, gradients


def test_items_are_asked_by_their_order_then_by_their_registration():
    registry = extensions.Registry()
    for name, order in (("c", 5), ("a", 0), ("d", 5), ("b", 1)):
        registry.register(name, order=order)
    assert list(registry) == ["a", "b", "c", "d"]


@pytest.fixture
def registered(monkeypatch):
    """Registers gradient extensions for the length of a test."""
    registry = extensions.gradient_extensions
    monkeypatch.setattr(registry, "_items", list(registry._items))
    return registry.register


def trained(rows=2):
    with strategies.mirrored(2).scope():
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="ones")])
        model.compile(keras.optimizers.SGD(1.0), "mse")
    x = np.arange(1.0, rows + 1)[:, None]
    model.fit(x, 0 * x, batch_size=rows, shuffle=False, verbose=0)
    return float(model.get_weights()[0][0, 0])


def test_gradients_are_summed_by_rows_where_nothing_is_registered():
    assert trained() == pytest.approx(1 - 5.0)  # 2 x (1 + 4) / 2 rows


def test_an_extension_sums_in_its_own_way_and_surrounds_the_update(registered):
    seen = []

    class Own(gradients.GradientExtension):
        def sum(self, update, parts):
            seen.append((update.optimizer, len(update.variables)))
            return [tf.fill(part.shape, 0.25) for part in parts]

        def around_update(self, update, sums, named):
            return Doubled(sums, named)

    class Doubled:
        def __init__(self, sums, named):
            self.sums, self.named = sums, named

        def __enter__(self):
            return [2 * value for value in self.sums], self.named

        def __exit__(self, *error):
            seen.append("left")

    registered(Own(), order=1)
    assert trained() == pytest.approx(1 - 0.5)
    assert seen[0][1] == 1 and "left" in seen


def test_the_first_extension_that_sums_decides(registered):
    def extension(value):
        class Own(gradients.GradientExtension):
            def sum(self, update, parts):
                return None if value is None else [tf.fill(part.shape, value) for part in parts]

        return Own()

    for order, value in ((1, None), (3, 8.0), (2, 0.25)):
        registered(extension(value), order=order)
    assert trained() == pytest.approx(0.75)


def test_an_error_is_explained_by_a_registered_function(monkeypatch):
    from tfgpu.core.error_messages import explained

    registry = extensions.Registry()
    registry.register(lambda error, model: None)
    registry.register(lambda error, model: RuntimeError(f"{model}: {error.message}"), order=1)
    monkeypatch.setattr(extensions, "error_explanations", registry)
    with pytest.raises(RuntimeError, match="the model: gone"), explained("the model"):
        raise tf.errors.UnavailableError(None, None, "gone")
