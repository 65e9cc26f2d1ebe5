"""Traces the rows of `traced_rows.TABLE`, and writes `table.json`: what a step of each would do on GPUs.

    python tests/gpu_emulation/record.py                 # all rows; writes those that it traced
    python tests/gpu_emulation/record.py embeddings      # rows whose name has this text
    python tests/gpu_emulation/record.py --check         # writes nothing; ends with 1 and a diff where a row differs

A diff of `table.json` shows what a change does on GPUs, under the name of the row. A row that fails has its error.
"""

import argparse
import difflib
import json
import math
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
FILE = HERE / "table.json"
LIMIT_S = 180
"""So long may the processes of a row stand still."""
LEAST_CPU_S = 10
"""CPU time that they use in `LIMIT_S` if they do not: on a busy machine a row takes long."""
ORDER = "collectives of a GPU"
DEVICES = {"local": 9, "workers": 5}  # the host and its GPUs, in each process


def read() -> dict[str, dict]:
    """The recorded rows by name."""
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def difference(name: str, recorded: dict | None, found: dict) -> str:
    """What differs in a row, as a diff; empty where nothing does."""
    before, after = (json.dumps(each, indent=1).splitlines() for each in (recorded or {}, found))
    return "\n".join(difflib.unified_diff(before, after, f"table.json: {name}", f"traced: {name}", lineterm="", n=1))


def trace(names: list[str], kind: str) -> dict[str, dict]:
    """Traces rows in processes of their own: workers for each row, others started anew after a row that fails."""
    found, left = {}, list(names)
    while left:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "rows.jsonl"
            batch = left[:1] if kind == "workers" else left  # in a process's next strategy, workers may hang
            processes = _start(batch, kind, file)
            try:
                _wait(processes[0], processes)  # it writes the rows; its peer may wait for it
                if processes[1:] and not _failed(file):
                    _wait(processes[1], processes)
            except subprocess.TimeoutExpired:
                pass  # the first row that has no result is the one that hangs
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            lines = file.read_text().splitlines() if file.exists() else []
            others = _others(file).read_text().splitlines() if _others(file).exists() else []
        found |= dict(map(json.loads, lines))
        for name, other in map(json.loads, others):
            if name in found and other.get(ORDER) != found[name].get(ORDER):
                found[name]["another worker has"] = other.get(ORDER)
        if not lines:
            found[left[0]] = {"error": f"exit codes {[process.returncode for process in processes]}"}
        left = [name for name in left if name not in found]
    return found


def _wait(process: subprocess.Popen, processes: list[subprocess.Popen]) -> None:
    """Waits for the end of one of some processes.

    Raises:
        subprocess.TimeoutExpired: they stand still.
    """
    while True:
        before = [_cpu_seconds(each) for each in processes]
        try:
            process.wait(LIMIT_S)
            return
        except subprocess.TimeoutExpired:
            now = [_cpu_seconds(each) for each in processes]
            used = [after - earlier for after, earlier in zip(now, before, strict=True) if earlier < math.inf]
            if sum(used) < LEAST_CPU_S:
                raise


def _cpu_seconds(process: subprocess.Popen) -> float:
    """CPU time that a process has used; infinite once it has ended, so that an end counts as work."""
    if process.poll() is not None:
        return math.inf
    fields = Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _others(file: Path) -> Path:
    """Where the second worker writes."""
    return file.with_suffix(".others")


def _failed(file: Path) -> bool:
    """Whether a step failed on the first worker: the second may then wait for it."""
    return not file.exists() or "error" in file.read_text()


def _start(names: list[str], kind: str, file: Path) -> list[subprocess.Popen]:
    root = HERE.parent.parent
    path = [str(root), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow"}
    environment.pop("TF_CONFIG", None)
    command = [sys.executable, __file__, "--process", kind, "--file", str(file), *names]
    if kind == "local":
        return [subprocess.Popen(command, env=environment)]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in _free_ports(2)]}
    tasks = [json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}) for rank in range(2)]
    return [subprocess.Popen(command, env={**environment, "TF_CONFIG": task}) for task in tasks]


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _process(names: list[str], kind: str, file: Path) -> None:
    """In a process of its own: traces rows and writes them, until one fails."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES[kind]
    tf.config.set_logical_device_configuration(cpu, parts)
    import traced_rows

    rows = {str(row): row for row in traced_rows.TABLE}
    rank = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {}).get("index", 0)
    for name in names:
        try:
            found = traced_rows.measure(rows[name])
        except Exception as error:  # what a step does is that it fails
            found = {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"}
        with (_others(file) if rank else file).open("a") as out:
            print(json.dumps([name, found]), file=out)
        if rank == 0:
            print(name, flush=True)
        if "error" in found or "error on CPUs" in found:
            break
    os._exit(0)  # a strategy of workers may wait for its peers


def _names(text: str, row: object, whole: set[str]) -> bool:
    """Whether a text is a row's name, or, where it is no row's, part of this one's."""
    return text == str(row) if text in whole else text in f" {row} "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("names", nargs="*", help="names of rows, or text in their names; all rows if none")
    add("--check", action="store_true", help="compare, and write nothing")
    add("--process", choices=DEVICES, help=argparse.SUPPRESS)
    add("--file", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process:
        _process(options.names, options.process, options.file)
    sys.path[:0] = [str(HERE), str(HERE.parent.parent)]
    from traced_rows import TABLE

    whole = {str(row) for row in TABLE}
    chosen = [row for row in TABLE if not options.names or any(_names(text, row, whole) for text in options.names)]
    found = {}
    for kind in DEVICES:
        found |= trace([str(row) for row in chosen if row.strategy.startswith("workers") == (kind == "workers")], kind)
    recorded = read()
    if options.check:
        differences = [difference(name, recorded.get(name), row) for name, row in found.items()]
        sys.exit("\n".join(filter(None, differences)) or 0)
    rows = {str(row): {**recorded, **found}.get(str(row)) for row in TABLE}
    FILE.write_text(json.dumps({name: row for name, row in rows.items() if row is not None}, indent=1) + "\n")


if __name__ == "__main__":
    main()
