"""What each worker of a training does for a checkpoint: `python -m benchmarks.checkpoints`.

Workers are processes on this machine, with one CPU device each: two with whole weights, four with ZeRO stage 3. For
each it prints the bytes that it writes over all bytes, the growth of its memory (without pages of files) while it saves
and loads, the milliseconds that the step waits for a save beside those of the copy alone and of the write; medians, and
the largest growth, over the saves. Each wait is measured between two copies (of an equal model, which does not train),
and divided by their mean: so other work on the machine counts on both sides. The median of these ratios comes with its
quartiles. The comparison of replicas that precedes a save (`check_replicas`) is measured by itself. glibc gives freed
arrays back at once here, so that growth is what is in use.

`--kills N` instead ends any one of two workers by SIGKILL at a random moment, N times, and counts the kills that left a
half-written checkpoint aside, and those after which the newest checkpoint could not be read. `--keras` measures the
growth of one process's memory while it saves a `.keras` file, beside stock Keras, over the file's bytes.
"""

import json
import multiprocessing
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import children

CASES = {
    "whole weights, 2 workers": (2, 0),
    "ZeRO stage 3, 2 workers": (2, 3),
    "ZeRO stage 3, 4 workers": (4, 3),
}
KERAS_FILES = {
    "on each of 4 replicas": (0,),
    "ZeRO stage 3 on 4 replicas": (3,),
    "a run with a schedule of tfgpu's, on 4 replicas": (0, "--of-run"),
    "the same with ZeRO stage 3": (3, "--of-run"),
}
TIMES = ("waits", "copies", "writes", "comparisons")
TIMEOUT_S = 900
ENDLESS = 100_000
app = typer.Typer()


