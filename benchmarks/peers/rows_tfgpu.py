"""One worker of `benchmarks.input_workers` on tfgpu: folder, side, worker, workers, batch."""

import json
import sys
import time
from collections import Counter
from dataclasses import replace

import tensorflow as tf

import tfgpu
from tfgpu.core import worker_rows
from tfgpu.data.decoding import Reading
from tfgpu.data.sources import open_source


def dataset(examples, side: str, worker: int, workers: int, batch: int) -> tf.data.Dataset:
    """A worker's rows, or whole batches."""
    train = tfgpu.data.load(examples, global_batch=batch, validation=0, test=0, seed=1).train
    if side == "whole":
        return train
    return worker_rows.of(train).make(worker_rows.Ranges((worker,), workers))


def counted(examples, loads: Counter):
    """The examples, each of which is counted when it is decoded."""

    def load(index):
        noted = tf.numpy_function(lambda i: loads.update([int(i)]) or i, [index], tf.int64)
        return examples.load(tf.ensure_shape(noted, []))

    return replace(examples, load=load)


def main(folder: str, side: str, worker: int, workers: int, batch: int) -> None:
    examples = open_source(folder, Reading(cache="none", memory_bytes=0))
    made = dataset(examples, side, worker, workers, batch)
    for _ in range(2):  # the first epoch traces functions
        begun, cpu = time.perf_counter(), time.process_time()
        for _ in made:
            pass
        taken = {"cpu_s": time.process_time() - cpu, "seconds": time.perf_counter() - begun}
    loads: Counter = Counter()
    for _ in dataset(counted(examples, loads), side, worker, workers, batch):
        pass
    print(json.dumps(taken | {"decoded": loads.total()}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
