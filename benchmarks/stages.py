"""What stages in two processes cost beside the same stages in one, on logical CPUs: `python -m benchmarks.stages`.

Both have the machine to themselves in turn, round after round. A step is that of `fit`, in a round's shortest epoch.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.machine import processor

ROOT = Path(__file__).parents[1]
STAGES, MICROBATCHES, BATCH, STEPS = 4, 8, 64, 30
WIDTHS = 64, 1024


def train(file: Path, width: int, epochs: int = 6) -> None:
    """A process of a round: the first one writes the milliseconds of a step."""
    import tfgpu

    cluster = tfgpu.Cluster.from_environment()
    tfgpu.environment.set_logical_devices(STAGES // cluster.size)
    tfgpu.parallel.connect()
    import keras
    import numpy as np

    class Times(keras.callbacks.Callback):
        taken = []

        def on_epoch_begin(self, epoch, logs=None):
            self.begin = time.perf_counter()

        def on_epoch_end(self, epoch, logs=None):
            self.taken.append((time.perf_counter() - self.begin) / STEPS * 1e3)

    layers = [keras.layers.Dense(width, "relu", name=f"dense_{at}") for at in range(2 * STAGES)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    cuts = [f"dense_{2 * at}" for at in range(1, STAGES)]
    tfgpu.parallel.pipeline(model, STAGES, MICROBATCHES, cuts=cuts, mesh=tfgpu.parallel.Mesh(pipeline=STAGES))
    model.compile("sgd", "mse", jit_compile=False)
    rows = np.ones((BATCH * STEPS, width), "float32")
    model.fit(rows, rows, BATCH, epochs=epochs, verbose=0, callbacks=[Times()])
    file.write_text(json.dumps(min(Times.taken[1:])))


def round_of(processes: int, width: int) -> float:
    """Milliseconds of a step, in so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found"
        words = ["-m", "tfgpu", "launch", "-n", str(processes), "--no-logs", __file__, str(file), str(width)]
        environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "2"}
        subprocess.run([sys.executable, *words], env=environ, check=True, capture_output=True, timeout=300)
        return json.loads(file.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each, in turn [3]")
    asked = parser.parse_args()
    print(f"{processor()}, {os.cpu_count()} cores\n")
    print("| width | KiB handed on a step, each cut and way | one process, ms | two processes, ms | ratio |")
    print("|---|---|---|---|---|")
    for width in WIDTHS:
        found = {1: [], 2: []}
        for at in range(asked.rounds):
            for processes in (1, 2) if at % 2 else (2, 1):
                found[processes].append(round_of(processes, width))
        one, two = (statistics.median(found[count]) for count in (1, 2))
        spans = [f"{statistics.median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in found.values()]
        print(f"| {width} | {BATCH * width * 4 // 1024} | {spans[0]} | {spans[1]} | {two / one:.2f} |", flush=True)


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2])) if "TFGPU_ATTEMPT" in os.environ else main()
