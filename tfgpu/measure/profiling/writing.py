"""The files of a profile: the verdict as text and JSON, and a page with charts."""

import json
from pathlib import Path

from tfgpu import atomic
from tfgpu.errors import InputError
from tfgpu.measure.profiling import drawing
from tfgpu.measure.profiling.drawing import WORDS
from tfgpu.measure.profiling.reading import PARTS
from tfgpu.measure.profiling.verdict import Report

FILES = ("verdict.txt", "verdict.json", "profile.html")


def create_folder(folder: Path) -> None:
    """Creates the folder, before anything is recorded.

    Raises:
        InputError: it, or one of its parents, is a file, or it cannot be created.
    """
    nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not nearest.is_dir():
        raise InputError(f"The output must be a folder. Received: {str(folder)!r}, but {nearest} is a file.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"Cannot write in {str(folder)!r}: {error.strerror}. Use an output in a writable directory."
        ) from None


def write(report: Report, folder: Path) -> None:
    """Writes all files of a report to a folder that exists."""
    atomic.write_text(folder / "verdict.txt", text(report) + "\n")
    atomic.write_text(folder / "verdict.json", json.dumps(report.as_json(), indent=2) + "\n")
    atomic.write_text(folder / "profile.html", drawing.page(report, text(report)))


def text(report: Report) -> str:
    """Formats the report as text: the verdict, the shares, each finding with its advice, what is unknown."""
    seen = [name for name in PARTS if report.shares[name] >= 0.005]
    shares = ", ".join(f"{report.shares[name]:.0%} {WORDS[name]}" for name in seen)
    lines = [f"Verdict: {report.verdict}.", f"Where the time went: {shares or 'nothing was recorded'}."]
    if report.step_s is not None:
        rows = f", batches of {report.batch}" if report.batch else ""
        lines.append(f"{report.window.steps} steps of {1e3 * report.step_s:.3g} ms on average{rows}.")
    if report.tensor_cores is not None:
        on, could = report.tensor_cores
        lines.append(f"Tensor Cores: {on:.0%} of the kernel time; {could:.0%} multiplies matrices.")
    lines.append("")
    if not report.findings:
        lines.append("No known problem was found.")
    for number, finding in enumerate(report.findings, 1):
        where = f" at {finding.where}" if finding.where else ""
        lines += [f"{number}. {finding.name}{where}", f"   {finding.seen}", f"   Try: {finding.knob}"]
    lines += ["", "The longest operations:"]
    lines += [f"  {one.share:4.0%}  {one.runs:6,} x {one.kind}  {one.name}" for one in report.top[:5]] or ["  none"]
    lines += ["The longest times in which nothing computed:"]
    lines += [f"  {1e3 * gap.seconds:.3g} ms: {WORDS[gap.during]}" for gap in report.gaps[:3]] or ["  none"]
    if report.unknown:
        lines += ["", *report.unknown]
    return "\n".join(lines)
