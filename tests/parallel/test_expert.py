"""Experts over devices: a model learns what it learns on one, and each device has its part of them."""

import block_models
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.compat import slots
from tfgpu.layers import MixtureOfExperts
from tfgpu.parallel import Mesh, apply, memory_by_device, register_plan
from tfgpu.parallel.expert import groups

WORDS, WIDTH = block_models.WORDS, block_models.WIDTH


def mesh(**sizes):
    return Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])


def model(make=None, dropout=0.1, **how):
    """Words, a layer of experts that `make` makes, and logits."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((block_models.LENGTH,), dtype="int32")
    x = keras.layers.Embedding(WORDS, WIDTH, mask_zero=True)(inputs)
    experts = MixtureOfExperts(4, 12, name="experts", **how) if make is None else make()
    x = x + keras.layers.Dropout(dropout)(experts(keras.layers.LayerNormalization()(x)))
    return keras.Model(inputs, keras.layers.Dense(WORDS)(x))


CASES = {
    "expert 2": ({"balance_loss": 0.5}, {"global_clipnorm": 0.1}, mesh(expert=2)),
    "expert 4, more devices than rows": ({}, {"clipnorm": 0.05}, mesh(expert=4)),
    "expert 4, capacity": ({"capacity_factor": 0.6, "z_loss": 0.1}, {}, mesh(expert=4)),
    "data x expert": ({"capacity_factor": 1.0}, {"global_clipnorm": 0.1}, mesh(data=2, expert=2)),
    "data x expert, accumulation": (
        {"top_k": 1, "gated": True},
        {"clipnorm": 0.05, "gradient_accumulation_steps": 2},
        mesh(data=2, expert=2),
    ),
    "accumulation": ({}, {"global_clipnorm": 0.1, "gradient_accumulation_steps": 3}, mesh(expert=2)),
    "averages": ({}, {"use_ema": True, "ema_overwrite_frequency": 2}, mesh(data=2, expert=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "optimizer", "devices"), CASES.values(), ids=CASES)
def test_the_training_is_one_devices(how, optimizer, devices):
    one, made = model(**how), apply(model(**how), devices)
    expected, history = block_models.fit(one, **optimizer), block_models.fit(made, **optimizer)
    block_models.assert_equal(one, expected, made, history)
    x = np.random.default_rng(0).integers(0, WORDS, (7, block_models.LENGTH))
    np.testing.assert_allclose(made.predict(x, verbose=0), one.predict(x, verbose=0), atol=1e-5)
    np.testing.assert_allclose(np.asarray(made(x)), np.asarray(one(x)), atol=1e-5)


def test_each_device_has_its_part_of_the_experts_and_of_their_slots():
    one, made = model(), apply(model(), mesh(data=2, expert=2))
    with made.distribute_strategy.scope():
        made.compile("adam")
        made.optimizer.build(made.trainable_variables)
    one.compile("adam")
    one.optimizer.build(one.trainable_variables)
    experts = 4 * one.get_layer("experts").experts.count_params()
    assert experts == 4 * (4 * (2 * WIDTH * 12 + 12 + WIDTH))
    (whole,) = memory_by_device(one).values()
    assert len(memory_by_device(made)) == 4
    for sizes in memory_by_device(made).values():
        assert sizes["weights"] == whole["weights"] - experts // 2
        assert sizes["optimizer"] == whole["optimizer"] - 2 * experts // 2  # Adam has two slots
    for mine, other in zip(made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    kernel = made.get_layer("experts").experts.weights[0]
    copies = [np.asarray(copy) for copy in kernel.value.values]
    np.testing.assert_array_equal(np.concatenate(copies[:2]), one.get_layer("experts").experts.get_weights()[0])
    np.testing.assert_array_equal(copies[:2], copies[2:])


def count(names, wanted):
    last = [name.rpartition("/")[2] for name in names]
    return sum(name == wanted or (name.startswith(f"{wanted}_") and name[len(wanted) + 1 :].isdigit()) for name in last)


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "pairs"), [({"expert": 2}, 4), ({"data": 2, "expert": 2}, 8)], ids=["1", "2 copies"])
def test_a_layer_exchanges_once_each_way_and_once_back(sizes, pairs):
    made = apply(model(), mesh(**sizes))
    block_models.fit(made, epochs=1)
    strategy, x = made.distribute_strategy, np.zeros((4, block_models.LENGTH), "int32")
    step = tf.function(lambda x, y: strategy.run(made.train_step, args=((x, y),)))
    names = [op.name for op in step.get_concrete_function(x, x).graph.get_operations()]
    for way in (groups.TO_EXPERTS, groups.FROM_EXPERTS, f"{groups.TO_EXPERTS}_back", f"{groups.FROM_EXPERTS}_back"):
        assert count(names, way) == pairs  # one tensor from each device of a group to each


@pytest.mark.slow
def test_places_are_given_in_the_order_of_the_batchs_rows():
    def only_expert_0(made):
        layer = made.get_layer("experts")
        layer.router.assign(np.eye(4)[:, :4] * 0.0)  # equal logits: the first expert
        return made

    def around():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((4,))
        return keras.Model(inputs, MixtureOfExperts(4, 6, top_k=1, capacity_factor=2.0, name="experts")(inputs))

    x = np.random.default_rng(0).normal(size=(10, 4)).astype("float32")
    one, made = only_expert_0(around()), only_expert_0(apply(around(), mesh(expert=4)))
    expected, found = (each.predict(x, batch_size=10, verbose=0) for each in (one, made))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert (np.abs(found).max(1) > 0).tolist() == [True] * 5 + [False] * 5  # 2 * 10 / 4 tokens


@pytest.mark.slow
def test_files_and_checkpoints_hold_all_experts(tmp_path):
    made = apply(model(), mesh(data=2, expert=2))
    block_models.fit(made, Checkpoint(tmp_path / "run"), epochs=1)
    one, never_spread, again = model(), model(), apply(model(), mesh(expert=4))
    block_models.fit(one, Checkpoint(tmp_path / "run"), epochs=2)  # goes on where the other ended
    block_models.fit(never_spread, epochs=2)
    for mine, other in zip(one.get_weights(), never_spread.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    block_models.fit(again, Checkpoint(tmp_path / "run"), epochs=3)
    block_models.fit(one, Checkpoint(tmp_path / "run"), epochs=3)
    for mine, other in zip(one.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    made.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    for mine, other in zip(made.get_weights(), opened.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
    fresh = apply(model(), mesh(expert=2))
    fresh.load_weights(tmp_path / "model.keras")
    for mine, other in zip(made.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)


class Experts(keras.layers.Layer):
    """Experts as users write them: all compute every token."""

    def build(self, shape):
        self.first = self.add_weight(shape=(4, shape[-1], 6), name="first")
        self.second = self.add_weight(shape=(4, 6, shape[-1]), name="second")

    def call(self, x):
        return ops.einsum("tei,eio->teo", ops.relu(ops.einsum("td,edi->tei", x, self.first)), self.second)


class Summed(Experts):
    """Experts that weigh and sum their results."""

    def call(self, x, scores):
        hidden = ops.relu(ops.einsum("td,edi->tei", x, self.first))
        return ops.einsum("te,tei,eio->to", scores, hidden, self.second)


class Mixture(keras.layers.Layer):
    """A router of the user's, with a balance that is no mean over rows."""

    def __init__(self, kind=Experts, **kwargs):
        super().__init__(**kwargs)
        self.router, self.bank = keras.layers.Dense(4), kind()

    def build(self, shape):
        self.router.build((None, shape[-1]))
        self.bank.build((None, shape[-1]))

    def call(self, x, training=None):
        flat = ops.reshape(x, (-1, x.shape[-1]))
        scores = ops.softmax(self.router(flat))
        if isinstance(self.bank, Summed):
            made = self.bank(flat, scores)
        else:
            made = ops.einsum("te,ted->td", scores, self.bank(flat))
        if training:
            best = ops.one_hot(ops.argmax(scores, -1), 4)
            self.add_loss(0.5 * ops.sum(ops.mean(best, 0) * ops.mean(scores, 0)))
        return ops.reshape(made, ops.shape(x))


