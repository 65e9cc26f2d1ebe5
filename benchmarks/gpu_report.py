"""The GPU's part of docs/measured/benchmarks.md, and the lines that benchmarks/gpu.py prints."""

from dataclasses import replace

from benchmarks.figures import Spread
from benchmarks.gpu_cells import ANCHOR_SOURCE, ANCHORS, CELLS, GpuCell

_HEADS = ("path", "precision", "XLA", "input", "device", "CUDA graphs", "batch", "images/s", "first epoch s", "GPU MiB")


def table(found: dict) -> list[str]:
    """Rows of Markdown: what was measured, best first."""
    rows = {name: row for name, row in found.get("cells", {}).items() if name in CELLS}
    known = {name: Spread.of(row.get("images_per_s", [])) for name, row in rows.items()}
    order = sorted(rows, key=lambda name: -(known[name].median if known[name] else 0))
    lines = [f"| {' | '.join(_HEADS)} |", "|" + "---|" * len(_HEADS)]
    for name in order:
        cell, row, rate = CELLS[name], rows[name], known[name]
        shown = f"{rate.median:,.0f} [{rate.lower:,.0f}, {rate.upper:,.0f}]" if rate else row.get("message", "")[:120]
        memory = f"{row['peak_gpu_bytes'] / 2**20:,.0f}" if row.get("peak_gpu_bytes") else ""
        first = f"{row['first_epoch_s']:.0f}" if row.get("first_epoch_s") else ""
        setting = (cell.path, cell.precision, "on" if cell.xla else "off", cell.data, cell.device, cell.graphs)
        lines.append(f"| {' | '.join(map(str, (*setting, row.get('batch', ''), shown, first, memory)))} |")
    return lines


def remarks(found: dict) -> list[str]:
    """The ratios that matter, of what was measured."""

    def median(**setting):
        cell = replace(GpuCell(), **setting)
        spread = Spread.of(found.get("cells", {}).get(cell.name, {}).get("images_per_s", []))
        return spread.median if spread else None

    pairs = {
        "`fit` over the hand-written loop": (median(), median(path="hand")),
        "XLA on over off (mixed_float16)": (median(), median(xla=False)),
        "mixed_float16 over float32, both without XLA": (median(xla=False), median(precision="float32", xla=False)),
        "TF32 over float32, both without XLA": (
            median(precision="tf32", xla=False),
            median(precision="float32", xla=False),
        ),
        "JPEG input over synthetic": (median(data="jpeg"), median()),
        "all operations in CUDA graphs over none": (median(graphs="all"), median(graphs="none")),
        "GPU over CPU, both float32": (
            median(precision="float32", xla=False),
            median(device="cpu", precision="float32", xla=False, batch=32),
        ),
    }
    lines = [f"- {name}: {one / other:.2f}" for name, (one, other) in pairs.items() if one and other]
    best = median()
    for device, rate in ANCHORS.items():
        beside = f"; `fit` here with the same settings: {best:,.0f} ({best / rate:.2f} times as many)" if best else ""
        lines.append(f"- published for one {device}, mixed precision and XLA: {rate:,} images/s{beside}")
    return lines


def section(found: dict) -> list[str]:
    """The section of the page."""
    facts = found.get("facts", {})
    versions = ", ".join(f"{name} {version}" for name, version in facts.get("versions", {}).items())
    text = "Made with `--tiny`: a small model, and figures that mean nothing. " if found.get("tiny") else ""
    text += (
        f"ResNet-50 (version 1.5) on 224x224 pictures, SGD with momentum, metrics on, on {facts.get('device', '?')} "
        f"with {versions}. Images a second are the median and the quartiles over epochs of some steps; each cell has a "
        f"separate process. Published figures: {ANCHOR_SOURCE}."
    )
    return ["", "## GPU", "", text, "", *table(found), "", *remarks(found)]
