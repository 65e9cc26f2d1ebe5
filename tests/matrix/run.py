"""Runs the equivalence matrix: every case, topology and path, stock Keras beside mended, against one device.

    python tests/matrix/run.py                      # all; prints the table
    python tests/matrix/run.py --write docs/measured/equivalence.md --json build/matrix.json
    python tests/matrix/run.py --topologies mirrored-4 --paths fit --cases even clipnorm

Each (path, variant, topology) has processes of its own, which run one case after another. Where one dies
or hangs, that is the case's result, and a new process continues with the rest. A cell is `equal`,
`differs`, `crashes`, `dies` or `hangs`; where parameters are in pieces, also `refused`: by an error of tfgpu's.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
import report
from cases import table
from driver import DISAGREE, PATHS, TOPOLOGIES, difference

TOLERANCE = 1e-5
REPAIRS = ("stock", "tfgpu.repairs")
# One device under a re-ordered sum: two shuffles of the rows inside each batch, and the batch in 2 and in 4 parts.
ORDERS = (1, 2, -2, -4)
MARGIN = 2.0  # four orders are a small sample of what rounding does
SHARD = 30  # cases of one process: TensorFlow starts once for them
HERE = Path(__file__).parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Job:
    """The processes of one column of the table."""

    path: str
    repair: str  # "stock", or the module whose repair_keras() mends Keras
    topology: str
    order: int | None = None
    gpu_way: bool = False
    gpus: bool = False

    def __str__(self):
        order, way = (
            f" order {self.order}" if self.order else "",
            " gpu-way" if self.gpu_way else " gpus" if self.gpus else "",
        )
        return f"{self.path} {self.repair} {self.topology}{order}{way}"


@dataclass
class Cell:
    status: str  # equal, differs, crashes, dies, hangs
    value: float | None = None  # the largest difference from one device
    bound: float = TOLERANCE
    parts: dict = field(default_factory=dict)
    message: str = ""
    seconds: float = 0.0
    folder: str = ""


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def start(job, folder, names):
    """Starts the job's processes on these cases; each leads a process group."""
    (folder / "cases.json").write_text(json.dumps(names))
    count, _ = TOPOLOGIES[job.topology]
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(count)]
    processes = []
    for rank in range(count):
        (folder / f"{rank}.jsonl").unlink(missing_ok=True)
        env = {**os.environ, "PYTHONFAULTHANDLER": "1", "TFGPU_REPAIR": "0" if job.repair == "stock" else "1"}
        env["TFGPU_CACHE"] = "off"
        env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
        env.pop("TF_CONFIG", None)
        if count > 1:
            env["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
        order = ["--order", str(job.order)] if job.order else []
        where = f"--topology {job.topology} --path {job.path} --repair {job.repair} --rank {rank}".split()
        where += ["--gpu-way"] * job.gpu_way + ["--gpus"] * job.gpus
        if job.gpus:
            env.setdefault("CUDA_VISIBLE_DEVICES", "0")
        command = [sys.executable, str(HERE / "driver.py"), *where, "--folder", str(folder), *order]
        with open(folder / f"{rank}.log", "a") as log:
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True))
    return processes


def lines(folder, rank):
    path = folder / f"{rank}.jsonl"
    written = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in written.splitlines() if line.endswith("}")]


def end(processes):
    for process in processes:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def cpu_seconds(processes):
    """CPU time that the processes have used: a loaded machine is slow, a hung process stands still."""
    total = 0
    for process in processes:
        try:
            total += sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        except OSError:
            pass
    return total / os.sysconf("SC_CLK_TCK")


def attend(processes, folder, timeout):
    """Waits until all have ended, or kills them when nothing moves; returns done/dead/hung and exit codes."""
    seen, since, moved, used = None, time.monotonic(), time.monotonic(), 0.0
    try:
        while True:
            codes = [p.poll() for p in processes]
            if all(code is not None for code in codes):
                return ("done" if not any(codes) else "dead"), codes
            now = [len(lines(folder, rank)) for rank in range(len(processes))], codes
            if now != seen:
                seen, since, moved = now, time.monotonic(), time.monotonic()
            if (cpu := cpu_seconds(processes)) > used + 1:
                used, moved = cpu, time.monotonic()
            if any(codes) and time.monotonic() - since > 15:
                return "dead", codes
            if time.monotonic() - moved > timeout or time.monotonic() - since > 10 * timeout:
                return "hung", codes
            time.sleep(0.1)
    finally:
        end(processes)


