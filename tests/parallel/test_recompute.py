"""A model with recomputed activations learns the same weights and keeps less memory."""

import contextlib
import itertools
import json
import os
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfgpu
from tfgpu.callbacks import Checkpoint
from tfgpu.parallel import pipeline, place, recompute
from tfgpu.parallel.rematerialization import budget

ROWS, BATCH = 50, 16  # the last batch has 2 rows
WEIGHTS = np.random.default_rng(0).uniform(0.5, 2.0, ROWS).astype("float32")


def mlp():
    """Connections around layers, dropout, noise without a seed of its own, a loss that a layer adds."""
    inputs = keras.Input((8,))
    first = keras.layers.Dense(16, "relu", name="first")(inputs)
    x = keras.layers.Dropout(0.3, name="drop")(first)
    added = "l2" if keras.config.dtype_policy().name == "float32" else None  # in float16 Keras fails with it
    x = keras.layers.Dense(16, "relu", name="second", activity_regularizer=added)(x)
    x = keras.layers.GaussianNoise(0.1, name="noise")(x) + first
    x = keras.layers.Dense(16, "relu", name="third")(x)
    x = keras.layers.Dropout(0.3, name="drop_again")(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="last", dtype="float32")(x))


def cnn():
    return tfgpu.models.cnn((8, 8, 1), 4, filters=(4, 8), convolutions=2, units=8, dropout=0.2)


def transformer():
    return tfgpu.models.transformer((6,), 4, width=8, heads=2, depth=2, dropout=0.1, attention_dropout=0.1)


def masked():
    inputs = keras.Input((6,), dtype="int32")
    x = keras.layers.Embedding(5, 8, mask_zero=True, name="ids")(inputs)
    x = keras.layers.Dropout(0.2)(keras.layers.LSTM(8, return_sequences=True, name="lstm")(x))
    return keras.Model(inputs, keras.layers.Dense(4, name="last")(x))


def nested():
    inner = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, "tanh", name=f"in_{i}") for i in range(3))])
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(4)(keras.layers.Dropout(0.1)(inner(inputs))))


class Own(keras.Model):
    """Its call is Python."""

    def __init__(self):
        super().__init__()
        self.body, self.drop = keras.layers.Dense(8, "gelu", name="body"), keras.layers.Dropout(0.2, name="drop")
        self.norm, self.head = keras.layers.BatchNormalization(), keras.layers.Dense(4, name="head")

    def call(self, x, training=None):
        return self.head(self.norm(self.drop(self.body(x), training=training), training=training))


def own():
    model = Own()
    model.build((None, 8))
    return model


SHAPES = {mlp: ((8,), ()), cnn: ((8, 8, 1), ()), nested: ((8,), ()), own: ((8,), ())}


def data_for(make):
    rng = np.random.default_rng(1)
    if make in SHAPES:
        shape, positions = SHAPES[make]
        return rng.normal(size=(ROWS, *shape)).astype("float32"), rng.integers(0, 4, (ROWS, *positions))
    return rng.integers(0, 4, (ROWS, 6)).astype("int32"), rng.integers(0, 4, (ROWS, 6))


def trained(
    make, change=lambda model: None, *, epochs=5, policy="float32", jit=False, replicas=None, callbacks=(), **options
):
    """Five epochs of four batches; the model and its history."""
    tfgpu.repair_keras()
    keras.utils.set_random_seed(1)
    scope = tfgpu.strategy("mirrored", devices=replicas).scope() if replicas else contextlib.nullcontext()
    with tfgpu.precision.use(policy):
        with scope:
            model = make()
        change(model)
        with model.distribute_strategy.scope() if model.distribute_strategy else tf.device(None):
            optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=True, **options)
            if policy == "mixed_float16":
                optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=jit)
    x, y = data_for(make)
    more = {"sample_weight": WEIGHTS} if y.ndim == 1 else {}
    more |= {"validation_data": (x, y), "callbacks": list(callbacks)}
    return model, model.fit(x, y, BATCH, epochs=epochs, shuffle=False, verbose=0, **more).history


