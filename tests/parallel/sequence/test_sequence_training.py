"""Along `sequence`: optimizers, eager steps, layers that mix rows, files and checkpoints, all as on one device."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sequence_models import BODIES, LAYERS, LENGTH, TOKENS, check_equal, data_of, model_of, trained, transformer

import tfgpu
from tfgpu.parallel import Mesh, apply

pytestmark = pytest.mark.slow
TWO, FOUR = Mesh(sequence=2), Mesh(data=2, sequence=2)


class Centered(LAYERS.Layer):
    """Takes the mean over rows from each: mixes rows, not positions."""

    def call(self, x):
        return x - tf.reduce_mean(x, 0, keepdims=True)


class Compared(LAYERS.Layer):
    """Each row is a mixture of all, by the likeness of whole rows: mixes rows and positions."""

    def call(self, x):
        likeness = tf.einsum("atd,btd->ab", x, x) / (x.shape[1] * x.shape[2])
        return x + tf.einsum("ab,btd->atd", tf.nn.softmax(likeness), x)


BODIES |= {
    "normalized": lambda x: LAYERS.BatchNormalization()(transformer(x)),
    "centered": lambda x: Centered()(transformer(x)),
    "compared": lambda x: Compared()(transformer(x)),
}


def adamw():
    # The gradient of a key's bias is 0 but for rounding, of which Adam makes steps of any size below this epsilon.
    return keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5, epsilon=1e-3, use_ema=True)


@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=("two", "two by two"))
@pytest.mark.parametrize("kind", ["transformer", "subclassed"])
def test_adamw(kind, mesh):
    check_equal(trained(kind, mesh, optimizer=adamw), trained(kind, optimizer=adamw))


@pytest.mark.parametrize("mesh", [TWO, FOUR], ids=("two", "two by two"))
def test_eager_steps(mesh):
    check_equal(trained("transformer", mesh, run_eagerly=True), trained("transformer", run_eagerly=True))


@pytest.mark.parametrize("kind", ["normalized", "centered", "compared"])
def test_a_layer_that_mixes_rows_sees_all(kind):
    check_equal(trained(kind, FOUR), trained(kind))


def compiled(mesh):
    if mesh is None:
        with tfgpu.strategy("one_device", devices=["CPU:0"]).scope():
            model = model_of("transformer")
    else:
        model = apply(model_of("transformer"), mesh)
    with model.distribute_strategy.scope():
        model.compile(adamw(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def fit(model, *callbacks, epochs=2, **more):
    x, y, _ = data_of("transformer")
    model.fit(x, y, batch_size=4, shuffle=False, verbose=0, epochs=epochs, callbacks=list(callbacks), **more)
    return model


@pytest.fixture(scope="module")
def expected():
    return fit(compiled(None))


def state(model):
    return [*model.get_weights(), *(variable.numpy() for variable in model.optimizer.variables)]


def test_a_file_opens_in_stock_keras_and_goes_on(tmp_path):
    fit(compiled(TWO), epochs=1).save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    check_equal(state(opened), state(fit(compiled(None), epochs=1)))
    again = compiled(TWO)
    again.load_weights(tmp_path / "model.keras")
    x = data_of("transformer")[0]
    check_equal([again.predict(x, verbose=0)], [opened.predict(x, verbose=0)])


@pytest.mark.parametrize("meshes", [(TWO, TWO), (TWO, None), (None, FOUR)], ids=("same", "to one device", "from one"))
def test_a_checkpoint_goes_on(tmp_path, expected, meshes):
    before, after = meshes
    fit(compiled(before), tfgpu.callbacks.Checkpoint(tmp_path), epochs=1)
    resumed = fit(compiled(after), tfgpu.callbacks.Checkpoint(tmp_path))
    check_equal(state(resumed), state(expected))


def test_inputs_of_unknown_length_are_named():
    inputs = keras.Input((None,), dtype="int32")
    model = apply(keras.Model(inputs, LAYERS.Dense(TOKENS)(transformer(inputs))), TWO)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    data = tf.data.Dataset.from_generator(
        lambda: ((np.ones((4, LENGTH), "int32"), np.ones((4, LENGTH), "int32")) for _ in range(2)),
        output_signature=(tf.TensorSpec([None, None], tf.int32), tf.TensorSpec([None, None], tf.int32)),
    )
    with pytest.raises(tfgpu.InputError, match="needs inputs .batch, length, ....* whose length is known"):
        model.fit(data, verbose=0)
