"""The cross-entropy by chunks against Keras's, which has all logits."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.losses import ChunkedCrossentropy, row_chunks
from tfgpu.training.perplexity import Perplexity

LENGTH, TOKENS, WIDTH = 7, 23, 8
STOCK = keras.losses.SparseCategoricalCrossentropy
# In Keras 3.13 a tied table masks its hidden input as if those were tokens, and any loss fails.
TIED_HAS_MASK = "compute_mask" in vars(keras.layers.ReversibleEmbedding)


@pytest.fixture
def passes(monkeypatch):
    """The passes over all rows that were traced."""
    found, stock = [], row_chunks.compute

    def compute(*args, **more):
        found.append(more)
        return stock(*args, **more)

    monkeypatch.setattr(row_chunks, "compute", compute)
    return found


def model_of(kind, *, mask=True, dropout=0.0):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((LENGTH,), dtype="int32")
    if kind.startswith("tied"):
        cap = 2.0 if kind == "tied, capped" else None
        table = keras.layers.ReversibleEmbedding(TOKENS, WIDTH, mask_zero=mask and TIED_HAS_MASK, logit_soft_cap=cap)
        hidden = keras.layers.Dropout(dropout)(keras.layers.Dense(WIDTH, "tanh")(table(inputs)))
        return keras.Model(inputs, table(hidden, reverse=True))
    table = keras.layers.Embedding(TOKENS, WIDTH, mask_zero=mask)
    hidden = keras.layers.Dropout(dropout)(keras.layers.Dense(WIDTH, "tanh")(table(inputs)))
    return keras.Model(inputs, keras.layers.Dense(TOKENS, use_bias=kind == "dense, bias")(hidden))


def data(weights=False):
    random = np.random.default_rng(0)
    x = random.integers(1, TOKENS, (11, LENGTH))
    x[::2, 5:] = 0
    y, given = random.integers(0, TOKENS, (11, LENGTH)), random.uniform(size=(11, LENGTH)).astype("float32")
    return {"x": x, "y": y, **({"sample_weight": given} if weights else {})}


def trained(loss, kind="tied", *, strategy=None, weights=False, optimizer=None, zero=0, **compiled):
    with (strategy or tfgpu.strategy("one_device", devices=["CPU:0"])).scope():
        model = model_of(kind, dropout=0.2)
        if zero:
            model = tfgpu.parallel.shard(model, stage=zero)
        optimizer = optimizer or keras.optimizers.SGD(0.5)
        metrics = {"weighted_metrics" if weights else "metrics": ["accuracy", Perplexity()]}
        model.compile(optimizer, loss, **metrics, **compiled)
    logs = model.fit(**data(weights), batch_size=4, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(**data(weights), batch_size=4, verbose=0)
    return [*model.get_weights(), np.array([*logs.values()]), np.array(evaluated)]


def check_equal(found, expected, atol=1e-6):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol, rtol=atol)


@pytest.mark.sample("tied, capped-True")
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("kind", ["tied", "tied, capped", "dense", "dense, bias"])
def test_learns_and_logs_what_the_whole_logits_give(kind, weights, passes):
    found = trained(ChunkedCrossentropy(5), kind, weights=weights)
    assert len(passes) == 2  # a training and an evaluation step; the metrics made none
    check_equal(found, trained(STOCK(from_logits=True), kind, weights=weights))


@pytest.mark.slow
@pytest.mark.parametrize("weights", [False, True])
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("replicas", [2, 4])
def test_replicas_are_one_device(replicas, zero, weights, passes):
    expected = trained(STOCK(from_logits=True), "dense, bias", weights=weights)
    strategy = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)])
    found = trained(ChunkedCrossentropy(5), "dense, bias", weights=weights, strategy=strategy, zero=zero)
    assert passes
    check_equal(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("how", ["accumulation", "float16", "xla"])
def test_other_ways_to_train(how, replicas, passes):
    strategy = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(replicas)])
    optimizer = {"optimizer": keras.optimizers.SGD(0.5, clipnorm=0.1, gradient_accumulation_steps=2)}
    given = {"accumulation": optimizer, "float16": {}, "xla": {"jit_compile": True}}[how]
    keras.config.set_dtype_policy("mixed_float16" if how == "float16" else "float32")
    try:
        found = trained(ChunkedCrossentropy(5), "dense", strategy=strategy, **given)
        given = {"optimizer": optimizer["optimizer"].from_config(optimizer["optimizer"].get_config())} if given else {}
        again = {"jit_compile": True} if how == "xla" else given if how == "accumulation" else {}
        expected = trained(STOCK(from_logits=True), "dense", strategy=strategy, **again)
    finally:
        keras.config.set_dtype_policy("float32")
    assert passes
    check_equal(found, expected, 2e-3 if how == "float16" else 1e-6)  # sums of chunks are not rounded to 16 bits


def test_smoothed_and_ignored_labels():
    tfgpu.repair_keras()
    model, given = model_of("dense, bias"), data()
    target = np.where(given["y"] % 5 == 0, -1, given["y"])
    one_hot = tf.one_hot(target, TOKENS)
    counts = tf.cast(target >= 0, tf.float32)

    @tf.function
    def gradients(loss, weighs):
        with tf.GradientTape() as tape:
            value = loss(model(given["x"]))
        return value, tape.gradient(value, model.trainable_variables[1:])

    def whole(logits):
        each = keras.losses.categorical_crossentropy(one_hot, logits, from_logits=True, label_smoothing=0.2)
        counted = counts * tf.cast(given["x"] != 0, tf.float32)
        return tf.reduce_sum(each * counted) / tf.reduce_sum(counted)

    loss = ChunkedCrossentropy(5, label_smoothing=0.2, ignore_class=-1)
    found, expected = (gradients(each, 0) for each in (lambda logits: loss(target, logits), whole))
    check_equal(tf.nest.flatten(found), tf.nest.flatten(expected))
    check_equal([loss(target, model(given["x"]))], [expected[0]])  # eager: from the logits


def numbers_in_step(loss, tokens, vocabulary=4096, frozen=False):
    """The sizes of all tensors of a step's graph that are not pruned."""
    inputs = keras.Input((tokens,), dtype="int32")
    table = keras.layers.ReversibleEmbedding(vocabulary, 4, trainable=not frozen)
    model = keras.Model(inputs, table(keras.layers.Dense(4)(table(inputs)), reverse=True))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            value = loss(x, model(x))
        return tape.gradient(value, model.trainable_variables)

    graph = step.get_concrete_function(tf.TensorSpec([2, tokens], tf.int32)).graph
    needed, wait = set(), [tensor.op for tensor in tf.nest.flatten(graph.structured_outputs, expand_composites=True)]
    while wait:
        operation = wait.pop()
        if operation not in needed:
            needed.add(operation)
            wait += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return [out.shape.num_elements() or 0 for operation in needed for out in operation.outputs]


