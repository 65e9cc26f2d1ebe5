"""One cell: all peers of a work on a topology, side by side, each in a process of its own, in turn round by round.

A machine that slows down slows all of them, and each round's ratios stand by themselves. The cell's file is written
after each round; an interrupted run continues where it stopped, if the code is the same.
"""

import json
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import machine
from benchmarks.children import Failed, Machine, Training
from benchmarks.peers.table import PEERS, REFERENCE, TOPOLOGIES, Peer, Topology

TOLERANCE = 1e-3  # of the losses of the first steps, relative
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSettings:
    """How to measure.

    Attributes:
        machine: where.
        folder: of the cells' files and the logs.
        rounds: that count.
        warmup: rounds of each process that do not count.
        code: identifies the measured code; a cell of other code is measured again.
        only: names of peers, or nothing for all.
        tiny: next to no work.
        timeout_s: for each answer of a peer.
    """

    machine: Machine
    folder: Path
    rounds: int = 9
    warmup: int = 2
    code: str = ""
    only: tuple[str, ...] = ()
    tiny: bool = False
    timeout_s: float = 600

    def settings(self) -> dict:
        """What must be the same for a cell to be taken up again."""
        return {"code": self.code, "cores": len(self.machine.cores), "tiny": self.tiny, "only": list(self.only)}


def peers_of(topology: str, only: tuple[str, ...] = ()) -> list[Peer]:
    return [peer for peer in PEERS.values() if topology in peer.topologies and (not only or peer.name in only)]


def measure(work: str, topology: str, run: RunSettings) -> dict:
    """Measures a cell, or what is left of it.

    Returns:
        What its file holds: "work", "topology", "settings", "processor", "load" (the machine's, when it began and when
        it ended), "is_complete", and by peer its "status" ("measured", "not installed", "failed", "other result" or
        "floor"), "message", "parameters", "losses" of the first steps, "first_step_s", "seconds" of each round and
        "peak_rss_bytes" of each process.
    """
    path = run.folder / f"{work}-{topology}.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if found.get("settings") != run.settings():
        found = {}
    if found.get("is_complete") and _rounds(found) >= run.rounds:
        _log.info("%s on %s: measured before", work, topology)
        return found
    cell = {"work": work, "topology": topology, "settings": run.settings(), "is_complete": False}
    cell["processor"] = machine.processor()
    cell |= {"load": [round(os.getloadavg()[0], 2)], "peers": {}}
    trainings: dict[str, Training] = {}
    try:
        for peer in peers_of(topology, run.only):
            _log.info("%s on %s: %s starts", work, topology, peer.name)
            cell["peers"][peer.name] = _start(peer, work, TOPOLOGIES[topology], run, trainings)
        compare(cell["peers"])
        _take_up(cell, found, trainings)
        _turns(cell, trainings, run, lambda: write(path, cell))
        for name in list(trainings):
            _try(cell["peers"][name], trainings, name, _last_word)
    finally:
        for training in trainings.values():
            training.end()
    cell["load"].append(round(os.getloadavg()[0], 2))
    cell["is_complete"] = True
    write(path, cell)
    return cell


def write(path: Path, value: dict) -> None:
    """Writes a whole file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(value, indent=1))
    aside.replace(path)


def compare(peers: dict[str, dict]) -> None:
    """Marks peers that do not do the same work: other parameters, or other losses in the first steps."""
    able = {name: row for name, row in peers.items() if row["status"] == "measured"}
    against = able.get(REFERENCE) or next(iter(able.values()), None)
    for row in able.values():
        pairs = list(zip(row["losses"], against["losses"], strict=True))
        apart = [abs(mine - other) / abs(other) for mine, other in pairs]
        row["loss_difference"] = max(apart, key=lambda value: (value != value, value))  # NaN is the largest
        if row["parameters"] != against["parameters"]:
            row |= {"status": "other result", "message": f"{row['parameters']} parameters"}
        elif not row["loss_difference"] <= TOLERANCE:
            row |= {"status": "other result", "message": f"loss {row['loss_difference']:.1e} off"}


def _timed(cell: dict) -> dict[str, dict]:
    """The rows of the peers that have run all rounds so far."""
    rows = cell.get("peers", {})
    return {name: row for name, row in rows.items() if row.get("seconds") and row["status"] != "failed"}


def _rounds(cell: dict) -> int:
    return min((len(row["seconds"]) for row in _timed(cell).values()), default=0)


def _start(peer: Peer, work: str, topology: Topology, run: RunSettings, trainings: dict[str, Training]) -> dict:
    log = run.folder / "logs" / f"{work}-{topology.name}-{peer.name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    if peer.own_python and run.machine.peers_python is None:
        return {"status": "not installed", "message": ", ".join(peer.packages)}
    trainings[peer.name] = Training(peer, work, topology, run.machine, tiny=run.tiny, log=log, timeout_s=run.timeout_s)
    row: dict = {"status": "floor" if peer.is_floor else "measured", "seconds": [], "network_bytes": []}
    _try(row, trainings, peer.name, _first_word)
    return row


def _try(row: dict, trainings: dict[str, Training], name: str, step: Callable[[dict, Training], object]) -> object:
    """Takes a step with a peer and returns what it gives; a peer that fails is out, and gives None."""
    given = None
    try:
        given = step(row, trainings[name])
    except (Failed, OSError) as error:
        row |= {"status": "failed", "message": str(error)}
    if row["status"] in ("failed", "not installed"):
        _log.warning("%s: %s %s", name, row["status"], row.get("message", ""))
        trainings.pop(name).end()
        return None
    return given


def _first_word(row: dict, training: Training) -> None:
    answers = training.hear()
    if missing := answers[0].get("missing"):
        row |= {"status": "not installed", "message": missing}
        return
    row |= answers[0] | {"first_step_s": max(answer["first_step_s"] for answer in answers)}


def _last_word(row: dict, training: Training) -> None:
    answers = training.last_word()
    row |= answers[0] | {"peak_rss_bytes": [answer["peak_rss_bytes"] for answer in answers]}


def _take_up(cell: dict, found: dict, trainings: dict[str, Training]) -> None:
    """Keeps the rounds of a cell that was cut off, if the same peers have run them."""
    before = _timed(found)
    if set(before) == set(trainings):
        for name, row in before.items():
            cell["peers"][name] |= {key: row[key] for key in ("seconds", "network_bytes")}


def _turns(cell: dict, trainings: dict[str, Training], run: RunSettings, save: Callable[[], None]) -> None:
    """Runs the rounds, each in the other direction than the one before."""
    for number in range(-run.warmup, run.rounds - _rounds(cell)):
        taken = {}
        for name in list(trainings)[:: -1 if number % 2 else 1]:
            before = _loopback_bytes()
            seconds = _try(cell["peers"][name], trainings, name, lambda _, training: training.round())
            taken[name] = (seconds, _loopback_bytes() - before)
        if number >= 0:
            for name in trainings:
                for key, value in zip(("seconds", "network_bytes"), taken[name], strict=True):
                    cell["peers"][name][key].append(value)
            save()


def _loopback_bytes() -> int:
    """Bytes that went over the loopback interface since it exists; 0 if they are not counted."""
    counters = psutil.net_io_counters(pernic=True).get("lo")
    return counters.bytes_sent if counters else 0
