"""When memory runs out, the error has the sizes and how to reduce them."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint


@pytest.mark.slow
def test_an_oversized_step_names_its_allocation(tmp_path):
    count = 1 << 22  # a matrix of count x count numbers for each row: more than a process can address

    with tfgpu.strategy("mirrored", devices=2).scope():
        inputs = keras.Input((2,))
        row = keras.layers.Dense(8)(inputs)
        wide = keras.layers.Lambda(lambda x: keras.ops.repeat(x, count // 8, axis=1), output_shape=(count,))(row)
        square = keras.layers.Lambda(lambda x: x[:, :, None] * x[:, None, :], output_shape=(count, count))(wide)
        model = keras.Model(inputs, keras.layers.Lambda(lambda x: keras.ops.mean(x, (1, 2)), output_shape=())(square))
        model.compile("adam", "mse", jit_compile=False)
    x = np.ones((4, 2), "float32")
    told_rows = []
    for run in (
        lambda: model.fit(x, x[:, 0], 4, verbose=0, callbacks=[Checkpoint(tmp_path)]),
        lambda: model.predict(x),
    ):
        with pytest.raises(tfgpu.MachineError) as told:
            run()
        text = str(told.value)
        assert text.startswith("Out of memory for a tensor of shape [") and "4194304, 4194304], float (" in text
        assert "TiB)" in text and "on CPU:" in text
        assert "The model's variables take 96 bytes" in text
        for knob in ("smaller batch", "gradient_accumulation_steps", "mixed_bfloat16", "recompute=True"):
            assert knob in text
        told_rows.append("a batch has 4 rows over 2 replica(s)" in text)
    assert told_rows == [True, False]


class InputError(Exception):
    """Of a user's own, with the name of tfgpu's."""


@pytest.mark.parametrize("devices", [1, 2])
def test_only_tfgpus_own_errors_come_out_of_the_data(devices):
    def read(fail):
        yield np.zeros((2, 3), "float32"), np.zeros((2, 1), "float32")
        fail()

    def of_a_users_own():
        raise InputError("not this")

    signature = tf.TensorSpec((None, 3)), tf.TensorSpec((None, 1))
    with tfgpu.strategy(devices=devices).scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_generator(lambda: read(of_a_users_own), output_signature=signature)
    with pytest.raises(tf.errors.UnknownError, match="InputError: not this"):
        model.fit(data, verbose=0)
    ours = functools.partial(tfgpu.errors.whole_number, "rows", 0)
    data = tf.data.Dataset.from_generator(lambda: read(ours), output_signature=signature)
    with pytest.raises(tfgpu.InputError, match="`rows` must be a whole number of at least 1"):
        model.fit(data, verbose=0)


def test_units():
    from tfgpu.core.error_messages import in_units

    assert [in_units(n) for n in (0, 1023, 1024, 1536 << 20, 3 << 41)] == [
        "0 bytes",
        "1023 bytes",
        "1 KiB",
        "1.5 GiB",
        "6 TiB",
    ]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize(
    ("tokens", "labels", "told"),
    [(3, 5, r"label is 5, but the loss takes 0 to 1: .*2 outputs"), (9, 1, r"index is 9, .* has 7 rows")],
)
def test_numbers_beyond_classes_and_tokens(devices, tokens, labels, told):
    with tfgpu.strategy(devices=devices).scope():
        layers = keras.layers.Embedding(7, 4), keras.layers.Flatten(), keras.layers.Dense(2)
        model = keras.Sequential([keras.Input((3,), dtype="int32"), *layers])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
    with pytest.raises(tfgpu.InputError, match=told):
        model.fit(np.full((8, 3), tokens, "int32"), np.full(8, labels, "int32"), batch_size=4, verbose=0)
