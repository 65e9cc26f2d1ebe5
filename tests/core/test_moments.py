"""Which BatchNormalization layers share a collective, and that a training is one device's nevertheless."""

import gpu_way
import keras
import numpy as np
import pytest
import tensorflow as tf
import tracer

import tfgpu
from tfgpu.core.moments import graph_order
from tfgpu.core.row_mixing import row_sums

layers = keras.layers
ROWS = np.random.default_rng(0).normal(2, 3, (26, 6)).astype("float32")
TARGETS = ROWS.sum(1, keepdims=True) / 5


def norm(**options):
    return layers.BatchNormalization(momentum=0.5, **options)


def two_branches():
    """A residual block whose shortcut has a BatchNormalization, as ResNet's."""
    inputs = keras.Input((6,))
    shortcut = norm(name="shortcut")(layers.Dense(4)(inputs))
    x = layers.ReLU()(norm(name="first")(layers.Dense(5)(inputs)))
    x = norm(name="second")(layers.Dense(4)(x))
    return keras.Model(inputs, layers.Dense(1)(layers.ReLU()(layers.Add()([shortcut, x]))))


def uneven_branches():
    """Three branches of one, two and three BatchNormalization layers; dropout on two of them."""
    inputs = keras.Input((6,))
    a = layers.Dropout(0.5, seed=1, name="drop_a")(norm(name="a")(layers.Dense(4)(inputs)))
    b = layers.ReLU()(norm(name="b1")(layers.Dense(5)(inputs)))
    b = norm(name="b2")(layers.Dense(4)(layers.Dropout(0.3, seed=2, name="drop_b")(b)))
    c = inputs
    for name in ("c1", "c2", "c3"):
        c = layers.ReLU()(norm(name=name)(layers.Dense(4, use_bias=False)(c)))
    return keras.Model(inputs, layers.Dense(1)(layers.Concatenate()([a, b, c])))


def shared_layer():
    """One layer on two branches, beside one that is frozen, one told not to train, and one in 64 bits."""
    inputs, shared, frozen = keras.Input((6,)), norm(name="shared"), norm(name="frozen", trainable=False)
    a = shared(layers.Dense(4, use_bias=False)(inputs))
    b = shared(layers.Dense(4)(layers.Dense(3, activation="tanh")(inputs)))
    c = frozen(layers.Dense(4)(inputs))
    d = norm(name="told")(layers.Dense(4)(inputs), training=False)
    e = norm(name="wide", dtype="float64")(layers.Dense(4)(inputs))
    return keras.Model(inputs, layers.Dense(1)(layers.Add()([a, b, c, d, e])))


def masked():
    """Two layers that see a mask."""
    x = layers.Masking(0.0)(layers.Reshape((3, 2))(inputs := keras.Input((6,))))
    x = layers.Add()([norm()(x), norm()(layers.Dense(2)(x))])
    return keras.Model(inputs, layers.Dense(1)(layers.GlobalAveragePooling1D()(x)))


def shared_names(model):
    """The names of the layers of each group of several."""
    groups = graph_order.groups_of(model)
    return groups and [[node.operation.name for node in group] for group in groups if len(group) > 1]


def trained(strategy, make, rows=8, **options):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = make()
        model.compile(keras.optimizers.SGD(0.002, momentum=0.9), "mse", **options)
    model.fit(ROWS, TARGETS, batch_size=rows, epochs=2, shuffle=False, verbose=0)
    return model


def test_layers_that_wait_together_are_a_group():
    assert [sorted(names) for names in shared_names(two_branches())] == [["first", "shortcut"]]
    assert [sorted(names) for names in shared_names(uneven_branches())] == [["a", "b1", "c1"], ["b2", "c2"]]
    assert sorted(shared_names(shared_layer())[0]) == ["frozen", "shared", "shared", "told", "wide"]
    assert shared_names(keras.Sequential([keras.Input((6,)), norm(), layers.Dense(3), norm()])._functional) is None


def test_calls_follow_those_they_depend_on_and_ordered_ones_keep_keras_s_order():
    inputs = keras.Input((6,))
    a = layers.Lambda(lambda x: x + 1, name="after_a")(norm(name="a")(layers.Lambda(lambda x: x, name="of_a")(inputs)))
    b = norm(name="b")(layers.Lambda(lambda x: x + 1, name="of_b2")(layers.Lambda(lambda x: x, name="of_b1")(inputs)))
    model = keras.Model(inputs, layers.Add()([a, layers.Dropout(0.5, name="after_b")(b)]))
    nodes = [node for depth in sorted(model._nodes_by_depth, reverse=True) for node in model._nodes_by_depth[depth]]
    stock = [node.operation.name for node in nodes if isinstance(node.operation, (layers.Lambda, layers.Dropout))]
    groups = graph_order.groups_of(model) or [(node,) for node in nodes if not node.is_input]
    order, known = [], {id(tensor) for tensor in model.inputs}
    for group in groups:
        assert all(id(tensor) in known for node in group for tensor in node.input_tensors)
        known |= {id(tensor) for node in group for tensor in node.outputs}
        order += [node.operation.name for node in group]
    assert len(order) == len(nodes) - 1
    assert [name for name in order if name in stock] == stock


