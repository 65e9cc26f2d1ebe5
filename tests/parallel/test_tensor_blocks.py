"""Custom layers are split by the plan of their class, and learn what they learn on one device."""

import block_models as models
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.compat import slots
from tfgpu.parallel import Mesh, apply, plan_for, register_plan, tensor
from tfgpu.parallel.planning.traced import workload
from tfgpu.parallel.tensor import collectives, losses


def mesh(**sizes):
    return Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])


CASES = {
    "tensor 2": ({}, {}, mesh(tensor=2)),
    "a key head for two devices": ({}, {}, mesh(tensor=4)),
    "one key head": ({"keys": 1}, {"global_clipnorm": 0.1}, mesh(tensor=4)),
    "LoRA, accumulation": ({"lora": True}, {"gradient_accumulation_steps": 2, "clipnorm": 0.1}, mesh(tensor=2)),
    "LoRA, one key head": ({"lora": True, "keys": 1}, {}, mesh(tensor=2)),
    "data x tensor": ({}, {"clipnorm": 0.1}, mesh(data=2, tensor=2)),
    "data x tensor, LoRA": ({"lora": True}, {"global_clipnorm": 0.1}, mesh(data=2, tensor=2)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("how", "optimizer", "devices"), CASES.values(), ids=CASES)
def test_the_training_is_one_devices(how, optimizer, devices):
    one, made = models.model(**how), apply(models.model(**how), devices)
    assert made.get_layer("block").gate.weights[0].shape == (8, 12 // devices.tensor)
    models.assert_equal(one, models.fit(one, **optimizer), made, models.fit(made, **optimizer))


def count(names, wanted):
    last = [name.rpartition("/")[2] for name in names]
    return sum(name == wanted or (name.startswith(f"{wanted}_") and name[len(wanted) + 1 :].isdigit()) for name in last)


@pytest.mark.slow
def test_a_pair_needs_one_sum_each_way():
    made = tensor(models.model(), devices=2)
    models.fit(made, epochs=1)
    x, y, strategy = np.zeros((4, 5), "int32"), np.zeros((4, 5), "int32"), made.distribute_strategy
    step = tf.function(lambda x, y: strategy.run(made.train_step, args=((x, y),)))
    names = [op.name for op in step.get_concrete_function(x, y).graph.get_operations()]
    assert count(names, collectives.SUM) == 3  # attention, feed-forward, and the table's rows
    assert count(names, collectives.SUM_BACK) == 3  # attention, feed-forward, and the logits
    assert count(names, losses.CROSS_ENTROPY_SUM) == 2


@pytest.mark.slow
def test_files_hold_the_whole_layer(tmp_path):
    made = apply(models.model(lora=True), mesh(data=2, tensor=2))
    models.fit(made, Checkpoint(tmp_path / "run"), epochs=1)
    one, never_split = models.model(lora=True), models.model(lora=True)
    models.fit(one, Checkpoint(tmp_path / "run"), epochs=2)  # goes on where the other ended
    models.fit(never_split, epochs=2)
    for mine, other in zip(one.get_weights(), never_split.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    made.save(tmp_path / "model.keras")
    opened = keras.models.load_model(tmp_path / "model.keras")
    x = np.random.default_rng(0).integers(0, models.WORDS, (6, models.LENGTH))
    np.testing.assert_allclose(opened.predict(x, verbose=0), made.predict(x, verbose=0), atol=1e-5)
    plain = tensor(models.model(), devices=2)
    plain.save_weights(tmp_path / "plain.weights.h5")
    fresh = models.model()
    fresh.load_weights(tmp_path / "plain.weights.h5")
    again = tensor(models.model(keys=2), devices=4)
    again.load_weights(tmp_path / "plain.weights.h5")
    for mine, middle, other in zip(plain.get_weights(), again.get_weights(), fresh.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, other)
        np.testing.assert_array_equal(middle, other)


class Pair(keras.layers.Layer):
    """Two Dense layers, with something between them."""

    def __init__(self, width=2, between=None, **kwargs):
        super().__init__(**kwargs)
        self.up = keras.layers.Dense(width, lambda x: x * 1.0, name="up")  # of which nothing is known
        self.down = keras.layers.Dense(2, name="down")
        self.between = between or ops.relu

    def build(self, shape):
        self.up.build(shape)
        if isinstance(self.between, keras.layers.Layer):
            self.between.build((None, self.up.units))
        self.down.build((None, self.up.units))

    def call(self, x):
        return self.down(self.between(self.up(x)))


PAIR = {"up": "column", "down": "row"}


def around(layer, width=2):
    inputs = keras.Input((width,))
    return keras.Model(inputs, layer(inputs))


@pytest.fixture
def planned():
    """A class with the plan of a pair."""

    class Planned(Pair):
        pass

    return register_plan(Planned, PAIR)


def test_a_pair_by_hand(planned):
    model = around(planned())
    kernel, bias = np.array([[1.0, -1.0], [2.0, 3.0]]), np.array([0.5, 0.0])
    model.set_weights([kernel, bias, np.array([[2.0, 0.0], [10.0, 1.0]]), np.array([1.0, 0.0])])
    model = tensor(model, devices=2)
    # (1, 1): relu(1 + 2 + 0.5) * 2 + relu(-1 + 3) * 10 + 1, and relu(-1 + 3)
    np.testing.assert_array_equal(model.predict(np.ones((1, 2)), verbose=0), [[28.0, 2.0]])
    assert [variable.value.values[0].device[-5:] for variable in model.layers[-1].up.weights[:2]] == ["CPU:0", "CPU:1"]


def test_a_plan_is_the_classs_and_its_subclasses(planned):
    class Inherits(planned):
        pass

    class Calls(planned):
        def call(self, x):
            return self.up(self.down(x))

    assert plan_for(Inherits).styles == PAIR
    assert plan_for(Calls) is None
    assert plan_for(keras.layers.Dense) is None
    assert str(plan_for(planned)) == "up    column\ndown  row"


class Bank(keras.layers.Layer):
    """Weights of its own: experts side by side, or terms of a sum."""

    def build(self, shape):
        self.first = self.add_weight(shape=(4, shape[-1], 6), name="first")
        self.second = self.add_weight(shape=(4, 6, 2), name="second")

    def call(self, x):
        return ops.einsum("eti,eio->teo", ops.relu(ops.einsum("td,edi->eti", x, self.first)), self.second)


@pytest.mark.parametrize(
    "styles", [{"first": 0, "second": 0, "call": 1}, {"first": 2, "second": 1, "call": "sum"}], ids=["experts", "sum"]
)
def test_weights_of_a_layer_itself(styles):
    class Planned(Bank):
        pass

    register_plan(Planned, styles)
    model = around(Planned(name="bank"))
    x = np.random.default_rng(0).normal(size=(3, 2)).astype("float32")
    expected = model.predict(x, verbose=0)
    model = tensor(model, devices=2)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-6)
    assert sum(int(np.prod(v.shape)) for v in model.weights[::2]) == 4 * 2 * 6 // 2 + 4 * 6 * 2 // 2


def test_grouped_queries_of_keras():
    inputs = keras.Input((4, 8))
    attention = keras.layers.GroupQueryAttention(2, 4, 1, name="attention")
    model = keras.Model(inputs, attention(inputs, inputs))
    x = np.random.default_rng(0).normal(size=(2, 4, 8)).astype("float32")
    expected = np.asarray(model(x))
    model = tensor(model, devices=2)
    np.testing.assert_allclose(np.asarray(model(x)), expected, atol=1e-6)
    assert tuple(attention.weights[0].shape) == (8, 2, 2)


def test_a_class_without_a_plan_is_named_in_the_log(planned, caplog):
    inputs = keras.Input((2,))
    tensor(keras.Model(inputs, Pair()(planned()(inputs))), devices=2)
    assert 'register_plan(Pair, {"up": "column", "down": "row"})' in caplog.text


class Softmaxed(Pair):
    def call(self, x):
        return self.down(ops.softmax(self.up(x)))


class Counts(Pair):
    heads = 2

    def call(self, x):
        width = self.up.units
        return self.down(ops.reshape(ops.reshape(self.up(x), (-1, self.heads, width // 2)), (-1, width)))


class Stack(keras.Model):
    """A model without a graph."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.second = kind(name="first"), kind(name="second")

    def call(self, x):
        return self.second(self.first(x))


def test_a_model_without_a_graph_is_split_by_plans(planned):
    model, x = Stack(planned), np.random.default_rng(0).normal(size=(3, 2)).astype("float32")
    expected = np.asarray(model(x))
    model = tensor(model, devices=2)
    np.testing.assert_allclose(np.asarray(model(x)), expected, atol=1e-6)
    assert tuple(model.second.up.weights[1].shape) == (2, 1)
    model, wrong = Stack(Softmaxed), register_plan(Softmaxed, PAIR)
    model(x)
    with pytest.raises(tfgpu.InputError, match="The plan of Softmaxed changes what 'first' computes"):
        tensor(model, devices=2)
    slots.of(wrong).tensor_plan = None


class Seen(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return x


def split(layer, styles=PAIR):
    """A model of the layer, whose class has this plan for the time being."""
    register_plan(type(layer), styles)
    try:
        return tensor(around(layer), devices=2)
    finally:
        slots.of(type(layer)).tensor_plan = None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: split(Softmaxed()), "The plan of Softmaxed changes what 'softmaxed.*' computes"),
        (lambda: split(Counts()), "cannot run with the plan of Counts"),
        (lambda: split(Pair(between=Seen(name="seen"))), "'seen' keeps a state"),
        (lambda: split(Pair(width=3)), "up: it has 3 outputs, which do not divide into 2 shards"),
        (lambda: split(Counts(), {**PAIR, "heads": "heads", "up": "key_value"}), "needs a 'column' and a 'row'"),
        (lambda: split(Counts(), {**PAIR, "head": "heads"}), "gives 'head' the style 'heads', but 'counts.*' has None"),
        (lambda: register_plan(Pair, {"up": "columns"}), "column"),
        (lambda: register_plan(Pair, {}), "a mapping of attributes to styles"),
        (lambda: register_plan(Pair(), PAIR), "for a subclass of keras.layers.Layer"),
        (lambda: register_plan(Pair, {**PAIR, "call": "sum"}), "has 'call', for weights of its own"),
        (lambda: plan_for(Pair()), r"pass type\(layer\)"),
    ],
)
def test_a_plan_that_does_not_fit_is_an_error(call, words):
    with pytest.raises(tfgpu.InputError, match=words):
        call()


def test_a_block_between_a_column_and_its_row_is_an_error():
    class Inner(Pair):
        pass

    class Holds(Pair):
        def call(self, x):
            return self.down(self.between(self.up(x)))

    register_plan(Inner, PAIR)
    with pytest.raises(tfgpu.InputError, match="between a column and a row of a layer around"):
        split(Holds(between=Inner(name="inner")))


class Draws(Pair):
    def __init__(self):
        super().__init__()
        self.seeds = keras.random.SeedGenerator(1)

    def call(self, x):
        return super().call(keras.random.dropout(x, 0.5, seed=self.seeds))


class Penalized(Pair):
    def build(self, shape):
        super().build(shape)
        self.up.activity_regularizer = keras.regularizers.L2(0.1)


@pytest.mark.parametrize(
    ("layer", "words"),
    [(Draws, "it draws random numbers itself"), (Penalized, "up has an activity regularizer")],
)
def test_what_would_happen_once_for_each_device_leaves_the_layer_whole(layer, words):
    with pytest.raises(tfgpu.InputError, match=words):
        split(layer())


def test_heads_that_do_not_divide_leave_the_layer_whole():
    register_plan(Counts, {**PAIR, "heads": "heads"})
    with pytest.raises(tfgpu.InputError, match="heads is 2, which 4 devices do not divide"):
        tensor(around(Counts(4)), devices=4)


def test_sublayers_are_split_as_asked_by_path():
    model = tensor(around(Pair(name="pair")), devices=2, plan={"pair/up": "column", "pair/down": "row"})
    assert [tuple(variable.shape) for variable in model.get_layer("pair").down.weights] == [(1, 2), (1, 2), (2,)]


@pytest.mark.slow
def test_the_planner_knows_what_is_split_in_blocks():
    whole = workload(models.model())
    split = whole.cutter(2)
    trained = sum(int(np.prod(v.shape)) for v in models.model().trainable_variables)
    block = models.Block(name="block")
    block.build((None, models.LENGTH, models.WIDTH))
    kept = sum(each.count_params() for each in (block.norm, block.attention.norm)) + 2 * models.WIDTH  # rows' biases
    assert sum(each.split + each.whole for each in split.blocks) == trained
    assert sum(each.whole for each in split.blocks) == kept
    assert sum(each.flops_whole for each in split.blocks) < 0.2 * sum(each.flops for each in split.blocks)
