"""JPEGs on 1, 2 and 4 workers: `tfgpu.data.load` beside PyTorch's DataLoader with DistributedSampler.

Each worker is a process that reads an epoch; they run one after another, so that none takes another's cores. CPU time
is that of the process in an epoch after a first one that does not count. What a worker decodes is counted in an epoch
of its own. "whole" is tfgpu where each worker makes whole batches. The pictures are those of `input_jpeg.py`, 224 by
224, shuffled, decoded and scaled to float32 in [0, 1]. PyTorch's loader decodes in its own process with Pillow
(`num_workers=0`).

python -m benchmarks.input_workers --images 2000 --repeats 3
python -m benchmarks.input_workers --peer /path/to/python    # an interpreter with torch and Pillow
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
SIDES = ("tfgpu", "whole", "torch")


def command_of(side: str, peer: str) -> list[str] | None:
    """The interpreter and script of a side; None if it has no torch."""
    if side != "torch":
        return [sys.executable, "-m", "benchmarks.peers.rows_tfgpu"]
    script = [peer, str(ROOT / "benchmarks" / "peers" / "rows_torch.py")]
    found = subprocess.run([peer, "-c", "import torch, PIL"], capture_output=True)
    return script if found.returncode == 0 else None


def run(command: list[str], folder: Path, side: str, worker: int, workers: int, batch: int) -> dict:
    """One worker's epoch: its examples, decoded examples, CPU seconds and seconds."""
    words = [str(folder), side, str(worker), str(workers), str(batch)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=env, cwd=ROOT, timeout=1800)
    if done.returncode:
        raise SystemExit(f"{side}, worker {worker} of {workers}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def middle(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def measure(commands: dict[str, list[str]], folder: Path, workers: int, images: int, batch: int, repeats: int) -> dict:
    """All sides on so many workers, in turns."""
    found: dict[str, list[list[dict]]] = {side: [] for side in commands}
    for number in range(repeats):
        for side in list(commands)[:: 1 if number % 2 == 0 else -1]:
            different = 1 if side == "whole" else workers  # there all workers do the same
            each = [run(commands[side], folder, side, worker, workers, batch) for worker in range(different)]
            found[side].append(each)
    share = images / workers
    sides = {}
    for side, rounds in found.items():
        cpu = [max(one["cpu_s"] for one in each) / share * 1e6 for each in rounds]
        sides[side] = {
            "cpu_us_per_example_of_share": round(middle(cpu), 1),
            "lowest": round(min(cpu), 1),
            "highest": round(max(cpu), 1),
            "decoded_over_share": round(max(one["decoded"] for one in rounds[0]) / share, 3),
        }
    return {"workers": workers, "sides": sides}


def main(
    images: Annotated[int, typer.Option(min=16, help="Files in the folder; a multiple of 16.")] = 2000,
    batch: Annotated[int, typer.Option(min=4, help="Images in a global batch.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Epochs of each worker.")] = 3,
    peer: Annotated[str, typer.Option(help="An interpreter with torch and Pillow.")] = sys.executable,
) -> None:
    """Prints JSON; without torch, a line says that it is missing."""
    from benchmarks import input_jpeg

    commands = {side: command for side in SIDES if (command := command_of(side, peer)) is not None}
    with tempfile.TemporaryDirectory() as folder:
        size = input_jpeg.write(Path(folder), images, input_jpeg.SIDE, input_jpeg.SIDE)
        rows = [measure(commands, Path(folder), count, images, batch, repeats) for count in (1, 2, 4)]
    about = {"images": images, "batch": batch, "repeats": repeats, "bytes_per_image": size // images}
    about |= {"cores": os.cpu_count(), "machine": platform.machine()}
    if "torch" not in commands:
        about["missing"] = f"{peer} has no torch or no Pillow, so PyTorch is not measured: name one with --peer"
    print(json.dumps({"results": rows, "facts": about}, indent=2))


if __name__ == "__main__":
    typer.run(main)
