"""What only a GPU can show, in under ten minutes and before any timing: is the step right, and where does it run?

    python -m benchmarks.gpu_first              # on a machine with a GPU; writes build/bench/gpu-first.json
    python -m benchmarks.gpu_first --on-cpu     # a rehearsal: all that CPU devices can show

Each check runs in a process of its own and is written as soon as it is done. `python -m benchmarks.gpu` measures speed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import gpu_first_page, runner
from benchmarks.children import ROOT

CHECKS = {  # the most telling first
    "copies": "bytes to the host in a step, with and without accuracy, and in a loop by hand",
    "equality": "two devices beside one, TF32 off: the largest difference of a weight",
    "collectives": "the same where replicas exchange rows and pieces: circle loss, ZeRO 2 and 3",
    "one device": "seconds a step of `mirrored` on one device beside `one_device`, also with bfloat16 sums",
    "placement": "operations of a step by device, as TensorFlow's placer logs them",
    "products": "bits that a product of [2, 1] and [1, N] keeps with TF32 allowed",
    "seeds": "initial weights and dropout masks of one seed beside the CPU's",
    "attention": "peak memory and time of an attention layer, whole and by blocks",
    "vocabulary": "the same of the cross-entropy over a large vocabulary, whole and by chunks",
    "sensors": "what the doctor and the monitor read of the GPU",
}
LEFT_S = 15  # less is not worth starting a check


def check(name: str, *, on_cpu: bool, timeout_s: float) -> dict:
    """Runs a check; "error" says why it has no result."""
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "2"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    if on_cpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command = [sys.executable, "-m", "benchmarks.gpu_first_checks", name, *(["--on-cpu"] if on_cpu else [])]
    began = time.monotonic()
    try:
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {timeout_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}
    return {"seconds": round(time.monotonic() - began, 1), **json.loads(lines[-1])}


def main(
    minutes: Annotated[float, typer.Option(help="For the whole run.")] = 9.5,
    check_timeout: Annotated[float, typer.Option(help="Seconds that a check may take.")] = 120,
    results: Annotated[Path | None, typer.Option("--json", help="Where to write.")] = None,
    checks: Annotated[str, typer.Option(help="Only checks with this in their name.")] = "",
    on_cpu: Annotated[bool, typer.Option("--on-cpu", help="A rehearsal on CPU devices.")] = False,
    write: Annotated[Path | None, typer.Option(help="Also write a page of Markdown there.")] = None,
) -> None:
    """Runs the checks as far as the time goes, and writes what they found."""
    path = results or ROOT / "build" / "bench" / f"gpu-first{'-on-cpu' if on_cpu else ''}.json"
    until = time.monotonic() + 60 * minutes
    gpus = [] if on_cpu else _gpus()
    if not on_cpu and not gpus:
        typer.echo("error: TensorFlow sees no GPU. Run `tfgpu doctor`, or rehearse with --on-cpu.", err=True)
        raise typer.Exit(2)
    device = gpus[0] if gpus else "CPU devices"
    found: dict = {"on_cpu": on_cpu, "device": device, "date": time.strftime("%Y-%m-%d"), "checks": {}}
    for name, about in CHECKS.items():
        left = until - time.monotonic()
        if checks not in name or left < LEFT_S:
            continue
        found["checks"][name] = check(name, on_cpu=on_cpu, timeout_s=min(check_timeout, left))
        runner.write(path, found)
        typer.echo(f"{name} ({about}): {json.dumps(found['checks'][name])}")
    late = [name for name in CHECKS if checks in name and name not in found["checks"]]
    if late:
        typer.echo(f"no time left for: {', '.join(late)}. Give more --minutes, or --checks NAME.", err=True)
    if write is not None:
        write.write_text(gpu_first_page.page(found))
    failed = [name for name, result in found["checks"].items() if "error" in result]
    typer.echo(f"{path}\nNext: make bench-gpu measures speed." if not failed else f"{path}\nwithout result: {failed}")
    if failed or late:
        raise typer.Exit(1)


def _gpus() -> list[str]:
    """The GPUs that TensorFlow sees, by model; asked in a process of its own, which leaves their memory alone."""
    code = (
        "import json, tensorflow as tf; print(json.dumps([tf.config.experimental.get_device_details(gpu).get("
        "'device_name', 'GPU') for gpu in tf.config.list_physical_devices('GPU')]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout.strip().splitlines()[-1]) if done.returncode == 0 else []


if __name__ == "__main__":
    typer.run(main)
