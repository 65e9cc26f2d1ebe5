"""The sharded optimizer: each replica holds and updates its own pieces, and the training is one device's."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint, SkipNaN
from tfgpu.core.state import sharded_variable
from tfgpu.parallel import memory_by_device, place, shard

RNG = np.random.default_rng(0)
Y = RNG.normal(size=(50, 1)).astype("float32")
WEIGHTS = RNG.uniform(0.5, 2.0, size=50).astype("float32")
KERNEL = 13 * 13  # 169 numbers, which no number of replicas here divides


def mlp(policy):
    inputs = keras.Input((8,))
    first = keras.layers.Dense(13, "relu", dtype=policy, name="first")(inputs)
    x = keras.layers.Dropout(0.3, dtype=policy)(first)
    x = keras.layers.Dense(13, "relu", dtype=policy, name="second", kernel_constraint="unit_norm")(x) + first
    return keras.Model(inputs, keras.layers.Dense(1, dtype="float32", name="last")(x))


def cnn(policy):
    layers = [keras.Input((6, 6, 2)), keras.layers.Conv2D(5, 3, use_bias=False), keras.layers.BatchNormalization()]
    layers += [keras.layers.ReLU(), keras.layers.Flatten(), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def transformer(policy):
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(11, 8)(inputs)
    x = x + keras.layers.MultiHeadAttention(2, 4)(keras.layers.LayerNormalization()(x), x)
    x = x + keras.layers.Dense(8)(keras.layers.Dense(16, "gelu")(keras.layers.LayerNormalization()(x)))
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x)))


def words(policy):
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(11, 5)(inputs))
    return keras.Model(inputs, keras.layers.Dense(1)(x))


ROWS = {
    mlp: RNG.normal(size=(50, 8)).astype("float32"),
    cnn: RNG.normal(size=(50, 6, 6, 2)).astype("float32"),
    transformer: RNG.integers(0, 11, size=(50, 6)),
    words: RNG.integers(0, 11, size=(50, 6)),
}


def on(replicas):
    if replicas == 1:
        return tfgpu.strategy("one_device", devices="CPU:0")
    return tfgpu.strategy("mirrored", devices=[f"CPU:{4 - replicas + at}" for at in range(replicas)])


def made(make=mlp, replicas=1, policy="float32", kind="AdamW", jit=False, how=None, **options):
    strategy = on(replicas)
    with strategy.scope():
        keras.utils.set_random_seed(1)
        model = make(policy)
    if how is not None:
        model = shard(model, **how)
    with strategy.scope():
        optimizer = getattr(keras.optimizers, kind)(0.01, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, dynamic_growth_steps=6)
    model.compile(optimizer, "mse", metrics=["mae"], jit_compile=jit)
    return model


def fit(model, make=mlp, *callbacks, epochs=5):
    """20 steps; the last of each 4 has 2 rows."""
    x, arguments = ROWS[make], dict(epochs=epochs, shuffle=False, verbose=0, callbacks=list(callbacks))
    return model.fit(x, Y, 16, sample_weight=WEIGHTS, validation_data=(x, Y), **arguments).history


def assert_close(one, other, tolerance=1e-5):
    for mine, others in zip(one.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_allclose(mine, others, atol=tolerance)


def build(model):
    with model.distribute_strategy.scope():
        model.optimizer.build(model.trainable_variables)


def slots(model, name="velocity"):
    return [v for v in model.optimizer.variables if v.path.endswith(name)]


CASES = {
    "mlp": {},
    "cnn": {"make": cnn, "global_clipnorm": 0.1},
    "transformer": {"make": transformer, "global_clipnorm": 0.1, "use_ema": True},
    "words": {"make": words},
    "words, clipnorm": {"make": words, "clipnorm": 0.1},
    "words, accumulation": {"make": words, "gradient_accumulation_steps": 2},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "accumulation": {"gradient_accumulation_steps": 3, "global_clipnorm": 0.1},
    "averages": {"use_ema": True, "ema_momentum": 0.9, "ema_overwrite_frequency": 3},
    "float16": {"policy": "mixed_float16", "global_clipnorm": 0.5},
    "float16, accumulation": {"policy": "mixed_float16", "gradient_accumulation_steps": 2},
    "bfloat16": {"policy": "mixed_bfloat16"},
    "momentum": {"kind": "SGD", "momentum": 0.9, "nesterov": True},
    "lion": {"kind": "Lion"},
    "slots that begin with the weights": {"kind": "ScheduleFreeAdamW"},
}
HOWS = {
    "1": {"stage": 1},
    "2": {"stage": 2},
    "offload": {"stage": 2, "offload": True},
    "3": {"stage": 3},
    "3, offload": {"stage": 3, "offload": True},
}
FAST = ("mlp", "2", 3), ("transformer", "1", 2), ("words, clipnorm", "3", 3)
TRIALS = [(case, how, 4 - at % 3) for case in CASES for at, how in enumerate(HOWS)] + list(FAST)


@functools.cache
def trained(case, replicas):
    options = dict(CASES[case])
    model = made(replicas=replicas, **options)
    return model, fit(model, options.get("make", mlp))


@pytest.mark.sample("mlp-2-3")
@pytest.mark.parametrize(
    ("case", "how", "replicas"),
    [pytest.param(*trial, marks=() if trial in FAST else pytest.mark.slow) for trial in dict.fromkeys(TRIALS)],
)
def test_the_training_is_one_devices(case, how, replicas):
    options, replicas = dict(CASES[case]), 2 if "offload" in how else replicas
    # 16-bit rounding differs with the replicas' sums: those are held against plain replicas.
    one, expected = trained(case, 1) if "policy" not in options else trained(case, replicas)
    model = made(replicas=replicas, how=HOWS[how], **options)
    history = fit(model, options.get("make", mlp))
    tolerance = 1e-4 if "policy" in options else 1e-5
    assert_close(one, model, tolerance)
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=tolerance)
    x = ROWS[options.get("make", mlp)]
    np.testing.assert_allclose(one.predict(x, verbose=0), model.predict(x, verbose=0), atol=10 * tolerance)
    np.testing.assert_allclose(one.evaluate(x, Y, verbose=0), model.evaluate(x, Y, verbose=0), rtol=10 * tolerance)


def test_each_replica_holds_its_part_of_the_slots():
    model = made(replicas=3, how={"stage": 2}, use_ema=True, gradient_accumulation_steps=2)
    build(model)
    sizes = [-(-int(np.prod(v.shape)) // 3) for v in model.trainable_variables]
    for name in ("momentum", "velocity", "average", "gradient_accumulator"):
        assert [[copy.shape[0] for copy in v.value.values] for v in slots(model, name)] == [[n] * 3 for n in sizes]
    found = memory_by_device(model)
    assert found.keys() == {"CPU:1", "CPU:2", "CPU:3"}
    counters = 8 + 4  # iterations and learning rate
    weights = sum(4 * int(np.prod(v.shape)) for v in model.trainable_variables)
    seeds = sum(int(np.prod(v.shape)) * v.value.dtype.size for v in model.non_trainable_variables)
    for kinds in found.values():
        assert kinds["optimizer"] == 4 * 4 * sum(sizes) + counters
        assert kinds["pieces"] == 4 * sum(sizes)
        assert kinds["weights"] >= weights + seeds


@pytest.mark.slow
def test_with_offload_no_slot_takes_a_devices_memory():
    model = made(replicas=2, how={"stage": 1, "offload": True})
    fit(model, epochs=1)
    found = memory_by_device(model)
    sizes = [-(-int(np.prod(v.shape)) // 2) for v in model.trainable_variables]
    assert found["CPU:0"]["optimizer"] == 2 * 2 * 4 * sum(sizes)  # both replicas' momentum and velocity
    assert {found[device]["optimizer"] for device in ("CPU:2", "CPU:3")} == {8 + 4}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_what_a_step_sends(stage):
    model = made(replicas=3, how={"stage": stage})
    fit(model, epochs=1)
    sizes = [int(np.prod(v.shape)) for v in model.trainable_variables]
    pieces = sum(-(-size // 3) for size in sizes)
    gradients = sum(sizes) if stage == 1 else 3 * pieces
    plain = made(replicas=3)
    fit(plain, epochs=1)
    sent, before = (each.train_function.traffic.bytes / each.train_function.done for each in (model, plain))
    assert sent - before == 4 * (gradients + pieces - sum(sizes))


@pytest.mark.slow
@pytest.mark.parametrize(("batches", "count"), [(None, 2), (2, 0)])
def test_with_accumulation_variables_are_gathered_at_updates_alone(batches, count):
    model = made(replicas=2, how={"stage": 2}, gradient_accumulation_steps=batches)
    build(model)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x))
        found = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(found, model.trainable_variables, strict=True))

    strategy = model.distribute_strategy
    graph = tf.function(lambda x: strategy.run(step, args=(x,))).get_concrete_function(tf.ones((1, 8))).graph
    assigned = [op.inputs[1].shape for op in graph.get_operations() if op.type == "AssignVariableOp"]
    assert assigned.count(model.get_layer("first").kernel.shape) == count  # else in a branch


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second", "stages"), [(4, 1, 22), (1, 4, 22), (4, 2, 22), (4, 1, 33), (2, 4, 31)])
@pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 3, "use_ema": True}], ids=["plain", "waiting"])
def test_a_checkpoint_of_one_layout_resumes_in_another(first, second, stages, options, tmp_path):
    one = made(**options)
    fit(one)
    for replicas, epochs, stage in ((first, 2, stages // 10), (second, 5, stages % 10)):
        model = made(replicas=replicas, how={"stage": stage} if replicas > 1 else None, **options)
        fit(model, mlp, Checkpoint(tmp_path / "run"), epochs=epochs)
    assert_close(one, model)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_saved_is_an_ordinary_file(stage, tmp_path):
    one, model = made(global_clipnorm=0.1), made(replicas=4, how={"stage": stage}, global_clipnorm=0.1)
    fit(one, epochs=2), fit(model, epochs=2)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_close(one, loaded)
    for mine, others in zip(loaded.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), others.numpy(), atol=1e-5, err_msg=others.path)
    again, store = made(replicas=3, how={"stage": 2 if stage == 1 else 3}, global_clipnorm=0.1), {}
    build(again)
    again.load_weights(tmp_path / "model.keras")
    loaded.optimizer.save_own_variables(store)
    again.optimizer.load_own_variables({name: np.array(value) for name, value in store.items()})
    found = sharded_variable.merged(again.optimizer.variables)
    for mine, others in zip(found, loaded.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), others.numpy())
    fit(one, epochs=1), fit(model, epochs=1)
    assert_close(one, model)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tensorflows_checkpoint_is_one_devices(stage, tmp_path):
    one, model, again = made(), made(replicas=3, how={"stage": stage}), made(replicas=2, how={"stage": stage})
    fit(one, epochs=1)
    path = tf.train.Checkpoint(model=one).save(str(tmp_path / "one"))
    fit(model, epochs=2), fit(again, epochs=1)
    tf.train.Checkpoint(model=model).restore(path).assert_consumed()
    path = tf.train.Checkpoint(model=model).save(str(tmp_path / "many"))
    tf.train.Checkpoint(model=again).restore(path).assert_consumed()
    for each in (model, again):
        for mine, others in zip(each.get_weights(), one.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, others)
        found = sharded_variable.merged(each.optimizer.variables)
        for mine, others in zip(found, one.optimizer.variables, strict=True):
            np.testing.assert_array_equal(mine.numpy(), others.numpy())


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_assignments_count(stage):
    one, model = made(), made(replicas=3, how={"stage": stage})
    for each in (one, model):
        fit(each, epochs=1)
        each.set_weights([weight / 2 for weight in each.get_weights()])
        fit(each, epochs=1)
    assert_close(one, model)


@pytest.mark.slow
@pytest.mark.parametrize(("by", "stage"), [("name", 1), ("variable", 1), ("variable", 3)])
def test_weight_decay_respects_exclusions(by, stage):
    models = made(weight_decay=0.5), made(replicas=2, how={"stage": stage}, weight_decay=0.5)
    for model in models:
        if by == "name":
            model.optimizer.exclude_from_weight_decay(var_names=["bias"])
        else:
            model.optimizer.exclude_from_weight_decay(var_list=[model.get_layer("second").kernel])
        fit(model, epochs=1)
    assert_close(*models)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_averages_are_swapped_in_for_evaluation(stage):
    how = {"stage": stage}
    models = made(use_ema=True, ema_momentum=0.5), made(replicas=2, how=how, use_ema=True, ema_momentum=0.5)
    histories = [fit(model, mlp, keras.callbacks.SwapEMAWeights(swap_on_epoch=True), epochs=3) for model in models]
    np.testing.assert_allclose(histories[0]["val_loss"], histories[1]["val_loss"], rtol=1e-5)
    assert_close(*models)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_model_on_several_devices_is_sharded_where_its_layers_are(stage):
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        keras.utils.set_random_seed(1)
        model = mlp("float32")
    model = shard(place(model, {"first": ("CPU:0", "CPU:1"), "*": ("CPU:2", "CPU:3")}), stage)
    with model.distribute_strategy.scope():
        model.compile(keras.optimizers.AdamW(0.01), "mse", metrics=["mae"])
    fit(model)
    assert_close(trained("mlp", 1)[0], model)
    for slot, variable in zip(slots(model), model.trainable_variables, strict=True):
        assert [copy.device for copy in slot.value.values] == [copy.device for copy in variable.value.values]
        size = -(-int(np.prod(variable.shape)) // 2) if stage == 2 else variable.shape[0]
        assert {copy.shape[0] for copy in slot.value.values} == {size}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_a_batch_of_nan_is_undone_on_all(stage):
    x = ROWS[mlp].copy()
    x[17] = np.nan
    models = made(global_clipnorm=0.1), made(replicas=3, how={"stage": stage}, global_clipnorm=0.1)
    for model in models:
        model.fit(x, Y, 16, epochs=2, shuffle=False, verbose=0, callbacks=[SkipNaN()])
    assert np.isfinite(models[0].get_weights()[0]).all()
    assert_close(*models)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_overflow_on_one_replica_skips_the_batch_on_all(stage):
    x = ROWS[mlp].copy()
    x[17] = 6e4
    models = made(policy="mixed_float16"), made(replicas=3, how={"stage": stage}, policy="mixed_float16")
    for model in models:
        model.fit(x, Y, 16, epochs=2, shuffle=False, verbose=0)
    assert models[0].optimizer.dynamic_scale.numpy() == models[1].optimizer.dynamic_scale.numpy() < 2**15
    assert models[0].optimizer.iterations.numpy() == models[1].optimizer.iterations.numpy() < 8
    assert_close(*models, 2e-3)


@pytest.mark.parametrize(
    ("kind", "stage"), [("written by hand", 2), ("eagerly", 2), ("XLA", 2), ("written by hand", 3), ("eagerly", 3)]
)
@pytest.mark.slow
def test_other_ways_to_run_a_step(kind, stage):
    is_xla = kind == "XLA"  # which draws random numbers of its own
    one = made(replicas=2 if is_xla else 1, jit=is_xla)
    model = made(replicas=2, how={"stage": stage}, jit=is_xla)
    if kind == "eagerly":
        model.run_eagerly = True
    if kind != "written by hand":
        fit(one, epochs=1), fit(model, epochs=1)
        assert_close(one, model)
        return
    x, y = ROWS[mlp][:16], Y[:16]
    for each in (one, model):
        strategy = each.distribute_strategy
        data = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors((x, y)).unbatch().batch(16))

        @tf.function
        def train(batch, each=each, strategy=strategy):
            def step(rows, labels):
                with tf.GradientTape() as tape:
                    loss = tf.reduce_sum((each(rows, training=False) - labels) ** 2) / 16
                found = tape.gradient(loss, each.trainable_variables)
                each.optimizer.apply_gradients(zip(found, each.trainable_variables, strict=True))

            strategy.run(step, args=batch)

        for batch in data:
            train(batch)
    assert_close(one, model)


class Halving(keras.optimizers.Optimizer):
    """Element by element."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, tf.sign(gradient) * tf.cast(learning_rate, gradient.dtype))


