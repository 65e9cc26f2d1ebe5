"""A training over the devices of two processes: `spread.py FOLDER WHAT`, started by `tfgpu launch` or a TF_CONFIG each.

`WHAT` is `goes` (many epochs with a checkpoint, for faults), `mesh`, `late` or `alone` (wrong use), or some of `CASES`
or `PARTS`, each of which is compared with one device. A process has `DEVICES` devices (2) and writes
`FOLDER/pid{rank}`; the first one `FOLDER/found.json`, or `FOLDER/end.npz`.
"""

import json
import os
import sys
from pathlib import Path

ROWS, BATCH, EPOCHS = 50, 16, 5  # 20 steps; the last batch of an epoch has 2 rows
NAMES = "0/CPU:0", "0/CPU:1", "1/CPU:0", "1/CPU:1"
CUTS = ["drop", "third", "last"]
CASES = {
    "stages": ("stages", {}),
    "accumulation": ("all devices", {"gradient_accumulation_steps": 2}),
    "two replicas": ("two replicas", {}),
    "replicas in one process": ("replicas in one process", {}),
    "backwards": ("backwards", {}),
    "interleaved": ("interleaved", {}),
    "float16": ("two stages", {"policy": "mixed_float16"}),
    "bfloat16": ("two stages", {"policy": "mixed_bfloat16"}),
    "placed": ("placed", {}),
}
PARTS = {  # 4 devices a process
    "tensor across": {},
    "tensor in the other process": {"use_ema": False, "policy": "mixed_float16"},
    "data x tensor across": {},
    "data across x tensor": {"gradient_accumulation_steps": 2},
    "all axes, ZeRO 1": {"kind": "transformer"},
    "experts across": {"kind": "experts"},
    "data x experts across": {"kind": "experts", "gradient_accumulation_steps": 2},
    "sequence across": {"kind": "transformer"},
    "ZeRO 2": {"gradient_accumulation_steps": 2},
    "ZeRO 1 on the hosts": {"use_ema": False},
}


def layouts():
    from tfgpu.parallel import Mesh, pipeline, place

    def on(*names, **sizes):
        return Mesh(devices=names or None, **sizes)

    half = dict(stages=2, microbatches=3, cuts=["third"])
    whole = dict(stages=4, microbatches=4, cuts=CUTS)
    return {
        "stages": lambda model: pipeline(model, **whole, mesh=on(*NAMES, pipeline=4)),
        "all devices": lambda model: pipeline(model, **whole, mesh=on(pipeline=4)),
        "backwards": lambda model: pipeline(model, **whole, mesh=on(*NAMES[::-1], pipeline=4)),
        "two stages": lambda model: pipeline(model, **half, devices=["CPU:0", "1/CPU:0"]),
        "interleaved": lambda model: pipeline(model, **whole, schedule="interleaved", devices=["CPU:1", "1/CPU:1"]),
        "two replicas": lambda model: pipeline(model, **half, mesh=on(*NAMES, data=2, pipeline=2)),
        "replicas in one process": lambda model: pipeline(
            model, **half, mesh=on(NAMES[0], NAMES[2], NAMES[1], NAMES[3], data=2, pipeline=2)
        ),
        "placed": lambda model: place(model, {"third": "1/CPU:1", "last": "1/CPU:0", "*": "CPU:1"}),
    }


def parts():
    """Layers in parts and sharded optimizers: each takes what makes the model."""
    import tfgpu
    from tfgpu.parallel import Mesh, apply, shard, tensor

    pairs, more = ["0/CPU:0", "1/CPU:0", "0/CPU:1", "1/CPU:1"], ["0/CPU:2", "1/CPU:2", "0/CPU:3", "1/CPU:3"]

    def sharded(names, stage, offload=False):
        def spread(make):
            with tfgpu.strategy("mirrored", devices=names).scope():
                model = make()
            return shard(model, stage, offload=offload)

        return spread

    return {
        "tensor across": lambda make: tensor(make(), devices=pairs[:2]),
        "tensor in the other process": lambda make: tensor(make(), devices=["1/CPU:2", "1/CPU:3"]),
        "data x tensor across": lambda make: apply(make(), Mesh(data=2, tensor=2, devices=pairs)),
        "data across x tensor": lambda make: apply(make(), Mesh(data=2, tensor=2, devices=NAMES)),
        "all axes, ZeRO 1": lambda make: apply(
            make(),
            Mesh(data=2, pipeline=2, tensor=2, devices=[*pairs, *more]),
            cuts=["block1_norm2"],
            microbatches=2,
            zero=1,
        ),
        "experts across": lambda make: apply(make(), Mesh(expert=2, devices=pairs[:2])),
        "data x experts across": lambda make: apply(make(), Mesh(data=2, expert=2, devices=pairs)),
        "sequence across": lambda make: apply(make(), Mesh(sequence=2, devices=pairs[:2])),
        "ZeRO 2": sharded(NAMES, 2),
        "ZeRO 1 on the hosts": sharded(["0/CPU:3", "1/CPU:3"], 1, offload=True),
    }