class Growth:
    """The growth of this process's memory in a block: of its own pages, not those of files."""

    def __enter__(self) -> "Growth":
        self._before, self._most, self._is_over = self._now(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()
        self.bytes = self._most - self._before

    def _watch(self) -> None:
        while not self._is_over.wait(0.001):
            self._most = max(self._most, self._now())

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("This system does not tell the pages of a process that are its own.")


def build(strategy, stage: int, width: int, rate: object = 1e-4):
    """A model whose weights and Adam's slots take 24 bytes times the square of its width, about."""
    import keras

    import tfgpu

    keras.utils.set_random_seed(0)
    with strategy.scope():
        layers = [keras.layers.Dense(width, "relu") for _ in range(2)]
        model = keras.Sequential([keras.Input((width,)), *layers, keras.layers.Dense(1)])
        if stage:
            model = tfgpu.parallel.shard(model, stage)
        model.compile(keras.optimizers.Adam(rate), "mse", jit_compile=False)
    return model


@app.command(hidden=True)
def worker(folder: Path, stage: int, width: int, saves: int) -> None:
    """One of the workers; prints its figures as JSON."""
    import numpy as np

    import tfgpu
    from tfgpu.callbacks import Checkpoint
    from tfgpu.checkpoint import Writer
    from tfgpu.core.state import parts, training_state

    strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"])
    model, equal, again = (build(strategy, stage, width) for _ in range(3))
    found = {"waits": [], "copies": [], "ratios": [], "writes": [], "growth": [], "comparisons": []}

    class Timed(Checkpoint):
        def _save(self, *args, **kwargs):
            began = time.perf_counter()
            training_state.settle(self.model)
            comparison, before = time.perf_counter() - began, self._copy_s()
            with Growth() as growth:
                began = time.perf_counter()
                super()._save(*args, **kwargs)
                wait = time.perf_counter() - began
                self._finish_writing(self.model)
            copy = (before + self._copy_s()) / 2
            values = {"waits": wait, "copies": copy, "ratios": wait / copy, "growth": growth.bytes}
            for name, value in {**values, "comparisons": comparison}.items():
                found[name].append(value)

        def _copy_s(self):
            began = time.perf_counter()
            parts.copy(equal, metrics=True)
            return time.perf_counter() - began

    class Timing(Writer):
        def put(self, what, write, **options):
            def timed():
                began = time.perf_counter()
                write()
                found["writes"].append(time.perf_counter() - began)

            super().put(what, timed, **options)

    rows = 8
    x, y = np.ones((rows, width), "float32"), np.ones((rows, 1), "float32")
    model.fit(x, y, rows, epochs=saves + 1, verbose=0, callbacks=[Timed(folder, best=None, writer=Timing(most=1))])
    with Growth() as growth:
        Checkpoint(folder).restore(again)
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    own = list((folder / f"epoch-{saves + 1:04d}").glob(f"state-{rank + 1:05d}-*"))
    found = {name: values[1:] for name, values in found.items()}  # the first copy makes the function that reads
    print(json.dumps({**found, "load": growth.bytes, "bytes": own[0].stat().st_size}))


def victim(task: str, folder: str, width: int, errors: str) -> None:
    """A worker to kill: it saves after each step and resumes from the newest checkpoint."""
    os.environ["TF_CONFIG"] = task
    with open(errors, "a") as file:
        os.dup2(file.fileno(), sys.stderr.fileno())
    import numpy as np

    import tfgpu
    from tfgpu.callbacks import Checkpoint

    strategy = tfgpu.strategy("multi_worker", devices=["CPU:0"])
    model, x = build(strategy, 2, width), np.ones((8, width), "float32")
    model.fit(x, x[:, :1], 8, epochs=ENDLESS, verbose=0, callbacks=[Checkpoint(folder, best=None, every_steps=1)])


@app.command(hidden=True)
def keras_file(folder: Path, stage: int, width: int, stock: bool, of_run: bool = False) -> None:
    """Saves a `.keras` file from four replicas; prints the growth as JSON.

    With `of_run` the model has a schedule of tfgpu's, and the file opens without tfgpu: `stock` then copies it first.
    """
    import numpy as np

    import tfgpu
    from tfgpu.serving import stock as serving
    from tfgpu.training import schedules

    tfgpu.environment.set_logical_devices(4)
    strategy = tfgpu.strategy("mirrored", devices=[f"CPU:{at}" for at in range(4)])
    rate = schedules.build("cosine", 1e-4, total_steps=8, warmup_steps=1, accumulate=2).learning_rate
    model = build(strategy, stage, width, rate if of_run else 1e-4)
    model.fit(np.ones((8, width), "float32"), np.ones((8, 1), "float32"), 8, verbose=0)
    small = build(tfgpu.strategy("one_device", devices="CPU:0"), 0, 8)
    small.save(folder / "small.keras")  # what the first save imports does not count
    path = folder / "model.keras"
    with Growth() as growth:
        if of_run:
            serving.stock_model(model).save(path) if stock else serving.save_stock_model(model, path)
        elif stock:
            from keras.src.saving import saving_lib

            with open(path, "wb") as file:
                saving_lib.save_model(model, file)
        else:
            model.save(path)
    print(json.dumps({"growth": growth.bytes, "bytes": path.stat().st_size}))


def measure_keras(width: int) -> None:
    """Prints a table of the growth, and of its share of the file's bytes."""
    print("| weights | tfgpu | Keras; for a run: `stock_model(model).save` |\n|---|---|---|")
    for name, (stage, *flags) in KERAS_FILES.items():
        cells = [name]
        for stock in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                processes = start(1, "keras-file", folder, stage, width, "1" if stock else "0", *flags)
                try:
                    out, err = processes[0].communicate(timeout=TIMEOUT_S)
                    if processes[0].returncode:
                        raise RuntimeError(err[-3000:])
                    found = json.loads(out.splitlines()[-1])
                finally:
                    end(processes)
            cells.append(f"{found['growth'] / 1e6:.1f} MB, {found['growth'] / found['bytes']:.2f}")
        print("|", " | ".join(cells), "|", flush=True)


def start(count: int, *command: str) -> list[subprocess.Popen]:
    """The processes of so many workers on this machine."""
    addresses = children.free_addresses(count)
    common = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    common |= {"MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.checkpoints", *map(str, command)],
            env={**common, "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task})},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for task in ({"type": "worker", "index": at} for at in range(count))
    ]


def end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.kill()
        process.communicate()


def measure(name: str, width: int, saves: int) -> None:
    workers, stage = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        processes = start(workers, "worker", folder, stage, width, saves)
        try:
            answers = []
            for process in processes:
                out, err = process.communicate(timeout=TIMEOUT_S)
                if process.returncode:
                    raise RuntimeError(err[-3000:])
                answers.append(json.loads(out.splitlines()[-1]))
        finally:
            end(processes)
    total = sum(answer["bytes"] for answer in answers)
    print(f"\n{name}: a checkpoint of {total / 1e6:.1f} MB, {saves} saves")
    print(
        "| worker | writes | grows to save | grows to load | step waits | copy alone | wait over copy | write "
        "| comparison |"
    )
    for rank, answer in enumerate(answers):
        milliseconds = [1000 * statistics.median(answer[key]) for key in TIMES]
        grows = [f"{size / 1e6:.1f} MB ({size / total:.2f})" for size in (max(answer["growth"]), answer["load"])]
        waits, copies, *rest = [f"{each:.1f} ms" for each in milliseconds]
        low, middle, high = statistics.quantiles(answer["ratios"], n=4)
        ratio = f"{middle:.2f} ({low:.2f} to {high:.2f})"
        print("|", " | ".join([str(rank), f"{answer['bytes'] / total:.1%}", *grows, waits, copies, ratio, *rest]), "|")


def kill(count: int, width: int) -> None:
    from tfgpu.checkpoint import storage

    chance, lost, begun, kept = random.Random(0), 0, 0, []
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    server = multiprocessing.get_context("forkserver")  # imports once, for all workers
    server.set_forkserver_preload(["tensorflow", "keras", "tfgpu.strategies", "tfgpu.callbacks", "tfgpu.parallel"])
    with tempfile.TemporaryDirectory() as folder, tempfile.NamedTemporaryFile("r") as errors:
        for at in range(count):
            before, addresses = newest_name(folder), children.free_addresses(2)
            tasks = ({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}} for rank in (0, 1))
            given = [(json.dumps(task), folder, width, errors.name) for task in tasks]
            processes = [server.Process(target=victim, args=each) for each in given]
            try:
                for process in processes:
                    process.start()
                until = time.monotonic() + TIMEOUT_S
                while newest_name(folder) == before:  # it has saved once
                    if time.monotonic() > until or any(process.exitcode is not None for process in processes):
                        raise RuntimeError(errors.read()[-4000:])
                    time.sleep(0.002)
                time.sleep(chance.uniform(0, 0.5))
                processes[chance.randrange(2)].kill()
                time.sleep(chance.uniform(0, 0.2))
            finally:
                for process in processes:
                    process.kill()
                    process.join()
            begun += any(path.suffix != ".gone" for path in Path(folder).glob(".epoch-*"))
            newest = storage.found(folder)[0]
            try:
                kept.append(storage.read(newest).position.epoch)
                print(f"kill {at + 1}: {newest.name} is whole", flush=True)
            except storage.Damaged as error:
                lost += 1
                print(f"kill {at + 1}: {newest.name} is damaged: {error}", flush=True)
    assert kept == sorted(kept), kept  # each start went on from the one before
    print("| kills | in the middle of a write | newest checkpoint damaged | steps done |\n|---|---|---|---|")
    print(f"| {count} | {begun} | {lost} | {kept[-1]} |")


def newest_name(folder: str) -> str:
    from tfgpu.checkpoint import storage

    return next((path.name for path in storage.found(folder)), "")


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    width: Annotated[int, typer.Option(help="Units of a hidden layer.")] = 2048,
    saves: Annotated[int, typer.Option(help="Saves that are measured.", min=2)] = 15,
    kills: Annotated[int, typer.Option(help="How often a worker is killed; 0 measures instead.")] = 0,
    of_keras: Annotated[bool, typer.Option("--keras", help="Measure `.keras` files instead.")] = False,
) -> None:
    if context.invoked_subcommand is not None:
        return
    if of_keras:
        measure_keras(width)
        return
    if kills:
        kill(kills, width)
        return
    for name in CASES:
        measure(name, width, saves)


if __name__ == "__main__":
    app()
