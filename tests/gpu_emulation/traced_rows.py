"""The rows of the table: which step each traces, and what it says of it."""

import contextlib
import math
from collections import Counter
from dataclasses import dataclass

import fake_nccl
import gpu_way
import keras
import tensorflow as tf
import tracer
from placer import HOST
from step_facts import Collective, Copy, StepFacts
from traced_models import MODELS, ROWS

import tfgpu
from tfgpu.errors import MachineError

REPLICAS = {"one": 1, "mirrored-2": 2, "mirrored-8": 8, "workers-2x4": 8}
_PAIR = ["CPU:1", "CPU:2"]
_CUTS = {"microbatches": 2, "cuts": ["layer_normalization"]}


def _mesh(**sizes: int) -> tfgpu.parallel.Mesh:
    count = math.prod(sizes.values())
    return tfgpu.parallel.Mesh(**sizes, devices=[f"CPU:{number + 1}" for number in range(count)])


SPREAD = {
    "tensor": lambda model: tfgpu.parallel.tensor(model, devices=_PAIR),
    "pipeline": lambda model: tfgpu.parallel.pipeline(model, 2, 2, devices=_PAIR, cuts=["layer_normalization"]),
    "sequence": lambda model: tfgpu.parallel.apply(model, _mesh(sequence=2)),
    "data-tensor": lambda model: tfgpu.parallel.apply(model, _mesh(data=2, tensor=2)),
    "data-pipeline": lambda model: tfgpu.parallel.apply(model, _mesh(data=2, pipeline=2), **_CUTS),
    "data-sequence": lambda model: tfgpu.parallel.apply(model, _mesh(data=2, sequence=2)),
    "expert": lambda model: tfgpu.parallel.apply(model, _mesh(expert=2)),
    "place": lambda model: tfgpu.parallel.place(model, {"dense*": "CPU:2", "*": "CPU:1"}),
}
"""Options that spread a model of no strategy over GPUs; with `data`, two copies of it, over four."""
RAGGED = ("padded", "padded_vectors", "bags", "sparse")
"""Models of ragged and sparse rows, whose gradients have another number of slices in each batch."""
BATCHES = 4
WHOLE = "between devices, other bytes"


@dataclass(frozen=True)
class Row:
    """One traced step.

    Attributes:
        model: of `traced_models.MODELS`.
        strategy: of `REPLICAS`.
        path: `fit`, `loop` (a hand-written one), `evaluate` or `predict`.
        precision: a dtype policy of Keras.
        rows: `even`: static batches that divide evenly; `rest`: batches of any size.
        option: `accumulation`, `xla`, `zero-1` to `zero-3`, `hierarchical` (also `hierarchical-zero-2`), `recompute`,
            `bfloat16-gradients`, `packs` (small), `replica-moments` (of BatchNormalization), one of `SPREAD` or "".
        fast: in `make test`.
    """

    model: str
    strategy: str = "mirrored-2"
    path: str = "fit"
    precision: str = "float32"
    rows: str = "even"
    option: str = ""
    fast: bool = False

    def __str__(self):
        parts = self.path, self.model, self.strategy, self.precision, self.rows, self.option
        return " ".join(part for part in parts if part)


