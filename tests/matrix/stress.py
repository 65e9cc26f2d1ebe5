"""Runs cases of the matrix hundreds of times under load, in ever new processes, and counts how those processes end.

    python tests/matrix/stress.py                                  # 500 runs; about the time that --help tells
    python tests/matrix/stress.py --runs 20 --json build/stress.jsonl
    python tests/matrix/stress.py --cases-per-process 1            # every run in processes of its own: hours

A run is one case (its model made, trained, evaluated and asked for predictions) on one topology by `fit`. TensorFlow's
start costs as much as a case, so processes take several cases one after another (`--cases-per-process`) and a run's
exit codes are those of the processes it ran in, one a worker. Where a process dies or hangs, that is the result of
the case at which it stood (of the last one, if it had answered all); the cases that it had not begun are no runs.
Workers leave by `os._exit` once they have answered, so that only a mirrored run also tells how Python shuts down.

Meanwhile one busy loop a core takes its share of the time, and two lanes train at once.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import run
from cases import table
from driver import TOPOLOGIES

# What leans on collectives: replicas without rows, conditions around an all-reduce, XLA, loops, variables made late.
CASES = (
    "last-of-1",
    "last-of-5",
    "cnn-uneven",
    "batchnorm-uneven",
    "global_clipnorm-uneven",
    "accumulate-2",
    "accumulate-global_clipnorm",
    "mixed_float16-clip",
    "mixed_float16-accumulate",
    "overflow-last",
    "jit-uneven",
    "steps-per-execution-5",
    "steps-per-execution-accumulate",
    "embedding-uneven",
    "lazy-sequential",
    "lazy-batchnorm",
    "class-weights-uneven",
    "mask-weights-uneven",
)
BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))\n"


@contextmanager
def load(loops):
    """Keeps that many cores busy; the loops end with this process, however it ends."""
    running = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def plan(names, topologies, count, per_process, seed=0):
    """Endless batches of distinct cases, the topologies in turn; each case comes about equally often."""
    rng, left = random.Random(seed), {topology: [] for topology in topologies}
    while True:
        for topology in topologies:
            if len(left[topology]) < per_process:
                left[topology] += [n for n in rng.sample(names, len(names)) if n not in left[topology]]
            batch, left[topology] = left[topology][:per_process], left[topology][per_process:]
            yield topology, batch[:count]


def ended(code):
    """An exit code in words."""
    if code is None:
        return "killed by stress.py"
    return signal.Signals(-code).name if code < 0 else str(code)


def attempt(topology, names, folder, *, repair, timeout):
    """Starts fresh processes on the cases; one record a case begun."""
    folder.mkdir(parents=True)
    count, _ = TOPOLOGIES[topology]
    began = time.monotonic()
    processes = run.start(run.Job("fit", repair, topology), folder, names)
    verdict, codes = run.attend(processes, folder, timeout)
    logs = [run.lines(folder, rank) for rank in range(count)]
    answers = Counter(e["case"] for log in logs for e in log if "seconds" in e)
    errors = {e["case"]: e["error"] for log in logs for e in log if e.get("error")}
    begun = [name for name in names if any(e["case"] == name for log in logs for e in log)] or names[:1]
    stood = next((name for name in begun if answers[name] < count), begun[-1])
    shared = {"topology": topology, "processes": folder.name, "codes": codes, "seconds": time.monotonic() - began}
    return [
        {
            **shared,
            "case": name,
            "verdict": "done" if verdict == "done" or name != stood else verdict,
            "error": errors.get(name),
        }
        for name in begun
    ]


def stress(*, names, topologies, runs, per_process, repair, timeout, lanes, folder, write):
    """Runs batches in so many lanes until there are enough records."""
    batches, lock, done, started = plan(names, topologies, runs, per_process), threading.Lock(), [], Counter()

    def lane():
        while True:
            with lock:
                left = runs - len(done) - started["under way"]
                if left <= 0:
                    return
                topology, batch = next(batches)
                batch = batch[:left]
                started["under way"] += len(batch)
                started["processes"] += 1
                place = folder / f"{started['processes']:04d}-{topology}"
            records = []
            try:
                records = attempt(topology, batch, place, repair=repair, timeout=timeout)
            finally:
                with lock:
                    started["under way"] -= len(batch)
                    done.extend(records)
                    for record in records:
                        write(record)

    with ThreadPoolExecutor(lanes) as pool:
        for future in [pool.submit(lane) for _ in range(lanes)]:
            future.result()
    return done


def summary(records):
    """A table of exit codes by topology, then every run that did not end well."""
    lines = ["| topology | runs | processes | exit codes of the processes |", "|---|---|---|---|"]
    for topology in sorted({r["topology"] for r in records}):
        part = [r for r in records if r["topology"] == topology]
        codes = {r["processes"]: r["codes"] for r in part}
        counts = Counter(ended(code) for each in codes.values() for code in each)
        told = ", ".join(f"{code}: {count}" for code, count in sorted(counts.items()))
        lines.append(f"| {topology} | {len(part)} | {sum(map(len, codes.values()))} | {told} |")
    bad = [r for r in records if r["verdict"] != "done" or r["error"]]
    for r in bad:
        codes = ", ".join(map(ended, r["codes"]))
        lines.append(f"{r['topology']} {r['case']}: {r['verdict']}, exit codes {codes} {r['error'] or ''}".rstrip())
    lines.append(f"{len(records)} runs, {len(records) - len(bad)} to the end with exit code 0, {len(bad)} not")
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--runs", type=int, default=500)
    add("--cases-per-process", type=int, default=9, help="1: every run in processes of its own")
    add("--cases", nargs="*", default=list(CASES), choices=table(), metavar="CASE")
    add("--topologies", nargs="*", default=["mirrored-4", "workers-2x1"], choices=TOPOLOGIES)
    add("--repair", default="tfgpu.repairs", help="`stock`, or a module with repair_keras()")
    add("--timeout", type=float, default=120, help="idle seconds that count as a hang")
    add("--lanes", type=int, default=2, help="processes (or clusters) at once")
    add("--busy", type=int, default=os.cpu_count(), help="busy loops in the background")
    add("--folder", type=Path, help="keep all logs there")
    add("--json", type=Path, help="one line a run")
    options = parser.parse_args()
    per_process = max(1, min(options.cases_per_process, len(options.cases)))
    began, count = time.monotonic(), Counter()
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.unlink(missing_ok=True)

    def write(record):
        count["runs"] += 1
        if options.json:
            with open(options.json, "a") as file:
                print(json.dumps({**record, "seconds": round(record["seconds"], 1)}), file=file)
        if count["runs"] % 25 == 0 or record["verdict"] != "done" or record["error"]:
            told = f"{record['verdict']} {record['codes']} {record['error'] or ''}"
            at = f"[{time.monotonic() - began:5.0f} s] {count['runs']} runs"
            print(f"{at}; {record['topology']} {record['case']}: {told}", flush=True)

    with tempfile.TemporaryDirectory(prefix="stress-") as scratch, load(options.busy):
        records = stress(
            names=options.cases,
            topologies=options.topologies,
            runs=options.runs,
            per_process=per_process,
            repair=options.repair,
            timeout=options.timeout,
            lanes=options.lanes,
            folder=options.folder or Path(scratch),
            write=write,
        )
    print(summary(records))
    print(f"{time.monotonic() - began:.0f} s")
    sys.exit(1 if any(r["verdict"] != "done" or r["error"] for r in records) else 0)


if __name__ == "__main__":
    main()
