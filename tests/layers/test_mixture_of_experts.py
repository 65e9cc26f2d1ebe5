"""`layers.MixtureOfExperts` on one device and on replicas, against numbers worked out by hand and a plain loop."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import tracer

import tfgpu
from tfgpu.layers import MixtureOfExperts
from tfgpu.parallel import Mesh

WIDTH, EXPERTS = 3, 4


def layer(**how):
    """A layer whose router is set by hand: the first numbers of a token are its logits."""
    made = MixtureOfExperts(EXPERTS, 5, **{"bias_initializer": keras.initializers.RandomNormal(seed=2), **how})
    made.build((None, None, EXPERTS))
    made.router.assign(np.eye(EXPERTS))
    return made


def tokens(*logits):
    return np.array([logits], "float32")


def by_hand(made, x, kept=lambda token, choice: True):
    """A loop over tokens and their choices."""
    bank, x = made.experts, x.reshape(-1, x.shape[-1])
    up, up_bias, *gates, down, down_bias = [np.asarray(each) for each in bank.weights]
    found = np.zeros_like(x)
    for at, token in enumerate(x):
        scores = np.exp(token) / np.exp(token).sum()
        chosen = np.argsort(-scores, kind="stable")[: made.top_k]
        weights = scores[chosen] / (scores[chosen].sum() if made.top_k > 1 else 1)
        for number, expert in enumerate(chosen):
            hidden = token @ up[expert] + up_bias[expert]
            if gates:
                hidden = hidden * np.asarray(bank.activation(token @ gates[0][expert] + gates[1][expert]))
            else:
                hidden = np.asarray(bank.activation(hidden))
            if kept(at, number):
                found[at] += weights[number] * (hidden @ down[expert] + down_bias[expert])
    return found


@pytest.mark.parametrize("how", [{}, {"top_k": 1}, {"gated": True, "activation": "silu", "top_k": 3}], ids=str)
def test_a_token_gets_the_weighted_sum_of_its_experts(how):
    made, x = layer(**how), np.random.default_rng(0).normal(size=(2, 3, EXPERTS)).astype("float32")
    np.testing.assert_allclose(np.asarray(made(x)).reshape(-1, EXPERTS), by_hand(made, x), atol=1e-6)


def test_choices_without_a_place_are_left_out_in_the_order_of_rows_and_first_choices_first():
    # The tokens' first and second choices: 0 1, 0 1, 1 0, 0 2. An expert takes 0.75 * 2 * 4 / 4, rounded up: 2.
    x = np.array([[[4, 3, 0, 0], [4, 3, 0, 0]], [[3, 4, 0, 0], [4, 0, 3, 0]]], "float32")
    made = layer(capacity_factor=0.75)
    dropped = {(3, 0), (1, 1), (2, 1)}  # expert 1 has token 2 first, then token 0; expert 0 tokens 0 and 1
    expected = by_hand(made, x, lambda token, choice: (token, choice) not in dropped)
    np.testing.assert_allclose(np.asarray(made(x)).reshape(-1, EXPERTS), expected, atol=1e-6)


def test_losses_by_hand():
    made = layer(top_k=1, balance_loss=0.5, z_loss=2.0)
    x = tokens([0, 0, 0, 0], [np.log(5), 0, 0, 0])  # probabilities of a quarter each, and 5 / 8 and an eighth
    made(x, training=True)
    balance, z = (float(loss) for loss in made.losses)
    assert balance == pytest.approx(0.5 * 4 * (1 / 4 + 5 / 8) / 2)  # both choose expert 0
    assert z == pytest.approx(2 * (np.log(4) ** 2 + np.log(8) ** 2) / 2)
    made(x)
    assert not made.losses  # outside training


def test_masked_tokens_use_no_expert_and_count_for_nothing():
    made, x = layer(capacity_factor=1.0), np.random.default_rng(0).normal(size=(1, 4, EXPERTS)).astype("float32")
    whole = np.asarray(made(x[:, ::2], training=True)), float(made.losses[0])
    masked = np.asarray(made(x, mask=np.array([[True, False, True, False]]), training=True))
    assert float(made.losses[0]) == pytest.approx(whole[1])
    np.testing.assert_array_equal(masked[:, 1::2], 0.0)
    np.testing.assert_allclose(masked[:, ::2], whole[0], atol=1e-6)


def test_gradients_are_those_of_all_experts_on_all_tokens():
    made, x = layer(top_k=2, balance_loss=0.0), np.random.default_rng(0).normal(size=(2, 3, EXPERTS)).astype("float32")
    x, upstream = tf.constant(x), np.random.default_rng(1).normal(size=(2, 3, EXPERTS))

    def dense(x):
        flat = tf.reshape(x, [-1, EXPERTS])
        scores = tf.nn.softmax(flat @ made.router.value)
        best = tf.reduce_sum(tf.one_hot(tf.math.top_k(scores, 2).indices, EXPERTS), 1)
        weights = scores * best / tf.reduce_sum(scores * best, -1, keepdims=True)
        return tf.einsum("te,etd->td", weights, made.experts(tf.tile(flat[None], [EXPERTS, 1, 1])))

    found = []
    for call in (made, lambda x: tf.reshape(dense(x), tf.shape(x))):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(call(x) * upstream)
        found.append(tape.gradient(loss, [x, *(variable.value for variable in made.trainable_variables)]))
    for mine, other in zip(*found, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)


def test_the_router_stays_in_32_bits_and_the_config_comes_back():
    made = layer(dtype="mixed_bfloat16", top_k=3, capacity_factor=1.5, gated=True, z_loss=0.1, normalize=False)
    assert made.router.dtype == "float32"
    assert made(tokens([0, 1, 2, 3])).dtype == tf.bfloat16
    again = MixtureOfExperts.from_config(made.get_config())
    assert again.get_config() == made.get_config()


def test_each_expert_draws_for_itself_as_one_network_would():
    made = MixtureOfExperts(8, 32, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    made.build((None, 16))
    kernel = np.asarray(made.experts.up_kernel)
    assert np.abs(kernel).max() == pytest.approx((6 / (16 + 32)) ** 0.5, rel=0.02)
    assert not np.isclose(kernel[0], kernel[1]).any()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"num_experts": 0}, "num_experts"),
        ({"top_k": 5}, "at most `num_experts`. Received: 5 of 4"),
        ({"capacity_factor": 0.0}, "or None for no limit"),
        ({"balance_loss": -1.0}, "`balance_loss` must be 0 or more"),
    ],
)
def test_bad_settings_are_refused(how, words):
    with pytest.raises(tfgpu.InputError, match=words):
        MixtureOfExperts(**{"num_experts": 4, "intermediate_dim": 8, **how})


def model(**how):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(20, 8, mask_zero=True)(inputs)
    x = x + MixtureOfExperts(4, 12, name="experts", **how)(keras.layers.LayerNormalization()(x))
    return keras.Model(inputs, keras.layers.Dense(20)(x))


def fit(made, **how):
    """Batches of 4, 4 and 2 rows."""
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 20, (10, 5)), draw.integers(0, 20, (10, 5))
    optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, global_clipnorm=0.5)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(optimizer, loss, weighted_metrics=["accuracy"], **{"jit_compile": False, **how})
    return made.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history


SETTINGS = {
    "all": {"balance_loss": 0.5},
    "capacity": {"capacity_factor": 0.6, "z_loss": 0.1},
    "one expert a token": {"top_k": 1, "gated": True, "capacity_factor": 1.0},
}


def assert_equal(one, expected, made, history):
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, atol=1e-5, err_msg=name)
    for variable, mine, other in zip(one.weights, made.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5, err_msg=variable.path)


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_replicas_learn_what_one_device_learns(how):
    one = model(**how)
    expected = fit(one)
    for count in (2, 4):
        with tfgpu.strategies.mirrored([f"CPU:{at}" for at in range(count)]).scope():
            made = model(**how)
        assert_equal(one, expected, made, fit(made))


@pytest.mark.slow
@pytest.mark.parametrize("how", SETTINGS.values(), ids=SETTINGS)
def test_xla_compiles_it(how):
    one, made = model(**how), model(**how)
    assert_equal(one, fit(one), made, fit(made, jit_compile=True))


class Around(keras.layers.Layer):
    """A layer of the user's that holds one."""

    def __init__(self, **how):
        super().__init__()
        self.inner = MixtureOfExperts(4, 6, **how)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x, training=None):
        return x + self.inner(x, training=training)