class Normed(keras.optimizers.Optimizer):
    """By each variable's norm."""

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient / tf.norm(gradient) * tf.cast(learning_rate, gradient.dtype))


class NormedTogether(keras.optimizers.SGD):
    """By the norm of all gradients, before Keras sees them."""

    def apply(self, grads, trainable_variables=None):
        norm = tf.linalg.global_norm(grads)
        return super().apply([gradient / norm for gradient in grads], trainable_variables)


@pytest.mark.slow
def test_a_custom_optimizer_is_tried():
    models = [made(), made(replicas=2, how={"stage": 2})]
    for model in models:
        with model.distribute_strategy.scope():
            model.compile(Halving(0.01), "mse")
        fit(model, epochs=1)
    assert_close(*models)
    sizes = {copy.shape for shard in model.optimizer._trainable_variables for copy in shard.value.values}
    assert all(len(size) == 1 for size in sizes)  # in pieces: test_dealt_variables.py has the others


@pytest.mark.sample(4)
@pytest.mark.parametrize(
    "kind", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD"]
)
def test_the_others_are_taken(kind):
    model = made(replicas=2, how={"stage": 1}, kind=kind)
    build(model)
    assert model.optimizer.built


def test_on_one_device_there_is_nothing_to_shard(caplog):
    model = made(how={"stage": 3})
    assert "One device holds all" in caplog.text
    assert memory_by_device(model)["CPU:0"]["pieces"] == 0
    with pytest.raises(tfgpu.InputError, match="to offload from one device"):
        made(how={"stage": 2, "offload": True})


def test_what_cannot_be_sharded_is_refused():
    with pytest.raises(tfgpu.InputError, match="this model has none"):
        shard(mlp("float32"))
    model = made(replicas=2, how={"stage": 1})
    with pytest.raises(tfgpu.InputError, match="is already sharded"):
        shard(model)
    with pytest.raises(tfgpu.InputError, match="`stage` must be 1"):
        shard(model, stage=4)
    model = made(replicas=2)
    fit(model, epochs=1)
    with pytest.raises(tfgpu.InputError, match="Shard the model before `compile`"):
        shard(model)
    with on(2).scope():
        model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(tfgpu.InputError, match="Build it first"):
        shard(model)
    with tfgpu.strategy("averaging", devices=["CPU:0", "CPU:1"]).scope():
        model = mlp("float32")
    with pytest.raises(tfgpu.InputError, match="each need a whole optimizer"):
        shard(model)
    with on(2).scope():
        model = shard(mlp("float32"))
        optimizer = keras.optimizers.Adam()
        more = keras.Variable(np.zeros(3), name="more")
        with pytest.raises(tfgpu.InputError, match="'more' was made after"):
            optimizer.build([*model.trainable_variables, more])