def assert_equal(make, found, expected, tolerance=1e-5):
    (model, history), (one, one_history) = found, expected
    for name, values in one_history.items():
        np.testing.assert_allclose(history[name], values, rtol=10 * tolerance, atol=tolerance, err_msg=name)
    for mine, other in zip(model.variables, one.variables, strict=True):
        if "seed_generator" not in mine.path:
            np.testing.assert_allclose(mine.numpy(), other.numpy(), atol=tolerance, err_msg=mine.path)
    x, _ = data_for(make)
    np.testing.assert_allclose(model.predict(x, verbose=0), one.predict(x, verbose=0), atol=10 * tolerance)


CASES = {
    "mlp by name": (mlp, ["first", "dr*", "second", "noise"], {}),
    "mlp by layer": (mlp, "layers", {}),
    "mlp in blocks": (mlp, "blocks", {}),
    "cnn in blocks": (cnn, "blocks", {}),
    "cnn by layer": (cnn, "layers", {}),
    "transformer in blocks": (transformer, "blocks", {}),
    "mask": (masked, "blocks", {}),
    "nested by name": (nested, ["sequential*/in_[01]"], {}),
    "nested in one": (nested, ["sequential*"], {}),
    "subclassed": (own, ["body", "drop", "batch_norm*"], {}),
    "accumulation": (mlp, "blocks", {"gradient_accumulation_steps": 2}),
    "float16": (mlp, "blocks", {"policy": "mixed_float16"}),
    "bfloat16": (cnn, "blocks", {"policy": "mixed_bfloat16"}),
    "xla": (transformer, "blocks", {"jit": True}),
}
FAST = ("mlp by name",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "where", "how"),
    [pytest.param(*case, id=name, marks=[] if name in FAST else pytest.mark.slow) for name, case in CASES.items()],
)
def test_what_is_learned_stays(make, where, how):
    tolerance = 2e-3 if "16" in how.get("policy", "") else 1e-5
    assert_equal(make, trained(make, lambda m: recompute(m, where), **how), trained(make, **how), tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("make", [mlp, cnn])
def test_on_replicas(make):
    assert_equal(make, trained(make, lambda m: recompute(m, "blocks"), replicas=2), trained(make, replicas=2))


@pytest.mark.slow
@pytest.mark.parametrize("first", ["place", "recompute"])
def test_in_a_placed_model(first):
    def change(model):
        steps = [
            lambda: place(model, {"first": "CPU:0", "drop*": "CPU:0", "*": "CPU:1"}),
            lambda: recompute(model, "blocks"),
        ]
        for step in steps if first == "place" else steps[::-1]:
            step()

    assert_equal(mlp, trained(mlp, change), trained(mlp))


def forward_operations(model, x, kinds=("MatMul", "Conv2D")):
    """How often a training step multiplies as a forward pass does; a gradient's MatMul has a side turned."""

    @tf.function(autograph=False)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return [g for g in tape.gradient(loss, model.trainable_variables) if g is not None]

    operations = step.get_concrete_function(tf.constant(x)).graph.get_operations()
    turned = lambda op: op.type == "MatMul" and (op.get_attr("transpose_a") or op.get_attr("transpose_b"))  # noqa: E731
    return sum(op.type in kinds and not turned(op) for op in operations)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("make", "where", "more"),
    [
        (mlp, ["second", "third"], 2),
        (mlp, "layers", 4),
        (cnn, ["stage1_conv*", "stage2_conv1"], 3),
        (nested, ["sequential*/in_1"], 1),
        (nested, ["sequential*"], 3),
        (own, ["body"], 1),
    ],
)
def test_as_many_operations_more_as_were_asked_for(make, where, more):
    tfgpu.repair_keras()
    x, _ = data_for(make)
    assert forward_operations(recompute(make(), where), x) == forward_operations(make(), x) + more


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_blocks_run_each_of_their_operations_once_more(make):
    tfgpu.repair_keras()
    x, _ = data_for(make)
    facts = budget.measure(make(), rows=BATCH)
    parts = budget.smallest(facts, [sum(own.values()) for own in facts.own])
    anew = [call for begin, end, again in parts if again for call in facts.calls[begin:end]]
    more = sum(isinstance(call.operation, (keras.layers.Dense, keras.layers.Conv2D)) for call in anew)
    assert more
    found = forward_operations(recompute(make(), "blocks", rows=BATCH), x)
    assert found == forward_operations(make(), x) + more


