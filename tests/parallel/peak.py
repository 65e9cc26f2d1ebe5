"""Trains a model in this process, and prints how many bytes a few steps take on top of earlier memory.

Its caller sets `MALLOC_MMAP_THRESHOLD_`: otherwise freed memory stays with the process, and counts.
"""

import json
import sys

import keras
import numpy as np
import psutil
import tensorflow as tf

import tfgpu


def main(model: dict, batch: int, optimizer: str, policy: str, pipeline: dict | None, shard: int = 0) -> None:
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 4
    )
    tfgpu.repair_keras()
    keras.config.set_dtype_policy(policy)
    if pipeline:
        made = tfgpu.parallel.pipeline(tfgpu.models.build(**model), **pipeline)
    else:
        where = ["CPU:0", "CPU:1"] if shard else "CPU:0"
        with tfgpu.strategy("mirrored" if shard else "one_device", devices=where).scope():
            made = tfgpu.models.build(**model)
        made = tfgpu.parallel.shard(made, shard) if shard else made
    with made.distribute_strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        made.compile(keras.optimizers.get(optimizer), loss, jit_compile=False)
    shape = model["input_shape"]
    x = np.zeros((2 * batch, *shape), made.inputs[0].dtype)
    y = np.zeros(made.compute_output_shape((2 * batch, *shape))[:-1], "int32")
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(batch)  # of any number of rows: no constants are made of it
    made.fit(data, shuffle=False, verbose=0)
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = psutil.Process().memory_info().rss
    made.fit(data, shuffle=False, verbose=0)
    lines = open("/proc/self/status").read().splitlines()
    peak = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    print(json.dumps({"bytes": peak - before}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