def make(policy="float32"):
    """Connections across cuts, dropout, noise without a seed of its own, a loss that a layer adds."""
    import keras

    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    first = keras.layers.Dense(16, "relu", name="first", dtype=policy)(inputs)
    x = keras.layers.Dropout(0.3, name="drop", dtype=policy)(first)
    added = "l2" if policy == "float32" else None  # in float16 Keras fails with it, on one device too
    x = keras.layers.Dense(16, "relu", name="second", activity_regularizer=added, dtype=policy)(x)
    x = keras.layers.GaussianNoise(0.1, name="noise", dtype=policy)(x) + first
    x = keras.layers.Dense(16, "relu", name="third", dtype=policy)(x)
    return keras.Model(inputs, keras.layers.Dense(4, name="last", dtype="float32")(x))


def make_transformer(policy="float32"):
    import keras

    import tfgpu

    keras.utils.set_random_seed(1)
    return tfgpu.models.transformer((6,), 4, width=8, heads=2, depth=1, dropout=0.1, attention_dropout=0.1)


def make_experts(policy="float32"):
    import keras

    import tfgpu

    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    x = keras.layers.Dropout(0.1)(keras.layers.Dense(16, "relu")(inputs))
    x = x + tfgpu.layers.MixtureOfExperts(4, 12, capacity_factor=1.0, balance_loss=0.5)(x)
    return keras.Model(inputs, keras.layers.Dense(4)(x))


def data(kind="mlp"):
    import numpy as np

    rng = np.random.default_rng(0)
    if kind == "transformer":
        rng = np.random.default_rng(1)  # with 0, rounding alone moves a prediction of one device by 1e-4
        return rng.integers(0, 4, (ROWS, 6)), rng.integers(0, 4, (ROWS, 6)), None
    return (
        rng.normal(size=(ROWS, 8)).astype("float32"),
        np.arange(ROWS) % 4,
        rng.uniform(0.5, 2, ROWS).astype("float32"),
    )


def fit(model, *callbacks, epochs=EPOCHS, policy="float32", kind="mlp", use_ema=True, **options):
    import keras

    with model.distribute_strategy.scope():
        optimizer = keras.optimizers.AdamW(0.01, global_clipnorm=1.0, use_ema=use_ema, **options)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=64.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    x, y, weights = data(kind)
    arguments = dict(epochs=epochs, shuffle=False, verbose=0, sample_weight=weights, validation_data=(x, y))
    return model.fit(x, y, BATCH, callbacks=list(callbacks), **arguments).history


def compared(folder: Path, name: str) -> dict[str, float]:
    """How far a case is from one device."""
    layout, how = CASES[name]
    return apart(folder, name, lambda make: layouts()[layout](make()), **how)[0]