_EACH = [model for model in MODELS if model != "experts"]
_ALL = [Row(model, strategy) for strategy in ("one", "mirrored-2") for model in _EACH]
_ALL += [Row(model, "mirrored-8") for model in ("cnn", "language", "embeddings")]
_ALL += [Row(model, "workers-2x4") for model in ("cnn", "language", "embeddings", "own_loss", "gan")]
_ALL += [Row(model, "mirrored-2", path) for model in ("cnn", "language") for path in ("loop", "evaluate", "predict")]
_ALL += [Row("language", "one", "evaluate"), Row("language", "one", "predict")]
_ALL += [Row("cnn", "workers-2x4", path) for path in ("loop", "evaluate")]
_ALL += [Row(model, "mirrored-2", rows="rest") for model in _EACH if model not in RAGGED or model == "sparse"]
_ALL += [Row("cnn", strategy, rows="rest") for strategy in ("one", "workers-2x4")]
_ALL += [Row("cnn", "mirrored-2", precision=name) for name in ("mixed_float16", "mixed_bfloat16")]
_ALL += [Row("language", "mirrored-2", precision="mixed_float16")]
_ALL += [Row("cnn", "workers-2x4", precision=name) for name in ("mixed_float16", "mixed_bfloat16")]
_ALL += [
    Row("cnn", strategy, option=option)
    for strategy in ("mirrored-2", "workers-2x4")
    for option in ("accumulation", "zero-2", "zero-3", "bfloat16-gradients")
]
_ALL += [Row("cnn", "mirrored-2", option="xla"), Row("cnn", "mirrored-2", option="recompute")]
_ALL += [Row("cnn", "one", option="xla"), Row("embeddings", "mirrored-2", option="accumulation")]
_ALL += [Row("cnn", "workers-2x4", precision="mixed_bfloat16", option="zero-3")]
_ALL += [Row(model, strategy) for strategy in ("mirrored-8", "workers-2x4") for model in ("two_outputs",)]
_ALL += [Row(model, "mirrored-8") for model in ("own_loss", "gan")]
_ALL += [Row("embeddings", "mirrored-2", path) for path in ("loop", "evaluate", "predict")]
_ALL += [Row(model, "mirrored-2", path) for model in ("two_outputs", "own_loss") for path in ("evaluate", "predict")]
_ALL += [Row("gan", "mirrored-2", "predict")]
_ALL += [Row("cnn", "one", path) for path in ("loop", "evaluate", "predict")] + [Row("cnn", "workers-2x4", "predict")]
_ALL += [
    Row(model, "mirrored-2", precision=name)
    for name in ("mixed_float16", "mixed_bfloat16")
    for model in ("language", "embeddings", "two_outputs", "own_loss")
    if (model, name) != ("language", "mixed_float16")
]
_ALL += [Row("cnn", "one", precision=name) for name in ("mixed_float16", "mixed_bfloat16")]
_ALL += [Row("embeddings", "workers-2x4", precision="mixed_float16")]
_ALL += [Row("language", "mirrored-2", option=option) for option in ("accumulation", "xla", "zero-3", "recompute")]
_ALL += [Row("cnn", strategy, option="zero-1") for strategy in ("mirrored-2", "workers-2x4")]
_ALL += [Row("cnn", "workers-2x4", option=option) for option in ("xla", "recompute")]
_ALL += [Row("language", "one", option=option) for option in ("tensor", "pipeline")]
_ALL += [Row("cnn", strategy, option="packs") for strategy in ("mirrored-2", "mirrored-8", "workers-2x4")]
_ALL += [Row("cnn", "mirrored-2", "loop", option="packs")]
_ALL += [Row("cnn", "mirrored-2", precision="mixed_float16", option="packs"), Row("gan", "mirrored-2", option="packs")]
_ALL += [Row("language", "one", option="sequence"), Row("blocks", "one", option="tensor")]
_ALL += [Row("language", "one", path, option="sequence") for path in ("evaluate", "predict")]
_ALL += [Row("blocks", "one", path, option="tensor") for path in ("evaluate", "predict")]
_ALL += [Row("language", "one", precision="mixed_float16", option="sequence")]
_ALL += [Row("blocks", "one", precision="mixed_float16", option="tensor")]
_ALL += [Row("language", "mirrored-2", option=f"data-{axis}") for axis in ("tensor", "pipeline", "sequence")]
_ALL += [Row(model, "mirrored-2", option="data-tensor") for model in ("blocks", "cnn")]
_ALL += [Row(model, "mirrored-2", precision="mixed_float16", option="accumulation") for model in ("cnn", "language")]
_ALL += [Row("scores", "mirrored-2", "evaluate"), Row("recurrent", "mirrored-2", precision="mixed_float16")]
_ALL += [Row(model, "mirrored-2", path) for model in ("padded_vectors", "sparse") for path in ("evaluate", "predict")]
_ALL += [Row("bags", "mirrored-2", "loop"), Row("padded_vectors", "mirrored-2", precision="mixed_float16")]
_ALL += [Row("cnn", "one", option="accumulation"), Row("cnn", "mirrored-2", option="replica-moments")]
_ALL += [Row("embeddings", "mirrored-2", option="xla"), Row("gan", "mirrored-2", precision="mixed_float16")]
_ALL += [Row("cnn", "one", option="place"), Row("experts", "mirrored-2", option="expert")]
_ALL += [Row("cnn", "workers-2x4", option=f"hierarchical{shard}") for shard in ("", "-zero-2", "-zero-3")]
_FAST = {
    "fit cnn mirrored-2 float32 even",
    "fit language one float32 even",
    "fit embeddings mirrored-2 float32 even",
    "fit cnn mirrored-2 float32 rest",
}
TABLE = [Row(**{**vars(row), "fast": str(row) in _FAST}) for row in _ALL]


