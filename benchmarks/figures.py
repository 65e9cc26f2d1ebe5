"""Evaluates the cells' numbers: medians, quartiles, ratios round by round, and which peer is faster."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.table import OURS, PEERS, REFERENCE
from benchmarks.peers.works import WORKS

REASONS = Path(__file__).with_name("reasons.json")


@dataclass(frozen=True)
class Spread:
    """A median and its quartiles."""

    median: float
    lower: float
    upper: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread | None":
        """None of no values; quartiles by linear interpolation.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0, 4.0, 5.0])
            Spread(median=3.0, lower=2.0, upper=4.0)
        """
        if not values:
            return None
        if len(values) == 1:
            return cls(*values * 3)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper)

    def scaled(self, factor: float) -> "Spread":
        return Spread(self.median * factor, self.lower * factor, self.upper * factor)


@dataclass(frozen=True)
class Cell:
    """A work on a topology, as measured: the JSON of its file, questioned.

    Attributes:
        facts: what `runner.measure` returns.
    """

    facts: dict

    @property
    def work(self) -> str:
        return self.facts["work"]

    @property
    def topology(self) -> str:
        return self.facts["topology"]

    @property
    def processor(self) -> str:
        """The CPU, where it is not the one that the page names first."""
        return self.facts.get("processor", "")

    @property
    def steps(self) -> int:
        work = WORKS[self.work]
        return (work.tiny() if self.facts.get("settings", {}).get("tiny") else work).steps

    def row(self, peer: str) -> dict:
        return self.facts.get("peers", {}).get(peer, {})

    def names(self) -> list[str]:
        return [name for name in PEERS if self.row(name)]

    def is_compared(self, peer: str) -> bool:
        return self.row(peer).get("status") == "measured" and bool(self.row(peer).get("seconds"))

    def step_us(self, peer: str) -> Spread | None:
        """Microseconds a step."""
        spread = Spread.of(self.row(peer).get("seconds", []))
        return spread.scaled(1e6 / self.steps) if spread else None

    def ratio(self, peer: str, against: str = REFERENCE) -> Spread | None:
        """How many times the other's time a peer takes, round by round; None where they are not compared."""
        if not (self.is_compared(peer) and self.is_compared(against)):
            return None
        pairs = zip(self.row(peer)["seconds"], self.row(against)["seconds"], strict=False)
        return Spread.of([mine / other for mine, other in pairs])

    def faster(self, ours: str = OURS[0]) -> dict[str, Spread]:
        """The peers that take less time than ours in three rounds of four, and how many times theirs we take."""
        found = {name: self.ratio(ours, name) for name in self.names() if name not in OURS}
        return {name: ratio for name, ratio in found.items() if ratio and ratio.lower > 1}

    def network_share(self, peer: str) -> float | None:
        """The part of a step that training alone, without the network, does not take; of TensorFlow's peers only."""
        alone = self.row("no-network").get("seconds")
        if not (alone and self.is_compared(peer)) or PEERS[peer].own_python:
            return None
        pairs = zip(alone, self.row(peer)["seconds"], strict=False)
        return max(0.0, statistics.median(1 - floor / whole for floor, whole in pairs))

    def network_bytes(self, peer: str) -> float | None:
        """Bytes that all processes together send in a step."""
        sent = [count for count in self.row(peer).get("network_bytes", []) if count]
        return statistics.median(sent) / self.steps if sent else None

    def peak_mib(self, peer: str) -> float | None:
        """The most memory of one process."""
        peaks = self.row(peer).get("peak_rss_bytes")
        return max(peaks) / 2**20 if peaks else None


def cells(results: dict) -> dict[tuple[str, str], Cell]:
    """The cells by topology and work; there may be few or none."""
    return {(facts["topology"], facts["work"]): Cell(facts) for facts in results.get("cells", [])}


def reason(topology: str, work: str, peer: str) -> str:
    """Why a peer is faster, or does other work, from reasons.json: the entry that names the most; "" for none."""
    known = json.loads(REASONS.read_text())
    keys = (f"{topology} {work} {peer}", f"{work} {peer}", f"{topology} {peer}", peer)
    return next((known[key] for key in keys if key in known), "")
