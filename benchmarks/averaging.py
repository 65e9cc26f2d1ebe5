"""Digits with less communication: accuracy, rounds and bytes of averaging and of compressed gradients, over seeds.

python -m benchmarks.averaging --seeds 5 --workers 2 --devices 2

Each way trains the same MLP on the same splits in processes of its own, several replicas in each. "on the wire" is what
the loopback device carried while training, per step and worker, in a network of the benchmark's own (`unshare`); it is
left out where the machine does not allow one.
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.children import ROOT, free_addresses

WAYS = {
    "synchronous": {"kind": "multi_worker"},
    "hierarchical": {"kind": "multi_worker", "all_reduce": "hierarchical"},
    "averaging, every=16": {"kind": "averaging", "every": 16},
    "top_k=0.01": {"kind": "multi_worker", "top_k": 0.01},
    "top_k=0.1": {"kind": "multi_worker", "top_k": 0.1},
    "bfloat16": {"kind": "multi_worker", "reduce_dtype": "bfloat16"},
    "float16": {"kind": "multi_worker", "reduce_dtype": "float16"},
    "averaging, every=16, after=100": {"kind": "averaging", "every": 16, "after": 100},
    # The outer rate over one less its momentum is 7: the inner rate is a seventh.
    "averaging, every=16, outer SGD": {"kind": "averaging", "every": 16, "outer": True},
}


def train(way: str, devices: int, seeds: int, epochs: int) -> list[dict]:
    """Trains with each seed for the weights, the order and the split; called in each worker."""
    import keras

    import tfgpu
    from tfgpu.asynchronous import averaging

    tfgpu.environment.set_logical_devices(devices)
    options, rate = dict(WAYS[way]), 0.05
    if options.pop("outer", False):
        rate /= 7
        options["outer"] = lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)
    strategy, rows = tfgpu.strategy(devices=devices, **options), []
    for seed in range(seeds):
        keras.utils.set_random_seed(seed)
        data = tfgpu.data.load("digits", global_batch=32, seed=seed, split_seed=seed, validation=0.05, test=0.3)
        with strategy.scope():
            model = tfgpu.models.mlp(data.info.input_shape, data.info.classes)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, metrics=["accuracy"])
        before = _carried()
        model.fit(data.train, epochs=epochs, verbose=0)
        carried = _carried() - before
        accuracy = model.evaluate(data.test, verbose=0, return_dict=True)["accuracy"]
        sent = averaging.traffic(model)
        rows.append({"accuracy": accuracy, "rounds": sent.rounds, "steps": sent.steps, "bytes": sent.bytes})
        rows[-1]["carried"] = carried
    return rows


def _carried() -> int:
    """Bytes that the loopback device has sent."""
    line = next(line for line in Path("/proc/net/dev").read_text().splitlines() if "lo:" in line)
    return int(line.split(":")[1].split()[8])


def together(way: str, workers: int, devices: int, seeds: int, epochs: int, timeout_s: float) -> list[dict]:
    """Runs one way in several processes; returns what the first one measured."""
    addresses, running = free_addresses(workers), []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(workers):
                config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
                answer = Path(folder) / f"{rank}.json"
                arguments = [way, str(devices), str(seeds), str(epochs), str(answer)]
                environment = {**os.environ, "TF_CONFIG": json.dumps(config), "CUDA_VISIBLE_DEVICES": ""}
                command = [sys.executable, "-m", "benchmarks.averaging", "--child", *arguments]
                running.append(subprocess.Popen(command, cwd=ROOT, env={**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}))
            for process in running:
                if process.wait(timeout_s):
                    raise SystemExit(f"{way!r} ended with code {process.returncode}.")
            return json.loads((Path(folder) / "0.json").read_text())
        finally:
            for process in running:
                process.kill()
                process.wait()


def main(
    seeds: Annotated[int, typer.Option(min=2, help="How many seeds, from 0.")] = 5,
    workers: Annotated[int, typer.Option(min=2, help="Processes.")] = 2,
    devices: Annotated[int, typer.Option(min=1, help="Logical CPU devices of each.")] = 2,
    epochs: Annotated[int, typer.Option(min=1)] = 15,
    way: Annotated[list[str] | None, typer.Option(help="Only these; default: all.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds for one way.")] = 1800,
) -> None:
    """Prints a row of a Markdown table for each way."""
    if _can_have_a_network() and "TFGPU_OWN_NETWORK" not in os.environ:
        script = 'ip link set lo up && exec "$@"'
        inside = ["unshare", "-rn", "sh", "-c", script, "sh"]
        again = [*inside, sys.executable, "-m", "benchmarks.averaging", *sys.argv[1:]]
        raise SystemExit(subprocess.run(again, env={**os.environ, "TFGPU_OWN_NETWORK": "1"}).returncode)
    is_alone = "TFGPU_OWN_NETWORK" in os.environ
    print(f"{workers} workers with {devices} replicas each, {seeds} seeds, {epochs} epochs\n")
    print("| | accuracy (sd) | against synchronous | averagings | payload a step, kB | on the wire, kB |")
    print("|---|---|---|---|---|---|", flush=True)
    base = None
    for name in way or WAYS:
        rows = together(name, workers, devices, seeds, epochs, timeout)
        found = [row["accuracy"] * 100 for row in rows]
        base = statistics.mean(found) if base is None else base
        steps = sum(row["steps"] for row in rows)
        payload = sum(row["bytes"] for row in rows) / steps / 1e3
        wire = f"{sum(row['carried'] for row in rows) / steps / workers / 1e3:.1f}" if is_alone else "-"
        print(
            f"| {name} | {statistics.mean(found):.2f} % ({statistics.stdev(found):.2f}) "
            f"| {statistics.mean(found) - base:+.2f} | {rows[0]['rounds']} of {rows[0]['steps']} steps "
            f"| {payload:.1f} | {wire} |",
            flush=True,
        )


def _can_have_a_network() -> bool:
    if not shutil.which("unshare") or not shutil.which("ip"):
        return False
    return subprocess.run(["unshare", "-rn", "ip", "link", "set", "lo", "up"], capture_output=True).returncode == 0


if __name__ == "__main__":
    if "--child" in sys.argv:
        name, *numbers, target = sys.argv[2:]
        Path(target).write_text(json.dumps(train(name, *map(int, numbers))))
    else:
        typer.run(main)
