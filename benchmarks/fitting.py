"""What each way to fit a model saves and costs, side by side: `python -m benchmarks.fitting`.

One transformer, one batch, AdamW. Each way trains in a process of its own; the processes take turns. Bytes of weights
and slots are listed by device; activations are the peak of the process, after its first step, above what it holds
between steps. That counts all devices, which here share one memory; logical CPU devices share the cores too.
"""

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LENGTH, WORDS, DEPTH = 128, 64, 6


def _half(model, rows: int) -> None:
    """To half of what the activations of this batch take."""
    from tfgpu import parallel
    from tfgpu.parallel.rematerialization import budget

    facts = budget.measure(model, rows=rows)
    parallel.recompute(model, "auto", memory=facts.peak([(0, len(facts.calls), False)]) // 2, rows=rows)


def _sharded(stage: int):
    return lambda model, rows: __import__("tfgpu").parallel.shard(model, stage=stage)


def _parallel(name: str, *arguments, **options):
    return lambda model, rows: getattr(__import__("tfgpu").parallel, name)(model, *arguments, **options)


# By name: what is done to a built model, parts that the batch is cut into, replicas, dtype policy.
WAYS = {
    "plain": (None, 1, 0, "float32"),
    "accumulation over 4": (None, 4, 0, "float32"),
    "mixed_bfloat16": (None, 1, 0, "mixed_bfloat16"),
    "recompute to a half": (_half, 1, 0, "float32"),
    "recompute in blocks": (_parallel("recompute", "blocks"), 1, 0, "float32"),
    "2 replicas": (None, 1, 2, "float32"),
    "ZeRO 1, 2 replicas": (_sharded(1), 1, 2, "float32"),
    "ZeRO 2, 2 replicas": (_sharded(2), 1, 2, "float32"),
    "ZeRO 3, 2 replicas": (_sharded(3), 1, 2, "float32"),
    "pipeline, 2 stages of 4 parts": (_parallel("pipeline", 2, 4, devices=2), 1, 0, "float32"),
    "tensor, 2 devices": (_parallel("tensor", devices=2), 1, 0, "float32"),
}


def measure(way: str, rows: int, steps: int, width: int) -> dict:
    """Trains in this process; returns bytes by device, the peak above the start, and seconds a step."""
    import keras
    import numpy as np

    import tfgpu

    change, parts, replicas, policy = WAYS[way]
    tfgpu.environment.set_logical_devices(2)
    keras.utils.set_random_seed(0)
    chosen = tfgpu.strategy("mirrored", devices=replicas) if replicas else tfgpu.strategy("one_device", devices="CPU:0")
    spread = change is not None and not replicas  # such a model is made outside of any strategy
    tfgpu.repair_keras()
    model = _made(None if spread else chosen, policy, width)
    if change is not None:
        change(model, rows)
    accumulate = {"gradient_accumulation_steps": parts} if parts > 1 else {}
    with model.distribute_strategy.scope() if model.distribute_strategy else chosen.scope():
        optimizer = keras.optimizers.AdamW(1e-3, **accumulate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    tokens = np.random.default_rng(0).integers(0, WORDS, (rows, LENGTH)).astype("int32")
    how = dict(batch_size=max(1, rows // parts), shuffle=False, verbose=0)
    model.fit(tokens, tokens, **how)  # TensorFlow needs memory of its own to optimize the graph
    before = _peak_from_here()
    taken = []
    for _ in range(steps):
        begin = time.perf_counter()
        model.fit(tokens, tokens, **how)
        taken.append(time.perf_counter() - begin)
    return {
        "peak": _held("VmHWM") - before,
        "step_s": min(taken),
        "bytes": {device: sum(kinds.values()) for device, kinds in tfgpu.parallel.memory_by_device(model).items()},
    }


def _made(chosen, policy: str, width: int):
    import contextlib

    import tfgpu

    with tfgpu.precision.use(policy), chosen.scope() if chosen is not None else contextlib.nullcontext():
        return tfgpu.models.transformer((LENGTH,), WORDS, width=width, depth=DEPTH, dropout=0.1)


def _held(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith(what)))


def _peak_from_here() -> int:
    """Lets the kernel count this process's peak from now on, and returns what it holds."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _held("VmRSS")


def _child(way: str, rows: int, steps: int, width: int, timeout_s: float) -> dict:
    words = ["--only", way, "--rows", rows, "--steps", steps, "--width", width]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    environment |= dict.fromkeys(("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), "131072")  # freed is given back
    environment["TF_ENABLE_ONEDNN_OPTS"] = "0"  # With AVX-512, oneDNN's allocator keeps what was freed.
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.fitting", *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _table(found: dict[str, list[dict]]) -> str:
    def median(way: str, name: str) -> float:
        return statistics.median(each[name] for each in found[way])

    lines = ["| | weights and slots a device, MiB | activations, MiB | ratio | time a step |", "|---|---|---|---|---|"]
    plain = median("plain", "peak")
    for way, runs in found.items():
        held = ", ".join(f"{size / 2**20:.1f}" for size in runs[0]["bytes"].values())
        peak = median(way, "peak")
        ratios = [mine["step_s"] / other["step_s"] for mine, other in zip(runs, found["plain"], strict=True)]
        time_s = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
        lines.append(f"| {way} | {held} | {peak / 2**20:.0f} | {peak / plain:.2f} | {time_s} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32, help="of the batch [32]")
    parser.add_argument("--width", type=int, default=64, help="of the transformer [64]")
    parser.add_argument("--steps", type=int, default=3, help="that are timed in each process; the least counts [3]")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each way [3]")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one process [600]")
    parser.add_argument("--ways", nargs="*", help="some of them; plain is always one")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.only:
        print(json.dumps(measure(asked.only, asked.rows, asked.steps, asked.width)))
        return
    from benchmarks import machine

    ways = [way for way in WAYS if way == "plain" or not asked.ways or way in asked.ways]
    how = dict(steps=asked.steps, width=asked.width, timeout_s=asked.timeout)
    found: dict[str, list[dict]] = {way: [] for way in ways}
    for _ in range(asked.repeats):
        for way in ways:
            found[way].append(_child(way, asked.rows, **how))
            print(way, found[way][-1], file=sys.stderr, flush=True)
    print(_table(found))
    facts = machine.facts()
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    print(
        f"\n{asked.rows} rows of {LENGTH}, width {asked.width}, {DEPTH} blocks, AdamW; {facts['device']}; {versions}."
    )


if __name__ == "__main__":
    main()
