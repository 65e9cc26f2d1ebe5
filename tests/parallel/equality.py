"""What every layout learns, against one device: `python tests/parallel/equality.py` prints the table.

Each cell trains 20 steps (batches of 16 and 2 rows, sample weights, AdamW, clipping by the global norm or by each
variable's, a moving average of the weights) on logical CPU devices, and says the largest difference of a weight.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import traceback

import keras
import numpy as np
from rich.console import Console

import tfgpu
from tfgpu.parallel import Mesh, apply, memory_by_device, place

sys.path.insert(0, os.path.dirname(__file__))
import spread_models as models

BOUNDS = {"mixed_float16": 2e-2, "mixed_bfloat16": 2e-2}


def mesh(**sizes) -> Mesh:
    return Mesh(**sizes, devices=[f"CPU:{at}" for at in range(Mesh(**sizes).size)])


def placed(model):
    """Each layer on the next of four devices."""
    layers = [layer.name for layer in model.layers]
    return place(model, {name: f"CPU:{at * 4 // len(layers)}" for at, name in enumerate(layers)})


LAYOUTS = {
    "layers on 4 devices": placed,
    "pipeline 4, 1f1b": lambda model: apply(model, mesh(pipeline=4), microbatches=4),
    "pipeline 2 devices, interleaved": lambda model: apply(
        model, mesh(pipeline=2), schedule="interleaved", microbatches=4
    ),
    "tensor 2": lambda model: apply(model, mesh(tensor=2)),
    "4 replicas": lambda model: apply(model, mesh(data=4)),
    "ZeRO 1, 4 replicas": lambda model: apply(model, mesh(data=4), zero=1),
    "ZeRO 2, 4 replicas": lambda model: apply(model, mesh(data=4), zero=2),
    "ZeRO 3, 4 replicas": lambda model: apply(model, mesh(data=4), zero=3),
    "data 2 x pipeline 2": lambda model: apply(model, mesh(data=2, pipeline=2), microbatches=4),
    "data 2 x tensor 2": lambda model: apply(model, mesh(data=2, tensor=2)),
    "data 2 x pipeline 2 x tensor 2, ZeRO 1": lambda model: apply(
        model, mesh(data=2, pipeline=2, tensor=2), microbatches=4, zero=1
    ),
}
MODELS = {"MLP with skips": models.mlp, "CNN with BatchNorm": models.cnn, "transformer": models.transformer}
OPTIONS = {
    "global_clipnorm": {},
    "clipnorm": {"clip": {"clipnorm": 0.1}},
    "accumulation": {"gradient_accumulation_steps": 2},
    "float16": {"policy": "mixed_float16"},
    "bfloat16": {"policy": "mixed_bfloat16"},
}


@contextlib.contextmanager
def policy_of(how: dict):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(how.get("policy", "float32"))
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def cell(make, how: dict, layout) -> dict:
    """Trains in a layout and on one device, and compares."""
    weights = None if make is models.transformer else models.WEIGHTS
    with policy_of(how):
        one, expected = models.on_one_device(make, epochs=5, weights=weights, **how)
        model = layout(models.made(make, how.get("policy", "float32")))
        begin = time.perf_counter()
        history = models.fit(make, model, epochs=5, weights=weights, **how)
    # The gradient of a key's bias is 0 but for rounding, of which Adam makes steps: all of its value is that.
    kept = [not variable.path.endswith("attention/key/bias") for variable in one.weights]
    rows = zip(model.get_weights(), one.get_weights(), kept, strict=True)
    apart = max(float(np.max(np.abs(mine - other))) for mine, other, counts in rows if counts)
    logs = max(float(np.max(np.abs(np.array(history[name]) - expected[name]))) for name in ("loss", "val_loss"))
    most = max(sum(sizes.values()) for sizes in memory_by_device(model).values())
    total = sum(sum(sizes.values()) for sizes in memory_by_device(one).values())
    return {"weights": apart, "logs": logs, "share": most / total, "seconds": time.perf_counter() - begin}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--options", nargs="*", default=list(OPTIONS))
    parser.add_argument("--json", help="where the cells go, too")
    asked = parser.parse_args()
    tfgpu.environment.set_logical_devices(8)
    cells, bad = {}, []
    print(f"| layout | model | {' | '.join(asked.options)} | most on a device |")
    print("|---|---|" + "---|" * (len(asked.options) + 1))
    for name in asked.layouts:
        for kind in asked.models:
            row = []
            for option in asked.options:
                try:
                    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
                        found = cell(MODELS[kind], OPTIONS[option], LAYOUTS[name])
                except Exception as error:
                    traceback.print_exc()
                    found = {"error": f"{type(error).__name__}: {error}"[:200]}
                cells["; ".join((name, kind, option))] = found
                bound = BOUNDS.get(OPTIONS[option].get("policy"), 1e-5)
                if found.get("weights", np.inf) > bound:
                    bad.append((name, kind, option))
                row.append(found)
            texts = [f"{found['weights']:.0e}" if "weights" in found else "error" for found in row]
            share = next((f"{found['share']:.2f}" for found in row if "share" in found), "")
            print(f"| {name} | {kind} | {' | '.join(texts)} | {share} |", flush=True)
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump(cells, file, indent=1)
    for name in bad:
        Console(stderr=True).print(f"over its bound: {'; '.join(name)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
