"""Replicas are compared while `fit` runs: a copy that differs is found, named, and never saved."""

import functools
import logging

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.compat.variables import held
from tfgpu.consistency import digests, settings, watch
from tfgpu.errors import InputError, ReplicasDiffer

ROWS = np.random.default_rng(0).normal(size=(48, 6)).astype("float32")
LABELS = np.arange(48) % 3


def compiled(devices):
    keras.utils.set_random_seed(3)
    with tfgpu.strategy("mirrored", devices=devices).scope():
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((6,)), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=False)
    return model


@pytest.fixture(scope="module")
def made():
    """Models on two and on three replicas, which are traced once."""
    return functools.cache(compiled)


@pytest.fixture
def model_of(made):
    """A model on so many replicas, whose copies are equal, and which is compared so often."""

    def model(devices, every, *, goes_on=False):
        found = made(devices)
        mend(found)
        settings.choose(found.distribute_strategy, settings.Checks(every, goes_on))
        return found

    return model


def mend(model):
    for variable in digests.compared(model).values():
        copies = held(variable).values
        for copy in copies[1:]:
            copy.assign(copies[0])


class Flip(keras.callbacks.Callback):
    """Flips a bit of a number of one replica's copy of a variable, after a step."""

    every_batch = True

    def __init__(self, name, replica, bit, step):
        super().__init__()
        self.name, self.replica, self.bit, self.step, self.done = name, replica, bit, step, 0

    def on_train_batch_end(self, batch, logs=None):
        self.done += 1
        if self.done == self.step:
            self.path = flip(self.model, self.name, self.replica, self.bit)


def flip(model, name, replica, bit):
    """Flips a bit, counted through all numbers of a variable; returns the variable's path."""
    variable = digests.compared(model)[name]
    copy = held(variable).values[replica]
    content = bytearray(np.array(copy.numpy()).tobytes())
    bit %= 8 * len(content)
    content[bit // 8] ^= 1 << bit % 8
    copy.assign(np.frombuffer(bytes(content), copy.dtype.as_numpy_dtype).reshape(copy.shape))
    return variable.path


def fit(model, *callbacks, **options):
    return model.fit(ROWS, LABELS, batch_size=6, verbose=0, callbacks=[*callbacks], **options)


def test_a_flipped_bit_is_found_and_named_and_the_checkpoint_before_it_stays(model_of, tmp_path):
    model = model_of(3, every=2)
    flipped = Flip("weights/0000", replica=1, bit=55, step=5)
    with pytest.raises(ReplicasDiffer, match="replica 1 differs from the other replicas, first in") as raised:
        fit(model, tfgpu.callbacks.Checkpoint(tmp_path, every_steps=4), flipped)
    assert raised.value.variable == flipped.path and raised.value.replicas == (1,) and raised.value.step == 6
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0000-step-0000004"]


def test_a_checkpoint_is_written_only_where_all_are_equal(model_of, tmp_path):
    model = model_of(3, every=1000)
    with pytest.raises(ReplicasDiffer, match="After step 8 .* replica 2 differs .*; after step 4 all were equal"):
        fit(model, tfgpu.callbacks.Checkpoint(tmp_path, every_steps=4), Flip("optimizer/0003", 2, 9, step=5))
    assert [path.name for path in tmp_path.iterdir()] == ["epoch-0000-step-0000004"]


BACKUP = {"latest.weights.h5", "training_metadata.json"}
STOCK = {
    "an epoch": (lambda path: keras.callbacks.ModelCheckpoint(path / "{epoch}.keras"), 8, 16, {"1.keras"}),
    "3 steps": (
        lambda path: keras.callbacks.ModelCheckpoint(path / "{epoch}-{batch}.keras", save_freq=3),
        *(9, 12, {"1-3.keras", "1-6.keras", "2-1.keras"}),
    ),
    "backup of an epoch": (keras.callbacks.BackupAndRestore, 8, 16, BACKUP),
    "backup of 4 steps": (lambda path: keras.callbacks.BackupAndRestore(path, save_freq=4), 8, 12, BACKUP),
}


@pytest.mark.sample("3 steps", "backup of an epoch")
@pytest.mark.parametrize(("save", "equal_at", "found_at", "files"), STOCK.values(), ids=[*STOCK])
def test_keras_callbacks_save_only_where_all_are_equal(model_of, tmp_path, save, equal_at, found_at, files):
    model = model_of(3, every=1000)
    with pytest.raises(ReplicasDiffer, match=f"After step {found_at} .*; after step {equal_at} all were equal"):
        fit(model, Flip("optimizer/0003", 2, 9, step=10), save(tmp_path), epochs=3)
    assert {path.name for path in tmp_path.iterdir()} == files


@pytest.mark.slow
def test_of_two_that_differ_none_is_taken_for_right(model_of):
    model = model_of(2, every=1)
    with pytest.raises(ReplicasDiffer, match="replica 0 and replica 1 differ from each other, first in") as raised:
        fit(model, Flip("weights/0001", 1, 3, step=2))
    assert raised.value.replicas == (0, 1) and raised.value.step == 3


@pytest.mark.slow
def test_training_goes_on_from_the_chiefs_weights(model_of, caplog):
    model, flipped = model_of(2, every=1, goes_on=True), Flip("weights/0000", 1, 2, step=2)
    with caplog.at_level(logging.WARNING):
        fit(model, flipped, epochs=2)
    assert "continues from the chief's weights" in caplog.text and flipped.path in caplog.text
    assert digests.of_copies(model, list(digests.compared(model).values())).std(axis=0).max() == 0
    assert flipped.done == 16


@pytest.mark.slow
def test_by_default_comparisons_take_their_share_and_no_more(model_of):
    model = model_of(2, every=None)
    fit(model)
    seen = watch.Watch(model, settings.Checks())
    seen.after_block(10, 0.5)
    assert seen.comparisons == 0
    seen.after_block(10, 1e6)
    assert seen.comparisons == 1
    seen.after_block(1, 99 * seen.seconds)
    assert seen.comparisons == 1
    seen.after_block(1, 2 * seen.seconds)
    assert seen.comparisons == 2


OPTIONS = {
    "moments by replica": {"batch_norm": "replica"},
    "a part of the gradients": {"top_k": 0.1},
    "accumulation": {"optimizer": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=3)},
    "averages": {"optimizer": lambda: keras.optimizers.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2)},
    "loss scaling": {"optimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))},
    "ZeRO 1": {"stage": 1},
    "ZeRO 3": {"stage": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=[*OPTIONS])
def test_what_replicas_have_of_their_own_is_no_difference(options):
    options = dict(options)
    stage, optimizer = options.pop("stage", None), options.pop("optimizer", keras.optimizers.Adam)
    with tfgpu.strategy("mirrored", devices=2, check_replicas=1, **options).scope():
        layers = [keras.layers.Dense(5, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.3)]
        model = keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3)])
        model = model if stage is None else tfgpu.parallel.shard(model, stage=stage)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer(), loss, metrics=["accuracy"], jit_compile=False)
    model.fit(ROWS, LABELS, batch_size=9, epochs=2, verbose=0)  # uneven batches
    assert len(digests.compared(model)) >= 5


