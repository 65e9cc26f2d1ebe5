"""The state of a training: a feature's provider takes part, and copies are restored."""

import keras
import numpy as np
import pytest

from tfgpu import strategies
from tfgpu.core import extensions
from tfgpu.core.state import training_state
from tfgpu.errors import InputError

X = np.arange(24.0, dtype="float32").reshape(6, 4)


def line(*layers):
    model = keras.Sequential([keras.Input((4,)), *layers, keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.1), "mse", metrics=["mae"])
    return model


class Counted(training_state.StateProvider):
    """A feature with one variable and one array."""

    def __init__(self):
        self.settled, self.count, self.seen = [], keras.Variable(3.0), np.zeros(2)

    def settle(self, model):
        self.settled.append(model)

    def variables(self, model):
        return training_state.name_group("counted", [self.count])

    def arrays(self, model):
        return {"seen/0000": self.seen.copy()}

    def put_arrays(self, model, arrays):
        self.seen = arrays.get("seen/0000", np.zeros(2))


@pytest.fixture
def counted(monkeypatch):
    registry = extensions.Registry()
    for provider in extensions.state_providers:
        registry.register(provider)
    monkeypatch.setattr(extensions, "state_providers", registry)
    return registry.register(Counted())


def test_what_a_feature_registers_is_copied_and_restored(counted):
    model = line()
    counted.seen[:] = 7
    arrays = training_state.copy_state(model)
    assert counted.settled == [model]
    assert arrays["counted/0000"] == 3 and arrays["seen/0000"].tolist() == [7, 7]
    counted.count.assign(5.0)
    counted.seen[:] = 0
    training_state.restore_state(model, arrays, "the copy")
    assert counted.count.numpy() == 3 and counted.seen.tolist() == [7, 7]
    assert any(variable is counted.count for variable in training_state.changed_by_a_step(model))


def test_arrays_of_a_feature_that_is_not_there_are_ignored(counted, monkeypatch):
    model = line()
    arrays = training_state.copy_state(model)
    monkeypatch.setattr(extensions, "state_providers", extensions.Registry())
    training_state.restore_state(model, arrays, "the copy")


@pytest.mark.sample("2")
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_training_continues_from_its_copy(replicas):
    with strategies.mirrored(replicas).scope():
        model = line(keras.layers.Dropout(0.5, seed=1))
    model.fit(X, X[:, :1], batch_size=3, epochs=2, shuffle=False, verbose=0)
    arrays = training_state.copy_state(model, metrics=True)
    ends = []
    for _ in range(2):
        training_state.restore_state(model, arrays, "the copy")
        model.fit(X, X[:, :1], batch_size=3, epochs=2, shuffle=False, verbose=0)
        ends.append([weight.copy() for weight in model.get_weights()])
    for first, second in zip(*ends, strict=True):
        np.testing.assert_array_equal(first, second)


def test_another_model_s_state_is_refused():
    arrays = training_state.copy_state(line())
    with pytest.raises(InputError, match=r"the copy does not fit this model: .*kernel has shape .* there and .* here"):
        training_state.restore_state(line(keras.layers.Dense(2)), arrays, "the copy")
    del arrays["optimizer/0001"]
    with pytest.raises(InputError, match="the copy does not fit this model: it has no .*learning_rate"):
        training_state.restore_state(line(), arrays, "the copy")