def peak_numbers(loss, tokens, vocabulary=4096):
    """The largest tensor of a step but for the weights, in numbers a token."""
    return max(size for size in numbers_in_step(loss, tokens, vocabulary) if size != 4 * vocabulary) / tokens


def test_the_graph_of_a_step_has_no_tensor_of_all_logits():
    assert peak_numbers(STOCK(from_logits=True), 64) >= 2 * 4096
    assert peak_numbers(ChunkedCrossentropy(8), 64) < 4096 / 8


def test_a_frozen_table_has_no_gradient_to_add_up():
    sizes = [numbers_in_step(ChunkedCrossentropy(8), 64, frozen=frozen).count(4 * 4096) for frozen in (False, True)]
    assert sizes[0] > sizes[1] > 0
    inputs = keras.Input((LENGTH, WIDTH))
    head = keras.layers.Dense(TOKENS, trainable=False)
    model = keras.Model(inputs, head(keras.layers.Dense(WIDTH)(inputs)))
    x, found, start = np.random.default_rng(0).normal(size=(4, LENGTH, WIDTH)), [], model.get_weights()
    for loss in (ChunkedCrossentropy(5), STOCK(from_logits=True)):
        model.set_weights(start)
        model.compile(keras.optimizers.SGD(0.5), loss)
        model.fit(x, data()["y"][:4], verbose=0)
        found.append(model.get_weights())
    check_equal(*found)


def test_what_is_no_head_is_named():
    inputs = keras.Input((4, 8))
    model = keras.Model(inputs, keras.layers.LayerNormalization()(keras.layers.Dense(6)(inputs)))
    model.compile("sgd", ChunkedCrossentropy())
    with pytest.raises(tfgpu.InputError, match="needs logits that come straight from a Dense"):
        model.fit(np.ones((2, 4, 8), "float32"), np.ones((2, 4)), verbose=0)


@pytest.mark.parametrize("given", [{"chunk": 0}, {"chunk": 2.0}, {"chunk": True}, {"label_smoothing": 2}])
def test_bad_settings_are_named(given):
    with pytest.raises(tfgpu.InputError, match="Received: "):
        ChunkedCrossentropy(**given)


def test_settings_are_kept():
    loss = ChunkedCrossentropy(64, label_smoothing=0.1, ignore_class=-1)
    again = keras.losses.deserialize(keras.losses.serialize(loss))
    assert again.get_config() == loss.get_config()