def test_the_second_call_of_a_layer_waits_for_the_first():
    inputs, shared = keras.Input((6,)), norm(name="shared")
    late = shared(layers.ReLU()(norm(name="before")(layers.Dense(6)(inputs))))  # runs first: by depth
    early = layers.Dense(6)(layers.Dense(6)(layers.Dense(6)(shared(inputs))))
    model = keras.Model(inputs, layers.Add()([late, norm(name="after")(early)]))
    order = [node for group in graph_order.groups_of(model) or () for node in group]
    calls = [node for node in order if node.operation is shared]
    stock = [node for depth in sorted(model._nodes_by_depth, reverse=True) for node in model._nodes_by_depth[depth]]
    assert calls == [node for node in stock if node.operation is shared]


@pytest.mark.slow
def test_a_group_has_one_collective_forward_and_one_backward():
    with gpu_way.gpu_way(), tracer.recording() as calls:
        trained(tfgpu.strategy("mirrored", devices=["CPU:1", "CPU:2"]), two_branches, rows=26)
    sent = [each.bytes for each in calls.step(rows=13).collectives["GPU:0"]]
    group, single = 2 * 2 * 4 * (4 + 5), 2 * 2 * 4 * 4  # replicas, moments, bytes, channels
    assert sorted(sent[:4]) == [single, single, group, group]
    assert len(sent) == 5  # and the gradients


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("make", [two_branches, uneven_branches, shared_layer, masked], ids=lambda make: make.__name__)
def test_a_training_is_one_device_s(make, rows):
    one, ours = (trained(s, make, rows) for s in (tfgpu.strategy("one_device"), tfgpu.strategy("mirrored", devices=2)))
    assert shared_names(ours)
    for expected, found in zip(one.weights, ours.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4, err_msg=found.path)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"jit_compile": True}])
def test_a_training_is_one_device_s_eagerly_and_compiled(options):
    one = trained(tfgpu.strategy("one_device"), two_branches)
    ours = trained(tfgpu.strategy("mirrored", devices=2), two_branches, **options)
    for expected, found in zip(one.weights, ours.weights, strict=True):
        np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-4, atol=1e-4, err_msg=found.path)


@pytest.mark.slow
def test_weights_without_a_part_in_the_loss_stay_as_on_one_device():
    """Both heads share a collective; only one has a loss. A gradient of zeros would let the other's weights decay."""

    def train(strategy):
        keras.utils.set_random_seed(3)
        with strategy.scope():
            inputs = keras.Input((6,))
            heads = {name: layers.Dense(1, name=name)(norm()(layers.Dense(4)(inputs))) for name in "ab"}
            model = keras.Model(inputs, heads)
            model.compile(keras.optimizers.AdamW(0.01, weight_decay=0.5), {"a": "mse"})
        before = model.get_weights()
        model.fit(ROWS, {"a": TARGETS}, batch_size=13, epochs=1, verbose=0)
        return model, before

    (one, _), (ours, before) = train(tfgpu.strategy("one_device")), train(tfgpu.strategy("mirrored", devices=2))
    assert len(shared_names(ours)) == 1
    stayed = [(was == weight).all() for was, weight in zip(before, ours.get_weights(), strict=True)]
    assert stayed == [(was == weight).all() for was, weight in zip(before, one.get_weights(), strict=True)]
    assert sum(stayed) == 6  # kernels and biases, gamma and beta of one head


def test_a_persistent_tape_and_second_derivatives_tell_values_apart():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    tfgpu.repair_keras()

    @tf.function
    def step():
        values = [tf.constant(2.0), tf.constant(3.0)]
        with tf.GradientTape() as outer:
            outer.watch(values)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(values)
                a, b = row_sums.over_replicas(values, are_apart=True)
                powers = a**3, b**2, a * b
            found = [tape.gradient(power, values) for power in powers]
            slope = found[0][0]
        del tape
        second = outer.gradient(slope, values)
        kinds = [[each is None for each in pair] for pair in (*found, second)]
        assert kinds == [[False, True], [True, False], [False, False], [False, True]]
        return found[0][0], found[1][1], *found[2], second[0]

    for value, expected in zip(strategy.run(step), (2 * 3 * 16, 2 * 2 * 6, 2 * 6, 2 * 4, 4 * 6 * 4), strict=True):
        np.testing.assert_allclose([each.numpy() for each in strategy.experimental_local_results(value)], expected)