def execute(job, names, folder, timeout, say):
    """Runs all cases of a job, through as many processes as its crashes and hangs need; or finds them run before."""
    record = folder / "ended.json"
    if record.exists() and (found := json.loads(record.read_text()))["names"] == names:
        return {n: Cell(**cell, folder=str(folder)) for n, cell in found["cells"].items()}, found["exits"]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    count, _ = TOPOLOGIES[job.topology]
    cells, exits, left, failed_starts = {}, [], list(names), 0
    while left and failed_starts < 3:
        processes = start(job, folder, left)
        verdict, codes = attend(processes, folder, timeout)
        logs = [lines(folder, rank) for rank in range(count)]
        ended = {}
        for entry in (e for log in logs for e in log if "seconds" in e):
            ended.setdefault(entry["case"], []).append(entry)
        begun = [e["case"] for e in logs[0] if "seconds" not in e]
        for name, entries in ended.items():
            if len(entries) == count:
                error = next((e["error"] for e in entries if e["error"]), None)
                refused = job.path == "sharded" and (error or "").startswith("InputError")
                status = "refused" if refused else "crashes" if error else "ran"
                cells[name] = Cell(status, message=error or "", seconds=entries[0]["seconds"])
        stuck = next((n for n in begun if n not in cells), None)
        exits.append({"job": str(job), "codes": codes, "verdict": verdict, "case": stuck, "cases": len(begun)})
        if stuck:
            told = [p.read_text() for p in sorted(folder.glob(f"{stuck}.?.status"))]
            what = f"workers disagree: {' / '.join(told)}" if DISAGREE in codes else f"exit codes {codes}"
            status = "hangs" if verdict == "hung" else "crashes" if DISAGREE in codes else "dies"
            cells[stuck] = Cell(status, message=f"no answer in {timeout} s" if status == "hangs" else what)
        failed_starts = 0 if begun else failed_starts + 1
        left = [n for n in left if n not in cells]
    for name in left:
        said = (folder / "0.log").read_text().strip().splitlines()[-1:]
        cells[name] = Cell("dies", message=f"the process never started: {''.join(said)[:160]}")
    for cell in cells.values():
        cell.folder = str(folder)
    kept = {n: {"status": c.status, "message": c.message, "seconds": c.seconds} for n, c in cells.items()}
    record.write_text(json.dumps({"names": names, "cells": kept, "exits": exits}))
    say(f"{job}: {len(cells)} cases, {sum(c.seconds for c in cells.values()):.0f} s, {len(exits)} starts")
    return cells, exits


def results(cell, name, count=1):
    """What each of the case's processes left."""
    found = []
    for rank in range(count):
        with np.load(f"{cell.folder}/{name}.{rank}.npz") as file:
            found.append({k.replace("|", "/"): file[k] for k in file.files})
    return found


def compare(job, cell, name, reference, bounds):
    """Fills in how far a case that ran is from one device; the worst worker counts."""
    if cell.status != "ran":
        return
    if reference is None:
        cell.status, cell.message = "no reference", "one device with stock Keras gave no result"
        return
    for result in results(cell, name, TOPOLOGIES[job.topology][0]):
        for part, apart in difference(result, reference).items():
            cell.parts[part] = max(cell.parts.get(part, 0.0), apart)
    cell.value = max(cell.parts.values())
    allowed = {part: max(TOLERANCE, MARGIN * bounds.get(part, 0.0)) for part in cell.parts}
    cell.bound = max(allowed.values())
    cell.status = "equal" if all(v <= allowed[p] for p, v in cell.parts.items()) else "differs"
    cell.message = ", ".join(f"{p} {v:.1e}" for p, v in cell.parts.items() if v > allowed[p])


