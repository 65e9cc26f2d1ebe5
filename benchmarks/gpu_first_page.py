"""What `gpu_first.py` found, as Markdown: `python -m benchmarks.gpu_first_page docs/measured/gpu.json`."""

import json
import sys
from pathlib import Path

_INTRO = """# One GPU

Written by `python -m benchmarks.gpu_first --write docs/measured/gpu.md` on {device}, {date}. Speed is in
[Benchmarks](benchmarks.md#gpu), and what a step does in [What a step does on GPUs](../explained/gpu.md).
"""
_COPIED = ("copies a step", "bytes a step")
_UNITS = (("MiB", 0), ("milliseconds", 1))  # and how many decimal places are shown


def page(found: dict) -> str:
    """The page of all checks that have a result."""
    checks = {name: check for name, check in found["checks"].items() if "error" not in check}
    sections = {
        "equality": _equality,
        "copies": _copies,
        "seeds": _seeds,
        "attention": _attention,
        "vocabulary": _vocabulary,
    }
    parts = [_INTRO.format(device=found["device"], date=found["date"])]
    return "\n".join(parts + [make(checks) for name, make in sections.items() if name in checks])


def _equality(checks: dict) -> str:
    rows = {**checks["equality"]["difference"], **checks.get("collectives", {}).get("difference", {})}
    return f"""## Two replicas beside one

The largest difference of a weight after two epochs on two halves of one GPU, TF32 off.

{_table(("case", "difference"), [(name, f"{value:.0e}") for name, value in rows.items()])}
"""


def _copies(checks: dict) -> str:
    rows = [(name, *(f"{row[key]:g}" for key in _COPIED)) for name, row in checks["copies"]["to the host"].items()]
    return f"""## Copies to the host

In a step of a small CNN, as TensorFlow's profiler sees them; "by hand" is a loop in a `tf.function`.

{_table(("path", *_COPIED), rows)}
"""


def _seeds(checks: dict) -> str:
    seeds = checks["seeds"]
    rows = [(name, "yes" if same else f"{seeds['difference'][name]:.0e}") for name, same in seeds["equal bits"].items()]
    return f"""## Random numbers from one seed, GPU and CPU

{_table(("draw", "equal bits, or the difference"), rows)}
"""


def _attention(checks: dict) -> str:
    return f"""## Attention

One causal layer of width 512 with 8 heads and padding, forward and backward, float32 without TF32; "blocks" is flash
attention. Peak MiB above what was allocated before the step, and the median of 15 steps in milliseconds.

{_peaks(checks["attention"], "length", ("plain", "blocks"))}
"""


def _vocabulary(checks: dict) -> str:
    parts = [
        f"""### {policy}

{_peaks(measured, "vocabulary", list(dict.fromkeys(name.rpartition(" ")[0] for name in measured["MiB"])))}
"""
        for policy, measured in checks["vocabulary"].items()
        if isinstance(measured, dict)
    ]
    return "\n".join(
        [
            """## Cross-entropy over a large vocabulary

4096 tokens, width 512, a tied embedding, without TF32. "whole" computes all logits at once, the others chunks of
that size.
""",
            *parts,
        ]
    )


def _peaks(measured: dict, what: str, ways: list[str] | tuple[str, ...]) -> str:
    sizes = list(dict.fromkeys(name.rpartition(" ")[2] for name in measured["MiB"]))
    heads = [what, *(f"{way}, {unit}" for way in ways for unit in ("MiB", "ms"))]
    rows = []
    for size in sizes:
        keys = [(measured[unit].get(f"{way} {size}"), places) for way in ways for unit, places in _UNITS]
        shown = [f"{value:,.{places}f}" if isinstance(value, int | float) else str(value) for value, places in keys]
        rows.append((f"{int(size):,}", *shown))
    return _table(heads, rows)


def _table(heads: list[str] | tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


if __name__ == "__main__":
    source = Path(sys.argv[1])
    source.with_suffix(".md").write_text(page(json.loads(source.read_text())))
