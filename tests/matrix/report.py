"""The matrix as text and as Markdown, from the cells that run.py measured."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path

from cases import table
from driver import PATHS, TOPOLOGIES

KNOWN = Path(__file__).with_name("known.json")
ENDS = ("equal", "refused", "differs", "crashes", "dies", "hangs", "no reference")
INTRO = """# The same result on every number of replicas

Written by `make matrix`. A figure is the largest difference from one device (stock Keras, no strategy) in final
weights, iterations, logs, `evaluate` and `predict`, after two epochs with the same seed and global batch (relative
to values above 1). Equal means at most 1e-5 (`bound`). For mixed precision and whatever else amplifies rounding, the
bound is twice the difference that one device has from itself when its sums are re-ordered. **Bold** is not equal:
`crashes` raises, `dies` ends the process, `hangs` does not end. Replicas are logical CPU devices; workers are real
processes on loopback. Measured on {machine}
with Python {python}, TensorFlow {tensorflow} and Keras {keras}.

One setting gives up equality on request: with `tfgpu.strategy(..., batch_norm="replica")`, BatchNormalization uses
each replica's own rows. No case here uses it.

`fit` is `model.fit`. `loop` is a hand-written `strategy.run` with
`optimizer.apply_gradients` that divides its loss by the global batch; `loop-mean` uses the mean of the Keras loss.
`sharded` is `fit` with `tfgpu.parallel.shard(model, stage=3)`; `refused` is an error that says what `stage=3` does not
support, and what to do instead.
"""


def label(repair):
    return "stock" if repair == "stock" else "tfgpu"


def counted(column):
    """How many cells of a column ended in each way."""
    return {end: sum(cell.status == end for cell in column.values()) for end in ENDS}


def red(cells):
    """Every cell that is neither equal nor refused, with its column."""
    ends = "equal", "refused"
    return [(*key, n, c) for key, column in cells.items() for n, c in column.items() if c.status not in ends]


def surprises(cells):
    """Cells of ours that are not equal to one device, but for those that `known.json` lists with the reason."""
    known = json.loads(KNOWN.read_text())
    return [
        f"{path} {topology} {name}: {cell.status} {cell.message}"
        for path, repair, topology, name, cell in red(cells)
        if repair != "stock" and not any(k in known for k in (name, f"{path} {name}", f"{path} {topology} {name}"))
    ]


def text(cells):
    """The table, every cell that is not equal, and totals."""
    names = list(dict.fromkeys(n for column in cells.values() for n in column))
    heads = [f"{path} {label(repair)} {topology}" for path, repair, topology in cells]
    out = [" " * 34 + "".join(f"  {head}" for head in heads)]
    for name in names:
        shown = [_short(column.get(name)) for column in cells.values()]
        out.append(f"{name:34s}" + "".join(f"{s:>{len(h) + 2}s}" for s, h in zip(shown, heads, strict=True)))
    out += ["", *[f"{p} {label(r)} {t} {n}: {c.status} {c.message}" for p, r, t, n, c in red(cells)], ""]
    for head, column in zip(heads, cells.values(), strict=True):
        ends = ", ".join(f"{n} {end}" for end, n in counted(column).items() if n)
        out.append(f"{head}: {len(column)} cases: {ends}")
    return "\n".join(out)


def _short(cell):
    if cell is None:
        return "-"
    return {"equal": "{:.0e}", "differs": "{:.0e} !"}.get(cell.status, cell.status).format(cell.value)


def document(cells):
    """The table in Markdown: totals, one section a path and group, and what is not equal with tfgpu."""
    facts = {name: metadata.version(name) for name in ("tensorflow", "keras")}
    machine = f"{os.cpu_count()} CPU cores ({platform.machine()})"
    columns = {key: cells[key] for key in sorted(cells, key=_order) if key[2] != "one"}
    out = [INTRO.format(machine=machine, python=platform.python_version(), **facts)]
    out += [_row("path", "topology", "cases", "stock Keras", "tfgpu"), _rule(5)]
    for path, topology in dict.fromkeys((path, topology) for path, _, topology in columns):
        both = {label(r): column for (p, r, t), column in columns.items() if (p, t) == (path, topology)}
        told = (_told(both[name]) if name in both else "" for name in ("stock", "tfgpu"))
        out.append(_row(path, topology, len(next(iter(both.values()))), *told))
    for path in dict.fromkeys(path for path, _, _ in columns):
        out += _sections(path, {key: column for key, column in columns.items() if key[0] == path})
    return "\n".join([*out, *_not_equal(columns)]) + "\n"


def _order(key):
    path, repair, topology = key
    return PATHS.index(path), list(TOPOLOGIES).index(topology), repair != "stock"


def _told(column):
    return ", ".join(f"{n} {end}" for end, n in counted(column).items() if n)


def _not_equal(columns):
    """A row for each case of ours that is not equal, with the columns where it is not."""
    known = json.loads(KNOWN.read_text())
    found = {}
    for path, repair, topology, name, cell in red(columns):
        if repair != "stock":
            found.setdefault(name, {}).setdefault(path, {})[topology] = cell
    yield from ("", "## What is not equal with tfgpu", "", _row("case", "where", "worst", "why"), _rule(4))
    for name, paths in found.items():
        where = "; ".join(f"{path}: {', '.join(cells)}" for path, cells in paths.items())
        worst = max((cell for cells in paths.values() for cell in cells.values()), key=lambda cell: cell.value or 0)
        keys = [k for p, cells in paths.items() for t in cells for k in (f"{p} {t} {name}", f"{p} {name}", name)]
        why = next((known[key] for key in keys if key in known), "")
        yield _row(name, where, f"{worst.status}: {worst.message}".replace("|", "/"), why)


def _sections(path, columns):
    known = table()
    names = [name for name in known if any(name in column for column in columns.values())]
    for group in dict.fromkeys(known[name].group for name in names):
        heads = [f"{topology} {label(repair)}" for _, repair, topology in columns]
        yield from ("", f"## {path}: {group}", "", _row("case", "bound", *heads), _rule(2 + len(heads)))
        for name in (name for name in names if known[name].group == group):
            row = [column.get(name) for column in columns.values()]
            bound = max((cell.bound for cell in row if cell), default=0.0)
            yield _row(name, f"{bound:.0e}", *map(_marked, row))


def _marked(cell):
    if cell is None:
        return ""
    return {"equal": "{:.0e}", "differs": "**{:.0e}**"}.get(cell.status, f"**{cell.status}**").format(cell.value)


def _row(*values):
    return f"| {' | '.join(map(str, values))} |"


def _rule(count):
    return "|" + "---|" * count