def measure(row: Row) -> dict:
    """Traces a row's step; the devices `CPU:1` and on must be there, and for workers TF_CONFIG."""
    replicas = REPLICAS[row.strategy]
    local = 4 if row.strategy.startswith("workers") else replicas
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(row.precision)
    model, failed = None, None
    try:
        with gpu_way.gpu_way(2 * local if row.option in SPREAD else local):
            strategy = strategy_of(row, local)
            with tracer.recording() as calls:
                try:
                    model = run(row, strategy, replicas)
                except tf.errors.OpError as error:  # traced, but CPUs cannot run it: a reduce-scatter needs NCCL
                    failed = type(error).__name__
                except MachineError as error:  # the other worker has left by it, before this one came to its own
                    failed = tf.errors.InternalError.__name__
                    if failed not in str(error):
                        raise
            found = summary(calls.step(rows=ROWS), machines=REPLICAS[row.strategy] // local)
            if row.option in SPREAD or row.option.startswith("zero"):
                found.pop(WHOLE, None)  # of weights that are on some of the GPUs only
    finally:
        keras.config.set_dtype_policy("float32")
    if failed is not None:
        found["error on CPUs"] = failed
    elif row.path == "fit":
        found["steps in a call"] = steps_in_a_call(model.train_function.loops)
    return found


def steps_in_a_call(loops) -> str:
    """Whether many steps of `fit` can run in a call."""
    if not loops.has_varying_shapes:
        return "many"
    are_full = any(kind.rows is not None and not varies for kind, varies in loops.varying.items())
    return "many while batches are full" if are_full else "one"


def strategy_of(row: Row, local: int) -> tf.distribute.Strategy:
    """The row's strategy, as `tfgpu.strategy` makes it on GPUs."""
    options = {
        "bfloat16-gradients": {"reduce_dtype": "bfloat16"},
        "hierarchical": {"all_reduce": "hierarchical"},
        "packs": {"bytes_per_pack": 256},
        "replica-moments": {"batch_norm": "replica"},
    }.get(row.option.split("-zero")[0], {})
    names = [f"CPU:{number + 1}" for number in range(local)]
    if row.strategy.startswith("workers"):
        return tfgpu.strategy("multi_worker", **options)
    kind = "one_device" if row.strategy == "one" else "mirrored"
    return tfgpu.strategy(kind, devices=names, **options)


def run(row: Row, strategy: tf.distribute.Strategy, replicas: int) -> keras.Model:
    """Builds the row's model and takes the row's path."""
    is_spread = row.option in SPREAD
    with contextlib.nullcontext() if is_spread else strategy.scope():
        model, compiling, data = MODELS[row.model]()
        if "zero" in row.option:
            model = tfgpu.parallel.shard(model, int(row.option[-1]))
    if row.option == "recompute" or is_spread:
        model = SPREAD.get(row.option, tfgpu.parallel.recompute)(model)
    with (model.distribute_strategy or strategy).scope():
        optimizer = optimizer_of(row)
        if row.path != "loop":
            model.compile(optimizer, jit_compile=row.option == "xla", **compiling)
    rows = ROWS * replicas * (2 if row.option.endswith("pipeline") else 1)  # a pipeline has two micro-batches
    whole = data(rows * BATCHES - (0 if row.rows == "even" else 3))
    source = tf.data.Dataset.from_tensor_slices(whole if row.path != "predict" else whole[:1])
    source = source.batch(rows, drop_remainder=row.rows == "even")
    if row.path == "loop":
        loop(strategy, model, optimizer, compiling["loss"], source)
    else:
        getattr(model, row.path)(source, verbose=0)
    return model


def optimizer_of(row: Row) -> keras.optimizers.Optimizer:
    """Adam, with what the row asks for."""
    steps = 2 if row.option == "accumulation" else None
    optimizer = keras.optimizers.Adam(0.01, gradient_accumulation_steps=steps)
    is_scaled = row.precision == "mixed_float16" and row.path == "loop"  # `compile` does it in `fit`
    return keras.optimizers.LossScaleOptimizer(optimizer) if is_scaled else optimizer


def loop(strategy, model, optimizer, loss_of, source) -> None:
    """A hand-written loop, as in TensorFlow's guide."""
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(batch):
        x, y = batch
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = optimizer.scale_loss(loss_of(y, predicted))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predicted)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)

    for batch in strategy.experimental_distribute_dataset(source):
        train(batch)