@pytest.mark.sample(4)
@pytest.mark.parametrize("make", [mlp, cnn, transformer, masked])
@pytest.mark.parametrize("share", [0.4, 0.6, 0.8, 1.0])
def test_a_budget_is_kept_in_what_is_predicted(make, share):
    facts = budget.measure(make(), rows=BATCH)
    plain = facts.peak([(0, len(facts.calls), False)])
    seconds = [1.0] * len(facts.calls)
    parts = budget.cheapest(facts, seconds, int(plain * share))
    least = facts.peak(budget.smallest(facts, seconds))
    if parts is None:
        assert plain * share < least * 1.01
    else:
        assert facts.peak(parts) <= plain * share
        assert parts[0][0] == 0 and parts[-1][1] == len(facts.calls)
        assert all(one[1] == other[0] for one, other in zip(parts, parts[1:], strict=False))
        assert any(anew for *_, anew in parts) == (share < 1)


def test_the_cheapest_of_all_ways():
    """Against each way to cut and to choose, of a model of a few layers."""
    layers = [keras.layers.Dense(width, "relu", name=f"d{width}") for width in (40, 8, 32, 16, 24)]
    facts = budget.measure(keras.Sequential([keras.Input((4,)), *layers]), rows=4)
    seconds, count = [5.0, 1.0, 4.0, 2.0, 3.0], 5
    ways = []
    for cuts in itertools.product([False, True], repeat=count - 1):
        places = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), count]
        for anew in itertools.product([False, True], repeat=len(places) - 1):
            parts = tuple(zip(places, places[1:], anew, strict=False))
            ways.append((facts.peak(parts), sum(sum(seconds[b:e]) for b, e, again in parts if again)))
    for limit in range(min(ways)[0], max(ways)[0], 64):
        best = min(lost for peak, lost in ways if peak <= limit)
        parts = budget.cheapest(facts, seconds, limit)
        assert parts is not None
        assert facts.peak(parts) <= limit
        assert sum(sum(seconds[b:e]) for b, e, again in parts if again) == best


PEAK = """
import ctypes, json, pathlib, sys, keras, numpy as np, tfgpu
from tfgpu.parallel.rematerialization import budget
rows, memory = int(sys.argv[1]), sys.argv[2]
tfgpu.repair_keras()
keras.utils.set_random_seed(0)
model = tfgpu.models.transformer((256,), 64, width=64, depth=4, dropout=0.1)
if memory:
    tfgpu.parallel.recompute(model, "auto", memory=int(memory), rows=rows)
model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False)
x = np.random.default_rng(0).integers(0, 64, (rows, 256))
def held(what):
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(what)))
model.fit(x, x, rows, verbose=0)  # TensorFlow needs memory of its own to optimize the graph
ctypes.CDLL("libc.so.6").malloc_trim(0)
pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = held("VmRSS")
model.fit(x, x, rows, epochs=2, verbose=0)
peak = held("VmHWM") - before
facts = budget.measure(tfgpu.models.transformer((256,), 64, width=64, depth=4, dropout=0.1), rows=rows)
print(json.dumps([peak, facts.peak([(0, len(facts.calls), False)])]))
"""


