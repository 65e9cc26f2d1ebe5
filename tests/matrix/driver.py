"""Runs cases in this process, on one topology, by one path, with stock or mended Keras; run.py starts it.

Each case leaves `<case>.<rank>.npz` in the folder, and two lines in `<rank>.jsonl` (start, end): the runner
knows where a process died or hung. Workers wait for one another after each case; where they disagree, all end
with exit code 3.
"""

import argparse
import contextlib
import importlib
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import cases
import keras
import numpy as np
import tensorflow as tf

import tfgpu
from tfgpu.compat.worker_devices import worker_devices

DISAGREE = 3
BROKEN = 4  # a collective was aborted, and every later one would be
TOPOLOGIES = {
    "one": (1, 1),
    "mirrored-2": (1, 2),
    "mirrored-4": (1, 4),
    "workers-2x1": (2, 1),
    "workers-2x2": (2, 2),
}
KIND = "CPU"  # of the replicas' devices; --gpus makes it "GPU"
GPU_BYTES = 3 << 29  # of a part of a GPU
STAY = contextlib.ExitStack()  # what holds until the process ends
PATHS = ("fit", "loop", "loop-mean", "sharded")  # `sharded`: `fit`, with parameters in pieces (ZeRO 3)


class Place:
    """Where a script runs: the strategy, the path that trains, folders, whether this is the reference."""

    def __init__(self, strategy, *, path="fit", rank=0, folder, reference=False, order=None):
        self.strategy, self.path, self.rank, self.reference, self.order = (
            strategy,
            path,
            rank,
            reference,
            order,
        )
        self.shared, self.directory = Path(folder), Path(folder) / str(rank)
        self.directory.mkdir(parents=True, exist_ok=True)

    def model(self, case):
        model = case.model()
        if self.order is not None and self.order < 0:
            for layer in model.layers:
                if not isinstance(layer, keras.layers.BatchNormalization):
                    layer.call = in_parts(layer.call, -self.order)
        if self.path == "sharded" and not self.reference:
            model = tfgpu.parallel.shard(model, stage=3)
        return model

    def build(self, case):
        with self.strategy.scope():
            model = self.model(case)
            model.compile(optimizer=case.optimizer(), loss=case.loss(), metrics=case.metrics(), **case.compile)
        return model

    def feed(self, case, targets=True):
        """The rows as `fit` takes them (or as `predict` does)."""
        data = case.data(case.rows)
        if self.order is not None and self.order > 0 and targets:
            data = reorder(data, case, self.order)
        data = data if targets else data[:1]
        if case.feed == "arrays":
            names = ("x", "y", "sample_weight")
            return dict(
                zip(names, data, strict=False),
                batch_size=case.batch,
                **({"shuffle": False} if targets == "fit" else {}),
            )
        if case.feed in ("pydataset", "generator") and targets:
            source = Batches(data, case.batch)
            return {"x": source if case.feed == "pydataset" else endless(source)}
        rows = tf.data.Dataset.from_tensor_slices(data if targets else data[0])
        if case.feed == "files" and targets:
            rows = from_files(data, self.directory)
        dataset = rows.batch(case.batch, drop_remainder=case.feed == "static")
        if case.feed == "files" and targets:  # else Keras counts one step too many an epoch, on one device
            dataset = dataset.apply(tf.data.experimental.assert_cardinality(-(-case.rows // case.batch)))
        if case.feed == "mapped":  # TensorFlow no longer knows the size of such batches
            dataset = dataset.map(lambda *row: row if len(row) > 1 else row[0]).prefetch(2)
        return {"x": dataset.repeat() if case.feed == "repeat" and targets == "fit" else dataset}

    def fit(self, model, case, **options):
        options = {
            "epochs": 2,
            "verbose": 0,
            "callbacks": case.callbacks(self),
            **self.feed(case, "fit"),
            **case.fit,
            **options,
        }
        return model.fit(**options)

    def evaluate(self, model, case):
        steps = {"steps": 3} if case.feed == "generator" else {}
        return model.evaluate(**self.feed(case), verbose=0, return_dict=True, **steps)

    def predict(self, model, case):
        return model.predict(**self.feed(case, targets=False), verbose=0)

    def on_chief(self, write):
        """The chief writes once; the others continue when it is done."""
        if self.rank == 0:
            write()
        done = self.shared / "written"
        if self.rank == 0:
            done.touch()
        wait_for(done.exists)

    def other(self):
        """Another number of replicas in this process: two for four, one for all else."""
        devices = (
            [f"{KIND}:{i}" for i in range(2)]
            if self.strategy.num_replicas_in_sync == 4 and not workers(self.strategy)
            else None
        )
        strategy = tf.distribute.MirroredStrategy(devices) if devices else tf.distribute.OneDeviceStrategy(f"{KIND}:0")
        return Place(strategy, path=self.path, rank=self.rank, folder=self.shared)


class Batches(keras.utils.PyDataset):
    def __init__(self, data, batch):
        super().__init__()
        self.data, self.batch = data, batch

    def __len__(self):
        return -(-len(self.data[1]) // self.batch)

    def __getitem__(self, i):
        return tuple(part[i * self.batch : (i + 1) * self.batch] for part in self.data)


def from_files(data, folder, count=3):
    """The rows in files, which TensorFlow would deal to workers whole."""
    x, y = data
    rows = np.concatenate([x, y[:, None]], 1).astype("float32")
    paths = [str(folder / f"{i}.rows") for i in range(count)]
    for part, path in zip(np.array_split(rows, count), paths, strict=True):
        Path(path).write_bytes(part.tobytes())
    read = tf.data.FixedLengthRecordDataset(paths, 4 * rows.shape[1])
    return read.map(lambda row: tf.ensure_shape(tf.io.decode_raw(row, tf.float32), [rows.shape[1]])).map(
        lambda row: (row[:-1], tf.cast(row[-1], tf.int64))
    )


def endless(batches):
    while True:
        for i in range(len(batches)):
            yield batches[i]


def reorder(data, case, seed):
    """The same batches with their rows in another order: what a sum in another order does to one device."""
    rng = np.random.default_rng(seed)
    starts = range(0, case.rows, case.batch)
    order = np.concatenate([rng.permutation(np.arange(i, min(i + case.batch, case.rows))) for i in starts])
    return keras.tree.map_structure(lambda part: part[order], data)


def in_parts(call, count):
    """A layer's call on `count` parts of the batch: gradients are then sums of parts, each rounded by itself."""

    def parted(x, *args, **options):
        size = -(-tf.shape(x)[0] // count)
        return tf.concat([call(x[i * size : (i + 1) * size], *args, **options) for i in range(count)], 0)

    return parted


def loop(case, at, *, divide):
    """A loop as in TensorFlow's custom-training tutorial; `divide` by the global batch, or trust the loss."""
    strategy = at.strategy
    dataset = strategy.experimental_distribute_dataset(at.feed(case)["x"])
    with strategy.scope():
        model, optimizer, loss_of = at.model(case), case.optimizer(), case.loss()
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        if case.policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
        if divide:
            loss_of.reduction = "none"

    def step(batch):
        x, y, *weight = batch
        with tf.GradientTape() as tape:
            predicted = model(x, training=True)
            loss = loss_of(y, predicted, *weight)
            if divide:
                loss = tf.nn.compute_average_loss(loss, global_batch_size=case.batch)
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(y, predicted)
        return loss

    @tf.function
    def train(batch):
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(step, args=(batch,)), axis=None)

    logs = []
    for _ in range(2):
        for batch in dataset:
            logs.append({"loss": train(batch).numpy()})
        logs[-1]["accuracy"] = accuracy.result().numpy()
        accuracy.reset_state()
    return {"logs": logs, "weights": model.get_weights(), "iterations": optimizer.iterations.numpy()}


def run(case, at):
    """One case by one path: a flat dict of arrays, named by where they stood."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    keras.config.set_dtype_policy(case.policy)
    try:
        result = loop(case, at, divide=at.path == "loop") if at.path.startswith("loop") else case.script(case, at)
    finally:
        keras.config.set_dtype_policy("float32")
    return dict(flatten(result))


def flatten(value, name=""):
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else None
    if items is None:
        yield name, np.asarray(value, "float64")
    else:
        for key, part in items:
            yield from flatten(part, f"{name}/{key}" if name else str(key))


def difference(result, expected):
    """The largest difference of each part (`weights`, `history`, ...), relative above 1; inf where shapes differ."""
    found = {name.split("/")[0]: 0.0 for name in expected}
    for name in {*expected, *result}:
        a, b = result.get(name), expected.get(name)
        apart = np.inf if a is None or b is None or a.shape != b.shape else _apart(a, b)
        part = name.split("/")[0]
        found[part] = max(found.get(part, 0.0), apart)
    return found


def _apart(a, b):
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        far = np.abs(a - b) / np.maximum(np.abs(b), 1.0)  # a loss of 300 has other float32 neighbors than one of 0.3
        return float(np.max(np.nan_to_num(np.where(same, 0.0, far), nan=np.inf), initial=0.0))


def workers(strategy):
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)


def strategy_for(topology):
    processes, devices = TOPOLOGIES[topology]
    if processes == 1:
        return (
            tf.distribute.get_strategy()
            if devices == 1
            else tf.distribute.MirroredStrategy([f"{KIND}:{i}" for i in range(devices)])
        )
    # Stock Keras too gets several CPU devices a worker: they stand for GPUs here.
    with worker_devices([f"{KIND}:{i}" for i in range(devices)]):
        return tf.distribute.MultiWorkerMirroredStrategy()


def wait_for(condition, seconds=120):
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the other workers did not come")
        time.sleep(0.02)


def meet(folder, name, rank, status, count):
    """Workers tell each other how a case ended; continuing is safe only after the same end on all."""
    (folder / f"{name}.{rank}.tmp").write_text(status)
    (folder / f"{name}.{rank}.tmp").rename(folder / f"{name}.{rank}.status")
    others = [folder / f"{name}.{r}.status" for r in range(count)]
    wait_for(lambda: all(path.exists() for path in others))
    if len({path.read_text() for path in others}) > 1:
        os._exit(DISAGREE)


def follow(parent):
    """Ends this process when the runner is gone, however it ended: no orphan stays."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def enter_gpu_way(machines):
    """CPU devices take the path of GPUs from now on, and what NCCL refuses is refused. Returns what it is asked for."""
    from fake_nccl import fake_nccl
    from gpu_way import gpu_way

    STAY.enter_context(gpu_way())
    return STAY.enter_context(fake_nccl(machines))


def make_devices(kind, count):
    """Gives this process `count` devices: parts of its CPU, or whole GPUs, or parts of one where there are fewer."""
    global KIND
    KIND = kind
    if kind == "GPU" and not tf.config.list_physical_devices("GPU"):
        sys.exit("TensorFlow sees no GPU: see `tfgpu doctor`, or leave out --gpus")
    if kind == "CPU":
        tfgpu.environment.set_logical_devices(count)
    elif len(tf.config.list_physical_devices("GPU")) < count or count == 1:
        tfgpu.environment.set_logical_devices(count, "GPU", memory_bytes=GPU_BYTES)
    else:
        tfgpu.environment.set_memory_growth()
    tf.config.experimental.enable_tensor_float_32_execution(False)


def main():
    threading.Thread(target=follow, args=(os.getppid(),), daemon=True).start()
    parser = argparse.ArgumentParser()
    for name in ("topology", "path", "repair", "folder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--order", type=int, default=None)
    parser.add_argument("--gpu-way", action="store_true")
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    folder, rank, nccl = Path(options.folder), options.rank, None
    processes, devices = TOPOLOGIES[options.topology]
    if options.gpu_way:
        sys.path.append(str(Path(__file__).parent.parent / "gpu_emulation"))
        nccl = enter_gpu_way(processes)
    make_devices("GPU" if options.gpus else "CPU", devices)
    if options.repair != "stock":
        importlib.import_module(options.repair).repair_keras()
    strategy = strategy_for(options.topology)
    table = cases.table()
    with open(folder / f"{rank}.jsonl", "a") as log:
        for name in json.loads((folder / "cases.json").read_text()):
            print(json.dumps({"case": name}), file=log, flush=True)
            began, error, kind, broken = time.monotonic(), None, "ok", False
            at = Place(
                strategy,
                path=options.path,
                rank=rank,
                folder=folder / name,
                order=options.order,
                reference=options.topology == "one" and options.repair == "stock",
            )
            try:
                result = run(table[name], at)
                if nccl is not None:
                    nccl.check_order()
                np.savez(folder / f"{name}.{rank}.npz", **{k.replace("/", "|"): v for k, v in result.items()})
            except Exception as failure:
                kind, broken = type(failure).__name__, isinstance(failure, tf.errors.OpError)
                text = [line.strip() for line in str(failure).splitlines() if line.strip()] or [""]
                error = f"{kind}: {text[-1 if text[0].endswith(':') else 0][:160]}"
                (folder / f"{name}.{rank}.traceback").write_text(traceback.format_exc())
            if nccl is not None:
                nccl.calls.clear()
            if processes > 1:
                meet(folder, name, rank, kind, processes)
            print(
                json.dumps({"case": name, "error": error, "seconds": round(time.monotonic() - began, 2)}),
                file=log,
                flush=True,
            )
            if broken and processes > 1:
                os._exit(BROKEN)
    os._exit(0) if processes > 1 else None


if __name__ == "__main__":
    main()