@pytest.mark.slow
def test_off_compares_nothing(model_of, tmp_path):
    model = model_of(2, every=0)
    fit(model, tfgpu.callbacks.Checkpoint(tmp_path), Flip("weights/0000", 1, 2, step=2))
    copies = held(model.weights[0]).values
    assert (copies[0].numpy() != copies[1].numpy()).any()


def test_the_strategy_takes_the_options():
    made = tfgpu.strategy("mirrored", devices=2, check_replicas=7, on_difference="chief")
    assert settings.of(made) == settings.Checks(7, goes_on=True)
    assert settings.of(tfgpu.strategy("mirrored", devices=2)) == settings.Checks(None, goes_on=False)


@pytest.mark.parametrize(
    "options", [{"check_replicas": "never"}, {"check_replicas": 0}, {"on_difference": "mend"}, {"check_replicas": True}]
)
def test_values_that_are_none_are_refused(options):
    with pytest.raises(InputError):
        tfgpu.strategy("mirrored", devices=2, **options)


@pytest.mark.slow
def test_each_of_100_random_flips_is_found_within_10_steps():
    """A low bit may be rounded away, and a number beyond all bounds may make all copies NaN: then all are equal."""
    model = compiled(4)
    settings.choose(model.distribute_strategy, settings.Checks(10))
    fit(model)
    start = {name: held(v).values[0].numpy() for name, v in digests.compared(model).items()}
    random, found, vanished = np.random.default_rng(7), 0, 0
    for _ in range(100):
        for name, variable in digests.compared(model).items():
            for copy in held(variable).values:
                copy.assign(start[name])
        name, replica = str(random.choice(list(start))), int(random.integers(4))
        step = int(random.integers(1, 20))
        flipped = Flip(name, replica, int(random.integers(1 << 30)), step)
        try:
            fit(model, flipped, epochs=4)
        except ReplicasDiffer as error:
            assert error.variable == flipped.path and error.replicas == (replica,), (error, flipped.path, replica)
            assert step < error.step <= step + 10
            found += 1
        else:
            table = digests.of_copies(model, list(digests.compared(model).values()))
            assert (table == table[0]).all(), (name, replica, flipped.bit)
            vanished += 1
    assert found + vanished == 100 and found >= 75, (found, vanished)


@pytest.mark.parametrize(
    "value",
    [
        tf.constant([1.5, -0.0, np.inf, np.nan]),
        tf.constant([1.5, -2.0, 3.0], tf.float64),
        tf.constant([1.5, -2.0, 3.0], tf.bfloat16),
        tf.constant([[1, -2], [3, 4]], tf.int32),
        tf.constant([1, -2, 2**40], tf.int64),
        tf.constant([1, 255], tf.uint8),
        tf.constant([1 + 2j], tf.complex128),
    ],
    ids=lambda value: value.dtype.name,
)
def test_any_bit_changes_the_digest(value):
    content = value.numpy().tobytes()
    found = set()
    for bit in range(-1, 8 * len(content)):
        changed = bytearray(content)
        if bit >= 0:
            changed[bit // 8] ^= 1 << bit % 8
        array = np.frombuffer(bytes(changed), value.dtype.as_numpy_dtype).reshape(value.shape)
        found.add(int(digests.of_tensor(tf.constant(array))))
    assert len(found) == 8 * len(content) + 1


def test_the_digest_of_a_large_tensor_depends_on_the_order(monkeypatch):
    monkeypatch.setattr(digests, "CHUNK", 8)
    x = np.arange(21, dtype="float32")
    swapped, other = x.copy(), x.copy()
    swapped[[3, 11]] = swapped[[11, 3]]  # the same place in the next chunk
    other[20] = 20.000002
    assert len({int(digests.of_tensor(tf.constant(each))) for each in (x, swapped, other)}) == 3
    assert digests.of_tensor(tf.zeros([0])) == 0