@pytest.mark.slow
def test_a_layer_around_it_is_not_taken_for_one_that_mixes_rows(caplog):
    def around():
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6,))
        return keras.Model(inputs, keras.layers.Dense(1)(Around(capacity_factor=0.5, balance_loss=0.5)(inputs)))

    def trained(made):
        x = np.random.default_rng(0).normal(size=(10, 6)).astype("float32")
        made.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
        return made.fit(x, x[:, :1], batch_size=4, shuffle=False, verbose=0).history

    one = around()
    expected = trained(one)
    with tfgpu.strategies.mirrored(["CPU:0", "CPU:1"]).scope():
        made = around()
    assert_equal(one, expected, made, trained(made))
    assert "mixes rows of the batch" not in caplog.text


LAYOUTS = {
    "pipeline 2": {"mesh": Mesh(pipeline=2, devices=["CPU:0", "CPU:1"]), "microbatches": 2},
    "tensor 2": {"mesh": Mesh(tensor=2, devices=["CPU:0", "CPU:1"])},
    "data 2 x tensor 2": {"mesh": Mesh(data=2, tensor=2, devices=[f"CPU:{at}" for at in range(4)])},
    "zero 3": {"mesh": Mesh(data=2, devices=["CPU:0", "CPU:1"]), "zero": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_spread_model_learns_what_one_device_learns(layout):
    how = {"capacity_factor": 0.6, "balance_loss": 0.5, "z_loss": 0.1}
    one, made = model(**how), tfgpu.parallel.apply(model(**how), **layout)
    assert_equal(one, fit(one), made, fit(made))


@pytest.mark.slow
def test_parts_of_a_sequence_are_routed_together():
    def made(**sizes):
        keras.utils.set_random_seed(0)
        inputs = keras.Input((6, 8))
        outputs = MixtureOfExperts(4, 12, capacity_factor=0.5, balance_loss=0.0)(inputs)
        found = keras.Model(inputs, outputs)
        devices = [f"CPU:{at}" for at in range(2)]
        return tfgpu.parallel.apply(found, Mesh(**sizes, devices=devices)) if sizes else found

    x = np.random.default_rng(0).normal(size=(3, 6, 8)).astype("float32")
    expected, found = (each.predict(x, verbose=0) for each in (made(), made(sequence=2)))
    np.testing.assert_allclose(found, expected, atol=1e-6)


def test_the_router_leaves_the_scores_of_tokens_on_the_gpu():
    made = layer()

    def routed(x):
        with tf.device("CPU:1"):  # stands for GPU:0
            return made(x)

    traced = tf.function(routed, autograph=False).get_concrete_function(tf.TensorSpec([13, 6, EXPERTS]))
    facts = tracer.facts_of(traced, {0: "CPU:1"}, rows=13)
    assert [str(copy) for copy in facts.moved("to host", has_rows=True)] == []