def peak_of(rows: int, memory: int | str = "") -> list[int]:
    command = [sys.executable, "-c", PEAK, str(rows), str(memory)]
    freed = dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "131072")  # is given back at once
    freed["TF_ENABLE_ONEDNN_OPTS"] = "0"  # With AVX-512, oneDNN's allocator keeps it.
    done = subprocess.run(command, env={**os.environ, **freed}, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_bytes_of_a_process_stay_within_the_budget():
    plain, predicted = peak_of(16)
    limit = predicted // 3
    least, _ = peak_of(16, limit)
    print([f"{size / 2**20:.0f} MiB" for size in (plain, predicted, limit, least)])
    assert plain > 0.8 * predicted
    assert least < 1.3 * limit


@pytest.mark.slow
def test_it_saves_an_ordinary_model_and_resumes(tmp_path):
    plain, _ = trained(mlp, epochs=4)
    change = lambda model: recompute(model, "blocks")  # noqa: E731
    trained(mlp, change, epochs=2, callbacks=[Checkpoint(tmp_path / "run")])
    model, _ = trained(mlp, change, epochs=4, callbacks=[Checkpoint(tmp_path / "run")])
    for mine, other in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    model.save(tmp_path / "model.keras")
    script = (
        "import sys, keras\nm = keras.saving.load_model(sys.argv[1])\nprint(m.count_params(), 'tfgpu' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "model.keras"], capture_output=True, text=True, timeout=550
    )
    assert done.stdout.split() == [str(model.count_params()), "False"], done.stderr[-2000:]
    opened = keras.models.load_model(tmp_path / "model.keras")
    x, _ = data_for(mlp)
    np.testing.assert_allclose(opened.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)


def compiled(make):
    model = make()
    model.compile("sgd", "mse")
    return model


def staged():
    return pipeline(mlp(), 2, 2, cuts=["third"])


@pytest.mark.sample(8)
@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (mlp, ("block",), "`where` must be 'layers', 'blocks', 'auto' or a list"),
        (mlp, ([],), "names no layer"),
        (mlp, (["thrid"],), "No layer of .* is called 'thrid'. There are third"),
        (mlp, ("auto",), "needs `memory`"),
        (mlp, ("auto", {"memory": "much"}), "A size of memory is a number with a unit"),
        (mlp, ("blocks", {"memory": "1MB"}), "other values of `where` take none"),
        (mlp, ("layers", {"rows": 8}), "`rows` and `batch` are for"),
        (mlp, ("blocks", {"rows": 0}), "`rows` must be a whole number"),
        (mlp, ("auto", {"memory": 2000, "rows": 64}), r"Nothing fits: 64 rows of .* Use \d+ row.s. at most"),
        (own, ("blocks",), "has no graph to split"),
        (Own, ("layers",), "is not built"),
        (lambda: compiled(mlp), ("blocks",), "before `compile`"),
        (lambda: recompute(mlp(), "blocks"), (["first"],), "already given to `recompute`"),
        (lambda: recompute(mlp(), ["first"]), ("layers",), "already given to `recompute`"),
        (staged, ("layers",), "is a pipeline"),
    ],
)
def test_bad_input(make, arguments, message):
    where, options = arguments[0], dict(*arguments[1:])
    with pytest.raises(tfgpu.InputError, match=message):
        recompute(make(), where, **options)


def of_any_length():
    inputs = keras.Input((None, 4))
    x = keras.layers.Dense(8, "relu", name="first")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="last")(keras.layers.Dense(8, "relu", name="second")(x)))


@pytest.mark.parametrize("options", [("blocks", {}), ("auto", {"memory": "1MB"})], ids=["blocks", "auto"])
def test_a_batch_says_the_size_of_an_input_also_in_a_strategys_scope(options):
    where, more = options
    with tfgpu.strategy("mirrored", devices=["CPU:0", "CPU:1"]).scope():
        with pytest.raises(tfgpu.InputError, match="Give a `batch`"):
            recompute(of_any_length(), where, **more)
        model = recompute(of_any_length(), where, batch=np.zeros((8, 6, 4), "float32"), **more)
        model.compile("sgd", "mse")
    x = np.ones((8, 6, 4), "float32")
    assert np.isfinite(model.fit(x, x, 4, verbose=0).history["loss"]).all()


@pytest.mark.parametrize("where", ["blocks", ["first"]])
def test_a_pipeline_refuses_a_recomputed_model(where):
    with pytest.raises(tfgpu.InputError, match="already given to `recompute`"):
        pipeline(recompute(mlp(), where), 2, 2, cuts=["third"])
