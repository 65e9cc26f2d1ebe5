"""Trains a decoder of KerasHub in this process, and prints how many bytes a few steps take on top of earlier memory.

Its caller sets `MALLOC_MMAP_THRESHOLD_`: otherwise freed memory stays with the process, and counts.
"""

import importlib
import json
import sys

import keras
import numpy as np
import psutil

import tfgpu
from tfgpu.finetuning import graph
from tfgpu.losses.chunked_crossentropy import ChunkedCrossentropy


def main(sizes: dict, length: int, rows: int, lora: int | None, flash: bool = False, chunk: int | None = None) -> None:
    if flash:
        keras.config.enable_flash_attention()
    models = importlib.import_module("keras_hub").models
    with tfgpu.strategy("one_device").scope():
        backbone = models.Llama3Backbone(
            sizes["vocabulary"],
            sizes["layers"],
            sizes["heads"],
            sizes["hidden"],
            sizes["mlp"],
            num_key_value_heads=sizes["groups"],
        )
        task = models.Llama3CausalLM(backbone, preprocessor=None, compile=False)
        if lora:
            backbone.enable_lora(lora)
        model = graph.flat(task, None)
        whole = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", ChunkedCrossentropy(chunk) if chunk else whole, jit_compile=False)
    ids = np.ones((2 * rows, length), "int32")
    given = {"token_ids": ids, "padding_mask": ids}
    model.fit(given, ids, batch_size=rows, verbose=0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = psutil.Process().memory_info().rss
    model.fit(given, ids, batch_size=rows, verbose=0)
    with open("/proc/self/status") as status:
        peak = 1024 * next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    variables = sum(4 * np.prod(variable.shape) for variable in task.weights)
    print(json.dumps({"bytes": peak - before, "variables": int(variables)}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
