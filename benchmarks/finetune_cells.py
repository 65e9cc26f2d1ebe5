"""Trains cells of the fine-tuning matrix in this process: `python -m benchmarks.finetune_cells JOB`.

`finetune_matrix` starts it, once for each worker. JOB is JSON: the cells, and the folder of the results. Each cell
leaves two lines there, in `RANK.jsonl`: when it begins and how it ended.
"""

import contextlib
import gc
import itertools
import json
import os
import sys
import threading
import time
import traceback
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfgpu
from benchmarks.finetune_matrix import reference
from benchmarks.finetune_models import FAMILIES, Size, adapt
from tfgpu import atomic
from tfgpu.finetuning import graph
from tfgpu.parallel import Mesh, apply, shard

ROWS, BATCH, EPOCHS, ACCUMULATED = 11, 4, 2, 2  # six batches, of 4, 4 and 3 rows: three updates
DEVICES = [f"CPU:{at}" for at in range(4)]
CLIP = {"full": {"global_clipnorm": 0.5}}  # of the other kinds: by each variable's norm
MESHES = {
    "pipeline 2": ({"pipeline": 2}, {"microbatches": 2}),
    "tensor 2": ({"tensor": 2}, {}),
    "data 2 x tensor 2": ({"data": 2, "tensor": 2}, {}),
}


def made(family: str, kind: str) -> tuple[keras.Model, tuple]:
    """The model, with its base quantized and with LoRA where the kind says so, and the data."""
    keras.utils.set_random_seed(1)
    model, data = FAMILIES[family](Size(layers=1 if family == "whisper" else 2, rows=ROWS))  # it has two stacks
    if kind.startswith("int"):
        model.quantize(kind.split()[0])
    if kind.endswith("LoRA"):
        adapt(model)
    return model, data


def spread(family: str, kind: str, layout: str) -> tuple[keras.Model, keras.Model, tuple]:
    """The model in a layout, which is to be trained; the model that has its weights in one device's order; the data.

    In a pipeline the layers of a language model are in one level, as `tfgpu train finetune-text` has them, so that a
    stage can begin between two blocks. Other models are cut where they are made: between the backbone and the head.
    """
    keras.utils.clear_session()
    gc.freeze()  # Keras collects garbage for each layer that it quantizes
    if layout in MESHES:
        model, data = made(family, kind)
        sizes, settings = MESHES[layout]
        mesh = Mesh(**sizes, devices=DEVICES[: Mesh(**sizes).size])
        flat = model
        if mesh.pipeline > 1:
            flat = graph.flat(model, None) if hasattr(model, "generate") else model
            settings = settings | {"batch": keras.tree.map_structure(lambda part: part[:BATCH], data[0])}
        return apply(flat, mesh, **settings), model, data
    with _strategy(layout).scope():
        model, data = made(family, kind)
    return (shard(model, 3) if layout == "ZeRO 3" else model), model, data


def _strategy(layout: str) -> tf.distribute.Strategy:
    if layout == "one":
        return tf.distribute.get_strategy()
    return tfgpu.strategy() if layout == "2 workers" else tfgpu.strategy("mirrored", devices=DEVICES[:2])


def trained(family: str, kind: str, layout: str) -> dict[str, np.ndarray]:
    """What a model has learned: logs of each epoch and weights, by path; on one device in stock Keras."""
    model, whole, (x, y, weights) = spread(family, kind, layout)
    with model.distribute_strategy.scope():
        clip = CLIP.get(kind, {"clipnorm": 0.1})
        optimizer = keras.optimizers.AdamW(0.01, weight_decay=0.1, gradient_accumulation_steps=ACCUMULATED, **clip)
        entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer, entropy, weighted_metrics=["accuracy"], jit_compile=False)
    how = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=weights, **how).history
    paths = [variable.path for variable in whole.weights] if layout == "one" else []  # elsewhere there may be parts
    values = enumerate(itertools.zip_longest(whole.get_weights(), paths, fillvalue=""))
    found = {f"weights/{at}/{path}": value for at, (value, path) in values}
    return found | {f"logs/{name}": np.array(values) for name, values in history.items()}


def apart(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest difference of weights and of logs.

    The bias of keys is left out: its gradient is 0 but for rounding, of which Adam makes steps.
    """
    largest = {"weights": 0.0, "logs": 0.0}
    pairs = {_part(name): value for name, value in found.items()}
    if pairs.keys() != {_part(name) for name in expected}:
        raise ValueError(f"Not the same weights: {sorted(pairs.keys() ^ {_part(name) for name in expected})}")
    for name, value in expected.items():
        if "key/bias" not in name and value.size:
            away = np.abs(pairs[_part(name)].astype("float64") - value).max()
            what = name.split("/")[0]
            largest[what] = max(largest[what], float(np.nan_to_num(away, nan=np.inf)))
    return largest


def _part(name: str) -> str:
    """A weight by its place among the weights."""
    return "/".join(name.split("/")[:2])


def cell(family: str, kind: str, layout: str, folder: Path) -> dict:
    """Trains a cell and compares it; the cell of one device keeps what the others are compared with."""
    kept = reference(folder, family, kind)
    if layout == "one":
        found = trained(family, kind, layout)
        with atomic.replacing(kept) as aside:
            np.savez(aside, **{name.replace("/", "|"): value for name, value in found.items()})
        return {}
    with np.load(kept) as file:
        expected = {name.replace("|", "/"): file[name] for name in file.files}
    return apart(trained(family, kind, layout), expected)


def outcome(family: str, kind: str, layout: str, folder: Path) -> dict:
    """A cell's differences, or the error that it ended with."""
    try:
        with contextlib.redirect_stdout(sys.stderr):  # tables of layouts
            return cell(family, kind, layout, folder)
    except tfgpu.InputError as error:
        traceback.print_exc()
        return {"refused": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {"crashes": f"{type(error).__name__}: {error}"[:2000]}


def _end_with(parent: int) -> None:
    """Ends this process when the one that started it is gone."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def main(job: dict) -> None:
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    folder, is_worker = Path(job["folder"]), "TF_CONFIG" in os.environ
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"] if is_worker else 0
    if not is_worker:
        tfgpu.environment.set_logical_devices(len(DEVICES))
    with (Path(job["log"]) / f"{rank}.jsonl").open("a") as log:
        for family, kind, layout in job["cells"]:
            print(json.dumps({"begins": [family, kind, layout]}), file=log, flush=True)
            begin = time.process_time()
            found = outcome(family, kind, layout, folder) | {"cpu_s": round(time.process_time() - begin, 1)}
            print(json.dumps({"cell": [family, kind, layout], "found": found}), file=log, flush=True)
    sys.stderr.flush()
    os._exit(0)  # workers wait for one another when they leave


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
