"""`docs/measured/benchmarks.md` from the JSON of a run, whole or partial."""

from benchmarks.figures import Cell, Spread, cells, reason
from benchmarks.gpu_report import section as gpu_section
from benchmarks.peers.table import OURS, PEERS, REFERENCE, TOPOLOGIES
from benchmarks.peers.works import WORKS

TITLES = {
    "one": "One device",
    "mirrored-2": "Two replicas in one process",
    "workers-2": "Two workers",
}
INTRO = """# Benchmarks

Written by `make bench`. Measured on {device}, {cores} cores used, {memory_gib} GiB of memory, {system}, with
{versions}, on {date}{load}.

The peers (tfgpu, stock Keras, JAX, PyTorch and hand-written loops) train each model in one run, in separate processes,
with the same initial weights, batches, Adam, loss, metrics, threads and cores. They take turns in {rounds} rounds,
after {warmup} warm-up rounds. Ratios are taken within a round, so a machine that slows down slows both sides; the
tables show median and quartiles. Before the rounds, every peer trains a few steps and reports its losses and number of
parameters. A peer whose losses differ by more than 0.1 % does other work, and is not compared. (Adam's epsilon is
1e-12, because Keras and PyTorch add it at different places.)

A step trains on the global batch: {batches} rows.
Data is in memory. "Many steps" is the fastest of several `steps_per_execution`; Keras on JAX may choose too.
PyTorch keeps its batches in tensors, without a loader, and uses the fused Adam; pictures are channels-last.
"""


NO_GPU = """No figure comes from a GPU yet. [What a step does on GPUs](../explained/gpu.md) says what was
derived without one, and how. With a GPU, `make gpu-first` and `benchmarks/gpu.py` measure it.
"""


def document(results: dict, gpu: dict | None = None) -> str:
    """Writes the page.

    Args:
        results: "facts" of the machine and the run, "cells" and "startup", each of which may be missing.
        gpu: what benchmarks/gpu.py measured, if anything.
    """
    found = cells(results)
    parts = [_intro(results, found), *([] if gpu else [NO_GPU])]
    for topology, title in TITLES.items():
        parts += _section(title, topology, {w: found[topology, w] for w in WORKS if (topology, w) in found})
    parts += _scaling(found) + _memory(found) + _starting(found, results.get("startup", {}))
    parts += gpu_section(gpu) if gpu else []
    parts += _everything(found)
    return "\n".join(parts) + "\n"


def _intro(results: dict, found: dict) -> str:
    facts = {"device": "an unknown device", "cores": "?", "memory_gib": "?", "system": "?", "date": "?"}
    facts |= {"rounds": "?", "warmup": "?"} | results.get("facts", {})
    versions = facts.get("versions", {})
    for cell in found.values():
        versions = versions | {k: v for name in cell.names() for k, v in cell.row(name).get("versions", {}).items()}
    is_tiny = any(cell.facts.get("settings", {}).get("tiny") for cell in found.values())
    codes = {cell.facts.get("settings", {}).get("code") for cell in found.values()}
    loads = [load for cell in found.values() for load in cell.facts.get("load", [])]
    return ("Made with `--tiny`: the figures mean nothing.\n\n" if is_tiny else "") + INTRO.format(
        **{key: facts[key] for key in ("device", "cores", "memory_gib", "system", "date", "rounds", "warmup")},
        load=(f"; load average {min(loads):.1f} to {max(loads):.1f}" if loads else "")
        + (f"; on {len(codes)} versions of the code, which the JSON file names" if len(codes) > 1 else ""),
        versions=", ".join(f"{name} {version}" for name, version in versions.items()) or "unknown versions",
        batches=", ".join(f"{work.batch} ({name})" for name, work in WORKS.items()),
    )