def summary(facts: StepFacts, machines: int = 1) -> dict:
    """What the table keeps of a step: numbers and short lines, the same in every run."""
    found = {
        "data": sorted({batch for batch in facts.batches if "[" in batch and not batch.endswith("[]")}),
        "gradients in conditions": facts.gradients_in_conditions > 0,
        "one order": facts.has_one_order,
        "collectives of a GPU": _runs(facts.collectives.get("GPU:0", [])),
    }
    listed = {each.group for each in facts.collectives.get("GPU:0", [])}
    for gpu, ran in sorted(facts.collectives.items()):
        groups = {each.group for each in ran}
        if gpu != HOST and not groups <= listed:  # it holds another part of the model
            found[f"collectives of {gpu}"] = _runs(ran)
            listed |= groups
    if HOST in facts.collectives:
        found["collectives of the host"] = _runs(facts.collectives[HOST])
    found["between GPUs it fails or is slow"] = fake_nccl.refusals(facts, machines)
    for direction in ("to host", "to device", "between devices"):
        moved = facts.moved(direction, has_rows=True)
        found[f"{direction}, bytes of rows"] = sum(copy.bytes or 0 for copy in moved)
        found[f"{direction}, copies of rows"] = _counted(moved)
    others = [copy for copy in facts.moved("between devices", has_rows=False) if copy.dtype != "variant"]
    if size := sum(copy.bytes or 0 for copy in others):
        found[WHOLE] = size
    found["to host, other bytes"] = facts.bytes_moved("to host", has_rows=False)
    found["work on the host"] = dict(sorted(facts.host_work.items()))
    found["no kernel for GPUs"] = sorted(facts.host_only)
    if facts.xla_clusters:
        found["XLA clusters"] = facts.xla_clusters
    return found


def _counted(copies: list[Copy]) -> list[str]:
    times = Counter(map(str, copies))
    return [f"{times[text]} x {text}" for text in sorted(times)]


def _runs(collectives: list[Collective]) -> list[str]:
    """The collectives in their order; equal neighbors become one line."""
    found = []
    for line in map(str, collectives):
        if found and found[-1][1] == line:
            found[-1][0] += 1
        else:
            found.append([1, line])
    return [f"{times} x {line}" for times, line in found]