def apart(folder: Path, name: str, spread, **how) -> tuple[dict[str, float], dict]:
    """How far a layout is from one device, and what each device holds."""
    import keras
    import numpy as np

    import tfgpu

    policy, kind = how.get("policy", "float32"), how.get("kind", "mlp")
    build = {"mlp": make, "transformer": make_transformer, "experts": make_experts}[kind]
    with tfgpu.strategy("one_device", devices="CPU:0").scope():
        one = build(policy)
    model = spread(lambda: build(policy))
    expected, history = fit(one, **how), fit(model, **how)
    model.save(folder / f"{name}.keras")
    opened = keras.models.load_model(folder / f"{name}.keras")
    x, y, _ = data(kind)
    # The gradient of a key's bias is 0 but for rounding, of which Adam makes steps: all of its value is that.
    kept = [not variable.path.endswith("attention/key/bias") for variable in one.weights]
    weights = zip(model.get_weights(), one.get_weights(), kept, strict=True)
    pairs = {
        "history": [(history[key], expected[key]) for key in expected],
        "weights": [(mine, other) for mine, other, counts in weights if counts],
        "predict": [(model.predict(x, verbose=0), one.predict(x, verbose=0))],
        "evaluate": [(model.evaluate(x, y, verbose=0), one.evaluate(x, y, verbose=0))],
        "opened": [(opened.predict(x, verbose=0), model.predict(x, verbose=0))],
    }
    # Where the file has other slots than one device's, Keras warns, and leaves these as they are when it is made.
    pairs["slots"] = [
        (mine.numpy(), other.numpy())
        for mine, other in zip(_slots(opened.optimizer), _slots(one.optimizer), strict=True)
        if "attention_key_bias" not in mine.path
    ]
    found = {
        key: max(float(np.abs(np.subtract(mine, other)).max()) for mine, other in some) for key, some in pairs.items()
    }
    return found, tfgpu.parallel.memory_by_device(model)


def _slots(optimizer) -> list:
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    return [variable for variable in inner.variables if len(variable.shape)]


def devices_of(model) -> dict[str, list[str]]:
    return {layer.name: [copy.device for copy in layer.kernel.value.values] for layer in model.layers if layer.weights}


def assigned_too_late(times: int = 200) -> int:
    """How often a step does not find what was assigned to a variable of the other process just before."""
    import tensorflow as tf

    with tf.device("/job:worker/task:1/device:CPU:0"):
        variables = [tf.Variable(0.0) for _ in range(4)]

    @tf.function
    def step():
        for variable in variables:
            variable.assign_add(1.0)

    found = 0
    for _ in range(times):
        for variable in variables:
            variable.assign(0.0)
        step()
        found += any(variable.numpy() != 1.0 for variable in variables)
    return found


def compare(folder: Path, names: list[str]) -> None:
    import tfgpu
    from tfgpu.parallel import connection

    found = {name: compared(folder, name) for name in names}
    x, y, _ = data()
    pipe = tfgpu.data.load((x[:, :, None, None], y), global_batch=BATCH, validation=0, test=0)
    found["about"] = {
        "strategy": tfgpu.strategies.describe(tfgpu.strategy())["kind"],
        "workers": tfgpu.Cluster.from_environment().size,
        "rows": sum(len(labels) for _, labels in pipe.train),
        "assigned too late": assigned_too_late(),
        "devices": devices_of(layouts()["stages"](make())),
        "everywhere": [device.name for device in connection.select(None)],
    }
    (folder / "found.json").write_text(json.dumps(found))


def compare_parts(folder: Path, names: list[str]) -> None:
    found = {name: apart(folder, name, parts()[name], **PARTS[name]) for name in names}
    (folder / "found.json").write_text(json.dumps(found))


def go(folder: Path) -> None:
    import keras
    import numpy as np

    import tfgpu

    class Says(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            print(f"ended epoch {epoch}", flush=True)

    model = layouts()["stages"](make())
    fit(model, tfgpu.callbacks.Checkpoint(folder / "saved"), Says(), epochs=int(os.environ.get("EPOCHS", "40")))
    np.savez(folder / "end.npz", *model.get_weights(), *[v.numpy() for v in model.optimizer.variables])


def main(folder: Path, what: list[str]) -> None:
    import tfgpu

    tfgpu.environment.set_logical_devices(int(os.environ.get("DEVICES", "2")))
    (folder / f"pid{tfgpu.Cluster.from_environment().rank}").write_text(str(os.getpid()))
    if what == ["late"]:
        make()
    if what != ["alone"]:
        tfgpu.parallel.connect()
    if what == ["alone"]:
        layouts()["stages"](make())
    elif what == ["mesh"]:
        tfgpu.parallel.pipeline(make(), 2, 2, cuts=["third"], devices=["0/CPU:0", "3/CPU:0"])
    elif what == ["goes"]:
        go(folder)
    elif what[0] in PARTS:
        compare_parts(folder, what)
    else:
        compare(folder, what)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