def _section(title: str, topology: str, rows: dict[str, Cell]) -> list[str]:
    if not rows:
        return []
    peers = [p for p in PEERS.values() if p.name != REFERENCE and not p.is_floor and topology in p.topologies]
    peers = [peer for peer in peers if any(cell.row(peer.name) for cell in rows.values())]
    heads = ["model", f"{PEERS[REFERENCE].label}, us/step", *(p.label for p in peers), "faster peer than `fit`", "why"]
    out = ["", f"## {title}", "", " ".join([_about(topology), *_elsewhere(rows)]), "", *_head(heads)]
    for work, cell in rows.items():
        faster = cell.faster()
        named = "; ".join(f"{PEERS[name].label} ({ratio.median:.2f}x)" for name, ratio in faster.items())
        why = "; ".join(reason(topology, work, name) or "no reason is known" for name in faster)
        times = [_times(cell, peer.name) for peer in peers]
        out.append(_row(work, _us(cell.step_us(REFERENCE)), *times, named or "none", why))
    return [*out, "", f"![{title}: time a step beside the hand-written loop](benchmarks/{topology}.svg)"]


def _elsewhere(rows: dict[str, Cell]) -> list[str]:
    """A sentence for each processor of its own that models of a table were measured on."""
    names = dict.fromkeys(cell.processor for cell in rows.values() if cell.processor)
    return [f"On {name}: {', '.join(w for w, cell in rows.items() if cell.processor == name)}." for name in names]


def _about(topology: str) -> str:
    text = {
        "one": "All cores, one process. Ratios are to the hand-written loop: plain tf.data, no strategy, many steps in "
        "one `tf.function`, metrics on. Below 1 is faster than the loop.",
        "mirrored-2": "Two logical CPU devices share the cores of one process: this shows the cost of replicas, not "
        "their gain. The hand-written loop splits each batch in the graph and sums the gradients in one all-reduce; "
        "BatchNormalization is synchronized for all.",
        "workers-2": "Two processes on loopback, each with half of the cores. In the hand-written loop each worker "
        "reads only its rows, there is one all-reduce per step, and BatchNormalization is synchronized.",
    }
    return text[topology]


def _times(cell: Cell, peer: str) -> str:
    row, ratio = cell.row(peer), cell.ratio(peer)
    if ratio:
        return f"{ratio.median:.2f} [{ratio.lower:.2f}, {ratio.upper:.2f}]"
    if cell.is_compared(peer):
        return _us(cell.step_us(peer)) + " us"  # no hand-written loop to compare with
    return {"other result": f"not compared: {row.get('message', '')}", "failed": "fails"}.get(
        row.get("status", ""), row.get("status", "")
    )


def _scaling(found: dict[tuple[str, str], Cell]) -> list[str]:
    heads = ["model", "loop", "2 replicas over 1", "2 workers over 1", "network's share", "collectives a step, a call"]
    rows = []
    for work in WORKS:
        for peer in (REFERENCE, *OURS, "torch-ddp"):
            row = _scales(found, work, peer)
            if any(row):
                rows.append(_row(work, PEERS[peer].label, *row))
    if not rows:
        return []
    text = (
        "Speed of two over speed of one, on the same global batch. At best it is 1 for two replicas, which share the "
        "cores of one, and 2 for two workers, which have twice the cores. Figures from different processors are left "
        "out. The network's share is the time that two separate processes, each with half of the batch, do not need. "
        "Collectives are those of the compiled loop, in a step and in a call of many steps. Bytes are what both "
        "workers send over loopback in a step, TCP included; in brackets the bytes of all gradients."
    )
    head = _head([*heads, "bytes a step (gradients)"])
    return ["", "## Scaling", "", text, "", *head, *rows, "", "![Scaling](benchmarks/scaling.svg)"]


def scale(found: dict[tuple[str, str], Cell], work: str, peer: str, kind: str) -> float | None:
    """Speed on two over speed on one; from two cells, so not round by round."""
    alone = "torch-eager" if peer == "torch-ddp" else peer
    one, two = found.get((f"{kind}-1", work)), found.get((f"{kind}-2", work))
    if not (one and two and one.is_compared(alone) and two.is_compared(peer)) or one.processor != two.processor:
        return None
    return one.step_us(alone).median / two.step_us(peer).median


