"""`Mesh(sequence=n)`: parts of each sequence on several devices learn what one device learns."""

import keras
import numpy as np
import pytest
from sequence_models import BODIES, CONFIG, LAYERS, check_equal, trained

import tfgpu
from benchmarks.sequence import decoder, kept_bytes
from tfgpu.parallel import Mesh, apply


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh", [Mesh(sequence=2), Mesh(sequence=4), Mesh(data=2, sequence=2)], ids=("two", "four", "two by two")
)
@pytest.mark.parametrize("kind", [*BODIES, "subclassed"])
def test_parts_of_a_sequence_learn_what_one_device_learns(kind, mesh, caplog):
    check_equal(trained(kind, mesh), trained(kind))
    mixes = {record.args[0] for record in caplog.records if "mixes positions" in record.msg}
    assert mixes == {"mixing": {"Last"}, "picked": {"Picked"}}.get(kind, set())


def clipped():
    return keras.optimizers.SGD(0.1, momentum=0.9, global_clipnorm=0.5, gradient_accumulation_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["clipped, accumulated", "weights", "blocks", "chunks", "float16"])
def test_with_other_settings(how):
    given = {"weights": {"weights": True}, "clipped, accumulated": {"optimizer": clipped}}.get(how, {})
    if how == "chunks":
        given["loss"] = tfgpu.losses.ChunkedCrossentropy(5)
    try:
        (CONFIG.enable_flash_attention if how == "blocks" else CONFIG.disable_flash_attention)()
        CONFIG.set_dtype_policy("mixed_float16" if how == "float16" else "float32")
        found, expected = trained("transformer", Mesh(sequence=2), **given), trained("transformer", **given)
    finally:
        CONFIG.disable_flash_attention()
        CONFIG.set_dtype_policy("float32")
    if how == "float16":  # one token of another class, by rounding, is more than that
        check_equal(found[:-4], expected[:-4], 5e-3)
    else:
        check_equal(found, expected)


@pytest.mark.slow
def test_a_device_keeps_a_part_of_the_activations():
    devices, sizes = [f"CPU:{at}" for at in range(4)], {"length": 64, "batch": 2}
    (whole,) = kept_bytes(decoder(64, 32, 2, 2), Mesh(devices=devices[:1]), **sizes).values()
    parts = kept_bytes(decoder(64, 32, 2, 2), Mesh(sequence=4, devices=devices), **sizes)
    assert len(parts) == 4
    assert max(parts.values()) <= 0.3 * whole, (whole, parts)


@pytest.mark.sample("axes")
@pytest.mark.parametrize(
    ("mesh", "length", "message"),
    [
        (Mesh(sequence=3), 16, "16 positions does not divide into 3 parts. Use a length of 15 or 18"),
        (Mesh(sequence=2, tensor=2), 16, "`sequence` combines with `data` only"),
    ],
    ids=("length", "axes"),
)
def test_what_does_not_fit_is_named(mesh, length, message):
    inputs = keras.Input((length, 4))
    model = keras.Model(inputs, LAYERS.Dense(2)(inputs))
    with pytest.raises(tfgpu.InputError, match=message.replace("`", ".")):
        model = apply(model, mesh)
        model.compile("sgd", "mse")
        model.fit(np.ones((4, length, 4)), np.ones((4, length, 2)), verbose=0)


def test_xla_is_refused():
    model = apply(keras.Sequential([keras.Input((16, 4)), LAYERS.Dense(2)]), Mesh(sequence=2))
    with pytest.raises(tfgpu.InputError, match="XLA can compile neither this model's step nor the calls"):
        model.compile("sgd", "mse", jit_compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(sequence=2), Mesh(data=2, sequence=2)], ids=("two", "two by two"))
def test_a_loss_of_activations_counts_once(mesh):
    check_equal(trained("regularized", mesh), trained("regularized"))


class Hidden(LAYERS.Layer):
    """Adds a loss that its trial does not see."""

    def call(self, x, training=None):
        if training:
            self.add_loss(keras.ops.sum(x))
        return x


@pytest.mark.slow
def test_a_loss_of_a_part_is_refused():
    inputs = keras.Input((4, 4))
    model = apply(keras.Model(inputs, Hidden(name="hidden")(inputs)), Mesh(sequence=2))
    model.compile("sgd", "mse")
    with pytest.raises(tfgpu.InputError, match="'hidden' adds a loss in training only"):
        model.fit(np.ones((4, 4, 4)), np.ones((4, 4, 4)), verbose=0)
