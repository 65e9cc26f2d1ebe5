"""One slow worker of two: parameter servers beside synchronous training, with real processes on this machine.

A worker waits for each of its batches, as for a slow disk: in half of the rounds all wait equally long, in the others
the second worker waits five times as long. Waiting, not computing, fills the step, so the figures say the same on a
machine that has other work. Rounds of both sorts take turns in the same processes. What is compared is what each kind
of training keeps of its own speed: synchronous training goes at the slow worker's pace, one batch of each worker a
step; parameter servers lose the slow worker's part alone.

python benchmarks/slow_worker.py --rounds 3
"""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Annotated

import typer

ROWS = 32
KINDS = {"multi_worker": {"worker": 2}, "parameter_server": {"chief": 1, "worker": 2, "ps": 1}}
TRAINER = {"multi_worker": "worker0", "parameter_server": "chief0"}


def waiting(batch: tuple, seconds):
    """A dataset that repeats one batch forever, each after `seconds` (float, or a scalar tensor)."""
    import tensorflow as tf

    data = tf.data.Dataset.from_tensors(batch).repeat()
    shapes = [part.shape for part in data.element_spec]
    waits = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(data),
        sleep_microseconds=tf.cast(seconds * 1e6, tf.int64),
        output_types=[part.dtype for part in data.element_spec],
        output_shapes=shapes,
    )
    return tf.data.experimental.from_variant(waits, data.element_spec)


def train(kind: str, batches: int, wait_s: float, factor: float, rounds: int) -> None:
    """Trains in one task, and prints the batches of 32 rows a second of each round, even and with a slow worker."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tfgpu

    strategy = tfgpu.strategy(kind)
    random = np.random.default_rng(0)
    rows = ROWS * (2 if kind == "multi_worker" else 1)
    batch = random.random((rows, 64), "float32"), random.integers(0, 10, rows)
    with strategy.scope():
        model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    def speed(factor: float) -> float:
        if kind == "multi_worker":
            is_slow = tfgpu.Cluster.from_environment().rank == 1
            data = waiting(batch, wait_s * (factor if is_slow else 1.0))
            steps = {"steps_per_epoch": batches // 2}
        else:

            def make(index, count):
                return waiting(batch, tf.where(tf.equal(index, 1), wait_s * factor, wait_s))

            data, steps = tfgpu.asynchronous.on_workers(make, batches=batches), {}
        begun = time.perf_counter()
        model.fit(data, verbose=0, **steps)
        return batches / (time.perf_counter() - begun)

    speed(1.0)
    print(json.dumps([(speed(1.0), speed(factor)) for _ in range(rounds)]), flush=True)


@contextlib.contextmanager
def started(kind: str, arguments: list[str]) -> Iterator[dict[str, subprocess.Popen]]:
    """The tasks of a kind; ended with the block."""
    with contextlib.ExitStack() as stack:
        jobs = KINDS[kind]
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(sum(jobs.values()))]
        left = iter([f"127.0.0.1:{s.getsockname()[1]}" for s in sockets])
        cluster = {job: [next(left) for _ in range(count)] for job, count in jobs.items()}
    tasks = {}
    settings = {"TFGPU_STARTUP_TIMEOUT": "300", "TF_CPP_MIN_LOG_LEVEL": "2", "CUDA_VISIBLE_DEVICES": ""}
    try:
        for job, addresses in cluster.items():
            for index in range(len(addresses)):
                place = json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})
                tasks[f"{job}{index}"] = subprocess.Popen(
                    [sys.executable, __file__, "--task", kind, *arguments],
                    env={**settings, **os.environ, "TF_CONFIG": place},
                    stdout=subprocess.PIPE,
                    text=True,
                )
        yield tasks
    finally:
        for task in tasks.values():
            task.kill()
            task.wait()


def main(
    rounds: Annotated[int, typer.Option(help="Rounds with and without a slow worker.")] = 3,
    batches: Annotated[int, typer.Option(help="Batches of 32 rows in a round, of both workers together.")] = 80,
    wait_s: Annotated[float, typer.Option(help="Seconds that a worker waits for a batch.")] = 0.1,
    factor: Annotated[float, typer.Option(help="How many times as long the slow worker waits.")] = 5.0,
    task: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Prints the batches a second of both kinds, and what one slow worker leaves of them, as JSON."""
    if task:
        return train(task, batches, wait_s, factor, rounds)
    found = {"batches": batches, "wait_s": wait_s, "factor": factor, "rounds": rounds}
    arguments = ["--rounds", rounds, "--batches", batches, "--wait-s", wait_s, "--factor", factor]
    for kind in KINDS:
        with started(kind, [str(argument) for argument in arguments]) as tasks:
            out, _ = tasks[TRAINER[kind]].communicate()
        if not out.strip():
            raise SystemExit(f"{kind}: the training has failed.")
        measured = json.loads(out.splitlines()[-1])
        left = [slow / even for even, slow in measured]
        found[kind] = {
            "batches_per_s": round(statistics.median(even for even, _ in measured), 2),
            "with_a_slow_worker": round(statistics.median(slow for _, slow in measured), 2),
            "left": round(statistics.median(left), 3),
            "left_from_to": [round(min(left), 3), round(max(left), 3)],
        }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    typer.run(main)