def _scales(found: dict[tuple[str, str], Cell], work: str, peer: str) -> list[str]:
    cell = found.get(("workers-2", work))
    share = met = sent = ""
    if cell and cell.is_compared(peer):
        share = _number(cell.network_share(peer), "{:.0%}")
        counted = cell.row(peer).get("collectives")
        met = f"{counted['a_step']}, {counted['a_call']}" if counted else ""
        count = cell.network_bytes(peer)
        sent = f"{count:,.0f} ({4 * cell.row(peer)['parameters']:,})" if count else ""
    speeds = [scale(found, work, peer, kind) for kind in ("mirrored", "workers")]
    return [*("" if speed is None else f"{speed:.2f}" for speed in speeds), share, met, sent]


def _memory(found: dict[tuple[str, str], Cell]) -> list[str]:
    text = "Peak resident memory of one process, MiB, libraries included."
    return _by_peer("Memory", text, found, lambda cell, peer: _number(cell.peak_mib(peer), "{:.0f}"))


def _starting(found: dict[tuple[str, str], Cell], startup: dict[str, dict]) -> list[str]:
    out = []
    if startup:
        out += [
            "",
            "## Starting",
            "",
            "Seconds from the start to the end of a process. The commands take turns.",
            "",
            *_head(["command", "seconds", "CPU seconds"]),
        ]
        for name, row in startup.items():
            wall, cpu = (Spread.of(row.get(key, [])) for key in ("seconds", "cpu_s"))
            out.append(_row(f"`{name}`", row.get("message") or _span(wall), _span(cpu)))
    text = (
        "Seconds from the start of the process to the end of the first step: imports, tracing, compiling; once a run."
    )
    first = _by_peer(
        "Time to the first step", text, found, lambda cell, peer: _number(cell.row(peer).get("first_step_s"), "{:.1f}")
    )
    text = "Milliseconds of a `fit` of one step, on a model that was trained before."
    again = _by_peer("Starting `fit` again", text, found, _again)
    return out + first + again


def _again(cell: Cell, peer: str) -> str:
    spread = Spread.of(cell.row(peer).get("fit_of_one_step_s", []))
    return _span(spread.scaled(1e3), "{:.1f}") if spread else ""


def _by_peer(title: str, text: str, found: dict[tuple[str, str], Cell], value) -> list[str]:
    """A table with a row a peer and topology, and a column a model; without the rows that say nothing."""
    rows = []
    for topology in TOPOLOGIES:
        for peer in PEERS.values():
            each = [found.get((topology, work)) for work in WORKS]
            shown = [value(cell, peer.name) if cell else "" for cell in each]
            if any(shown):
                rows.append(_row(topology, peer.label, *shown))
    return ["", f"## {title}", "", text, "", *_head(["topology", "peer", *WORKS]), *rows] if rows else []


def _everything(found: dict[tuple[str, str], Cell]) -> list[str]:
    if not found:
        return ["", "Nothing has been measured yet."]
    heads = ["topology", "model", "peer", "us/step", "quartiles", "rounds", "parameters", "losses apart", "remarks"]
    out = ["", "## Every figure", "", *_head(heads)]
    for (topology, work), cell in found.items():
        for name in cell.names():
            row, spread = cell.row(name), cell.step_us(name)
            quartiles = f"{spread.lower:,.0f} to {spread.upper:,.0f}" if spread else ""
            apart = _number(row.get("loss_difference"), "{:.0e}")
            remarks = [row["message"].replace("|", "/")[:160]] if row.get("message") else []
            if row.get("status") == "other result":
                remarks.insert(0, reason(topology, work, name))
            remarks += [row["status"]] if row.get("status") not in ("measured", None) else []
            many = row.get("steps_per_execution")
            remarks += [f"`steps_per_execution={many}`"] if many else []
            figures = (_us(spread), quartiles, len(row.get("seconds", [])), row.get("parameters", ""), apart)
            out.append(_row(topology, work, PEERS[name].label, *figures, "; ".join(filter(None, remarks[::-1]))))
    return out


def _us(spread: Spread | None) -> str:
    return f"{spread.median:,.0f}" if spread else ""


def _span(spread: Spread | None, form: str = "{:.2f}") -> str:
    if spread is None:
        return ""
    return f"{form.format(spread.median)} [{form.format(spread.lower)}, {form.format(spread.upper)}]"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


def _row(*values: object) -> str:
    return f"| {' | '.join(map(str, values))} |"


def _head(names: list[str]) -> list[str]:
    return [_row(*names), "|" + "---|" * len(names)]
