"""Undoes what was mended for GPUs, one mend at a time in a copy of the package, and runs the tests that must then fail.

    python tests/gpu_emulation/undone.py                # all, in about 5 minutes
    python tests/gpu_emulation/undone.py optional nccl  # mends by name

It prints a line for each mend and ends with 1 if a test passes without it.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 900


@dataclass(frozen=True)
class Mend:
    """What a GPU needs, the code that gives it, and what sees that it is gone.

    Attributes:
        what: goes wrong on GPUs without it.
        file: in the package.
        code: a piece of the file that occurs once.
        without: takes its place.
        tests: arguments of pytest; or, with `record.py` first, names of rows of table.json.
    """

    what: str
    file: str
    code: str
    without: str
    tests: tuple[str, ...]


def _rows(*names: str) -> tuple[str, ...]:
    return ("record.py", *names)


MENDS = {
    "nccl": Mend(
        "machines sum over gRPC",
        "strategies/communication.py",
        'return choices.NCCL if all_reduce != "ring" and can_use_nccl(chosen) else choices.RING',
        "return choices.RING",
        ("tests/test_strategies.py",),
    ),
    "reduce-scatter": Mend(
        "ZeRO over machines exchanges by an all-to-all, which NCCL makes wrong",
        "parallel/zero/shard_collectives.py",
        "total = distribute.reduce_scatter(rows, _local_replica(), options)",
        "total = tf.reduce_sum(distribute.all_to_all(rows, _local_replica(), options), 0)",
        _rows("fit cnn workers-2x4 float32 even zero-2"),
    ),
    "products": Mend(
        "what replicas tell each other is a product, which TF32 rounds",
        "core/travel.py",
        "    placed = tf.pad(value[None], [[at, count - 1 - at], *[[0, 0]] * value.shape.rank])\n",
        "    flat = tf.reshape(value, [1, -1])\n"
        "    placed = tf.matmul(tf.one_hot([at], count, dtype=value.dtype), flat, transpose_a=True)\n"
        "    placed = tf.reshape(placed, [count, *value.shape])\n",
        ("tests/gpu_emulation/test_products.py",),
    ),
    "moments": Mend(
        "each BatchNormalization meets by itself",
        "core/moments/graph_order.py",
        "if sum(isinstance(node.operation, BatchNormalization) for node in nodes) < 2:",
        "if True:",
        ("tests/core/test_moments.py",),
    ),
    "optional": Mend(
        "batches pass through Optionals on the host, and each step asks whether the data has ended",
        "core/step_loop.py",
        "is_sure = block.is_sure and (",
        "is_sure = False and (",
        _rows("fit cnn mirrored-2 float32 even", "fit cnn workers-2x4 float32 even"),
    ),
    "constant-rows": Mend(
        "one step a call where collectives of slices need the number of rows",
        "core/step_loop.py",
        "if not (is_full and self.loops.has_varying_shapes) or block.rows % self.strategy.num_replicas_in_sync:",
        "if True:",
        ("tests/gpu_emulation/test_blocks.py",),
    ),
    "argmax": Mend(
        "accuracies copy all logits to the host",
        "repairs/numpy.py",
        "find_signs_on_device),",
        "lambda: None),",
        ("tests/gpu_emulation/test_metrics_and_losses.py",),
    ),
    "accuracy": Mend(
        "accuracies of sequences copy labels to the host",
        "repairs/numpy.py",
        "flatten_labels_on_device),",
        "lambda: None),",
        ("tests/gpu_emulation/test_metrics_and_losses.py",),
    ),
    "bfloat16": Mend(
        "NCCL gets bfloat16, which it does not take",
        "core/travel.py",
        '"uint16", "bfloat16", "float8_e4m3fn"',
        '"uint16", "float8_e4m3fn"',
        ("tests/core/test_collectives.py",),
    ),
    "int32": Mend(
        "int32 travels as it is: over the ring it crashes on the addresses of GPUs",
        "core/travel.py",
        " | {tf.int32: tf.float64, tf.uint32: tf.float64}",
        "",
        ("tests/core/test_collectives.py", "tests/gpu_emulation/test_table.py"),
    ),
    "records": Mend(
        "blocks of steps stay short, and TensorFlow's records of collectives fill the host's memory",
        "core/step_blocks.py",
        "longest = LONG_BLOCK_S if collectives * RECORD_BYTES > done * STEP_BYTES else BLOCK_S",
        "longest = BLOCK_S",
        ("tests/core/test_step_blocks.py",),
    ),
    "order": Mend(
        "pieces come in the order of task names as strings: 0, 1, 10, 11, 2, ...",
        "parallel/zero/shard_collectives.py",
        "in_order(rows, _replicas_by_rank(strategy))",
        "rows",
        ("tests/parallel/test_shard_collectives.py",),
    ),
    "hierarchical": Mend(
        "the sums between machines and ZeRO's exchanges run in two orders",
        "compat/collectives.py",
        "        self._between._launchers[0]._ordering_token = self._launchers[0]._ordering_token\n",
        "",
        _rows("workers-2x4 float32 even hierarchical"),
    ),
    "packs": Mend(
        "all gradients meet in one pack, after the backward pass",
        "core/collectives.py",
        "PACK_BYTES = 32 << 20",
        "PACK_BYTES = 0",
        ("tests/core/test_collectives.py", "tests/gpu_emulation/test_packs.py"),
    ),
    "slices": Mend(
        "the slices of each table meet by themselves, in three collectives",
        "core/collectives.py",
        "if not distribute.can_gather(strategy):",
        "if True:",
        ("tests/core/test_sparse_collectives.py",),
    ),
    "deterministic": Mend(
        "every recipe asks for deterministic kernels",
        "recipes/building.py",
        "deterministic=what.deterministic",
        "deterministic=True",
        ("tests/recipes/test_building.py",),
    ),
    "servers": Mend(
        "a parameter server takes the GPUs' memory",
        "strategies/parameter_server.py",
        'tf.config.set_visible_devices([], "GPU")',
        "pass",
        ("tests/parameter_server/test_serving.py",),
    ),
    "waits": Mend(
        "a host that is ahead of a busy GPU counts as waiting for data",
        "sensors/limits.py",
        "share = min(1 - computing_s / step_s, 1 - max(told, default=0.0))",
        "share = 1 - computing_s / step_s",
        ("tests/sensors/test_limits.py",),
    ),
    "copies": Mend(
        "a checkpoint copies one variable after another, and the GPU is idle for each",
        "core/state/host_copies.py",
        "return tf.identity_n(values)",
        "return [tf.identity(value) for value in values]",
        ("tests/core/test_host_copies.py",),
    ),
}


def fails(mend: Mend, copy: Path) -> tuple[bool, str]:
    """Whether a test fails in a copy of the project without the mend, and the last line of its output."""
    file = copy / "tfgpu" / mend.file
    stock = file.read_text()
    if stock.count(mend.code) != 1:
        raise SystemExit(f"{mend.file} has {stock.count(mend.code)} times: {mend.code}")
    file.write_text(stock.replace(mend.code, mend.without))
    try:
        first, *rest = mend.tests
        is_table = first == "record.py"
        command = ["tests/gpu_emulation/record.py", "--check", *rest] if is_table else ["-m", "pytest", "-m", ""]
        command += [] if is_table else ["-q", "-x", "-p", "no:cacheprovider", *mend.tests]
        environment = {**os.environ, "PYTHONPATH": str(copy)}
        asked = {"cwd": copy, "env": environment, "capture_output": True, "text": True, "timeout": LIMIT_S}
        done = subprocess.run([sys.executable, *command], **asked)
        if done.returncode not in (0, 1):
            raise SystemExit(f"exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.startswith(("FAILED", "+ ", "- "))]
        return done.returncode == 1, said[0] if said else ""
    finally:
        file.write_text(stock)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MENDS))
    names = parser.parse_args().names or list(MENDS)
    if unknown := set(names) - set(MENDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}. Choose of {', '.join(MENDS)}.")
    unseen = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "project"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".*", "build", "__pycache__"))
        for name in names:
            began = time.monotonic()
            is_seen, said = fails(MENDS[name], copy)
            unseen += [] if is_seen else [name]
            print(f"{name}: {MENDS[name].what}: {'seen' if is_seen else 'NOT SEEN'}, {time.monotonic() - began:.0f} s")
            print(f"    {said[:150]}", flush=True)
    return bool(unseen)


if __name__ == "__main__":
    sys.exit(main())