PLANS = {
    Experts: ({"first": 0, "second": 0, "call": 1}, {}),
    Summed: ({"first": 0, "second": 0, "call": "sum"}, {"scores": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANS, ids=lambda kind: kind.__name__)
def test_experts_of_ones_own_are_spread_by_a_plan(kind):
    styles, arguments = PLANS[kind]
    register_plan(kind, styles, arguments=arguments)
    try:
        one, made = (model(lambda: Mixture(kind)) for _ in range(2))
        made = apply(made, mesh(data=2, expert=2))
        expected, history = block_models.fit(one), block_models.fit(made)
        block_models.assert_equal(one, expected, made, history)
        held = [each.value.values[0].shape for each in made.weights if each.path.endswith(("first", "second"))]
        assert [tuple(shape) for shape in held] == [(2, WIDTH, 6), (2, 6, WIDTH)]
    finally:
        slots.of(kind).tensor_plan = None


@pytest.mark.slow
def test_a_step_by_hand_gives_one_devices_gradients():
    def trained(made):
        strategy = made.distribute_strategy
        with strategy.scope():
            optimizer = keras.optimizers.SGD(0.1, global_clipnorm=0.5)
            optimizer.build(made.trainable_variables)
        draw = np.random.default_rng(0)
        x, y = (tf.constant(draw.integers(0, WORDS, (6, block_models.LENGTH))) for _ in range(2))
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(6)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
                value = loss(y, made(x, training=True)) / 30
            optimizer.apply(tape.gradient(value, made.trainable_variables), made.trainable_variables)

        run = tf.function(lambda *rows: strategy.run(step, args=rows))
        for _ in range(3):
            for rows in strategy.experimental_distribute_dataset(data):
                run(*rows)
        return made

    how = {"dropout": 0.0, "balance_loss": 0.0}
    one, made = trained(model(**how)), trained(apply(model(**how), mesh(expert=2)))
    for mine, other in zip(made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


@pytest.mark.slow
def test_a_step_that_overflows_is_skipped_on_all_devices():
    def trained(made):
        with made.distribute_strategy.scope():
            optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=2.0**127)
        made.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
        x = np.random.default_rng(0).integers(0, WORDS, (8, block_models.LENGTH))
        made.fit(x, x, batch_size=4, epochs=3, shuffle=False, verbose=0)
        return float(optimizer.dynamic_scale.numpy())

    one, made = model(dropout=0.0), apply(model(dropout=0.0), mesh(expert=2))
    assert trained(one) == trained(made) < 2.0**127
    for mine, other in zip(made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


class OwnStep(keras.Model):
    """A step that looks at its whole batch."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            values = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = ops.max(ops.mean(values, -1))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def trained_by_itself():
    plain = model()
    made = apply(OwnStep(plain.inputs, plain.outputs), mesh(expert=2))
    made.compile("sgd", jit_compile=False)
    x = np.zeros((4, block_models.LENGTH), "int32")
    made.fit(x, x, batch_size=4, verbose=0)


def compiled_with(optimizer):
    made = apply(model(), mesh(expert=2))
    made.compile(optimizer)
    made.optimizer.build(made.trainable_variables)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: apply(model(), mesh(expert=3)), "has 4 experts, which 3 devices do not divide .3 or 6 would fit"),
        (lambda: apply(model(), mesh(expert=2, tensor=2)), "combines with `data` only.*Remove `tensor`, or `expert`"),
        (lambda: apply(model(), mesh(expert=2, pipeline=2)), "Remove `pipeline`, or `expert`"),
        (lambda: apply(model(), mesh(expert=2, sequence=2)), "Remove `sequence`, or `expert`"),
        (lambda: apply(model(), mesh(data=2, expert=2), zero=1), "Remove `zero`, or `expert`"),
        (lambda: apply(model(), mesh(expert=2), microbatches=4), "`microbatches` describes a pipeline"),
        (lambda: apply(model(), mesh(expert=2), plan={"*": "column"}), "tfgpu.parallel.register_plan"),
        (
            lambda: apply(block_models.model(), mesh(expert=2)),
            "has a plan that says which of its weights belong to experts",
        ),
        (lambda: compiled_with(keras.optimizers.Muon()), "Muon looks at each variable as a whole"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(tfgpu.InputError, match=words):
        call()


@pytest.mark.slow
def test_a_step_that_sees_the_whole_batch_is_refused():
    with pytest.raises(tfgpu.InputError, match="sees the whole batch cannot train"):
        trained_by_itself()