def measure(
    *,
    names=None,
    groups=None,
    share=(1, 1),
    topologies=tuple(TOPOLOGIES)[1:],
    paths=("fit", "loop"),
    repairs=REPAIRS,
    gpu_way=False,
    gpus=False,
    timeout=130,
    lanes=2,
    folder=None,
    say=print,
):
    """Runs the chosen part of the matrix.

    Returns:
        `{(path, repair, topology): {case: Cell}}` and the list of every process's exit codes.
    """
    cases = {n: c for n, c in table().items() if (not names or n in names) and (not groups or c.group in groups)}
    cases = {name: case for at, (name, case) in enumerate(cases.items()) if at % share[1] == share[0] - 1}
    by_path = {path: [n for n, c in cases.items() if c.loop or not path.startswith("loop")] for path in paths}
    wanted = [
        Job(p, r, t, gpu_way=gpu_way and r != "stock", gpus=gpus)
        for t in reversed(topologies)
        for r in repairs
        for p in paths
    ]
    origins = {path: Job(path if path.startswith("loop") else "fit", "stock", "one", gpus=gpus) for path in paths}
    orders = {path: [Job(origins[path].path, "stock", "one", o, gpus=gpus) for o in ORDERS] for path in paths}
    rough = {path: [n for n in by_path[path] if cases[n].rounding] for path in paths}
    todo = {origins[path]: by_path[path] for path in paths}
    todo |= {job: rough[path] for path in paths for job in orders[path]}
    todo |= {job: by_path[job.path] for job in wanted}
    todo = {job: names for job, names in todo.items() if names}
    shards = [(job, part, todo[job][part : part + SHARD]) for job in todo for part in range(0, len(todo[job]), SHARD)]
    done, exits = {job: {} for job in todo}, []
    with tempfile.TemporaryDirectory(prefix="matrix-") as scratch, ThreadPoolExecutor(lanes) as pool:
        root = Path(folder or scratch)
        futures = [
            (job, pool.submit(execute, job, names, root / f"{job} {part}".replace(" ", "_"), timeout, say))
            for job, part, names in shards
        ]
        for job, future in futures:
            done[job] |= future.result()[0]
            exits += future.result()[1]
        for path in paths:
            for name in by_path[path]:
                origin = done[origins[path]][name]
                reference = results(origin, name)[0] if origin.status in ("ran", "equal") else None
                bounds = {}
                for cell in (done[job][name] for job in orders[path] if name in done.get(job, ())):
                    for part, apart in (
                        difference(results(cell, name)[0], reference).items()
                        if cell.status == "ran" and reference
                        else ()
                    ):
                        bounds[part] = max(bounds.get(part, 0.0), apart)
                for job in {*[j for j in wanted if j.path == path and j in done], origins[path]}:
                    compare(job, done[job][name], name, reference, bounds)
    return {(j.path, j.repair, j.topology): done[j] for j in [*origins.values(), *wanted] if j in done}, exits


def share(text):
    """`2/3` as (2, 3)."""
    part, parts = map(int, text.split("/"))
    if not 1 <= part <= parts:
        raise argparse.ArgumentTypeError(f"must be K/N with K from 1 to N. Received: {text!r}.")
    return part, parts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--cases", nargs="*", dest="names")
    add("--groups", nargs="*")
    add("--share", type=share, default=(1, 1), metavar="K/N", help="every N-th of these cases, from the K-th on")
    add("--topologies", nargs="*", default=list(TOPOLOGIES)[1:], choices=TOPOLOGIES)
    add("--paths", nargs="*", default=["fit", "loop"], choices=PATHS)
    add("--repairs", nargs="*", default=list(REPAIRS), help="`stock`, or a module with repair_keras()")
    add("--gpu-way", action="store_true", help="mended Keras takes the path of GPUs (tests/gpu_emulation/gpu_way.py)")
    add("--gpus", action="store_true", help="on GPUs, beside one GPU, TF32 off; a GPU is split where there are too few")
    add("--timeout", type=float, default=130, help="idle seconds that count as a hang (tf.data may wait 60 s to end)")
    add("--lanes", type=int, default=2, help="processes (or clusters) at once")
    add("--folder", type=Path, help="keep all results and logs there; what has ended there is not run again")
    add("--json", type=Path, help="write all cells there")
    add("--add", type=Path, nargs="*", default=[], help="columns that earlier runs wrote with --json; new ones win")
    add("--check", action="store_true", help="end with 1 where a cell of ours is red and not in known.json")
    add("--write", type=Path, help="the Markdown file to write")
    options = vars(parser.parse_args())
    data, page, older, check = (options.pop(name) for name in ("json", "write", "add", "check"))
    began = time.monotonic()

    def say(line):
        print(f"[{time.monotonic() - began:5.0f} s] {line}", flush=True)

    cells, exits = measure(say=say, **options)
    surprises = report.surprises(cells)
    for path in older:
        for column, found in json.loads(path.read_text())["cells"].items():
            cells[tuple(column.split(" "))] = {n: Cell(**c) for n, c in found.items()} | cells.get(
                tuple(column.split(" ")), {}
            )
    say("measured\n" + report.text(cells))
    early = [e for e in exits if e["verdict"] != "done"]
    say(f"{len(exits)} starts, {len(early)} not to the end: {early}")
    if data:
        data.parent.mkdir(parents=True, exist_ok=True)
        columns = {" ".join(key): {n: asdict(c) for n, c in column.items()} for key, column in cells.items()}
        data.write_text(json.dumps({"cells": columns, "exits": exits}, indent=1))
    if page:
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(report.document(cells))
    if check and surprises:
        sys.exit("not equal, and not known:\n" + "\n".join(surprises))


if __name__ == "__main__":
    main()
