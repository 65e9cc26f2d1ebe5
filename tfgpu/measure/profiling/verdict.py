"""The verdict: what limits the steps, from the shares of their time; and the report."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from tfgpu.measure.profiling import findings, knobs, reading, sorting
from tfgpu.measure.profiling.findings import Finding, Seen, pauses
from tfgpu.measure.profiling.hooks import Around
from tfgpu.measure.profiling.reading import Gap, Shares, Top, Window
from tfgpu.measure.profiling.sorting import Sorted
from tfgpu.measure.profiling.stages import InputStage, input_stages
from tfgpu.measure.profiling.trace import Span, Trace

SPEAKING = {
    "input-bound": ("slow_map", "slow_input", "unsharded_input"),
    "communication-bound": ("slow_collectives",),
    "launch-bound": ("tiny_batch", "batch_callback"),
    "python-bound": ("host_read", "eager_step", "python_in_step", "work_between_steps", "batch_callback"),
    "compile-bound": ("retracing", "recompiling"),
}
"""The findings that already give advice for a verdict."""

_ADVICE = {
    "input-bound": (
        "waiting_for_input",
        "the model waits for its next batch, or for the copy of the batch to the device.",
        ".prefetch(tf.data.AUTOTUNE) as the last stage; transfer images as uint8, and cast and scale them on the "
        "device; `tfgpu profile input` measures each setting of the input.",
    ),
    "communication-bound": (
        "communication",
        "collectives run and nothing computes: the largest overhead.",
        "a larger batch per replica, which changes the result; same result: compile(..., "
        "gradient_accumulation_steps=4) with smaller batches.",
    ),
    "launch-bound": (
        "launching",
        "a step runs and nothing computes: operations wait to be launched.",
        "If other processes use the CPU, profile again without them.",
    ),
    "python-bound": ("python_time", "Python runs and nothing computes.", ""),
    "compile-bound": (
        "compiling",
        "graphs are traced and compiled, which happens once for each shape.",
        "record later and more steps: --skip 20 --calls 100. If it remains: .batch(n, drop_remainder=True) keeps "
        "shapes constant; compile(jit_compile=False) disables XLA.",
    ),
}
"""By verdict: the finding's name, what happens meanwhile, and what to try."""
NAMES = tuple(name for name, *_ in _ADVICE.values())


def general(verdict: str, share: float, seen: Seen, found: Sequence[Finding]) -> list[Finding]:
    """Returns advice for a verdict, unless a rule has already given some.

    Args:
        verdict: what limits the steps.
        share: the share of the time behind the verdict.
        seen: the input of the rules.
        found: their findings.

    Returns:
        One finding, or none.
    """
    if verdict not in _ADVICE or any(one.name in SPEAKING[verdict] for one in found):
        return []
    name, happens, knob = _ADVICE[verdict]
    text = f"For {share:.0%} of the time {happens}"
    if verdict == "launch-bound":
        knob = f"{knobs.launches(seen.window)} {knob}".strip()
    elif verdict == "python-bound":
        knob, between = knobs.python(seen.window), pauses(seen)
        if between and max(between) > sum(between) / 2 and sum(between) > seen.shares["python"] * seen.window.length:
            text += " Most of it is a single pause, such as the end of an epoch."
            knob = f"record more steps, so that it gets its real weight: --calls 100 --seconds 20. {knob}"
    return [Finding(name, text, knob, "", share, {"share": share})]


_FIRST = re.compile(r"\[([^,\]]*)[^\]]*\]|<unknown>")
ENOUGH = 2 / 3
"""Steps that compute for at least this share of their time are compute-bound."""
OVERHEADS = {
    "launch-bound": ("launch",),
    "python-bound": ("python", "between", "copy out"),
    "compile-bound": ("compile", "graphs"),
}
"""The kinds of overhead, by verdict."""
CAUSES = {
    "input-bound": ("input", "copy in"),
    "communication-bound": ("communication",),
    "overhead": tuple(part for parts in OVERHEADS.values() for part in parts),
}
"""The causes other than computing, and their parts of the time."""


def bound(shares: Shares) -> str:
    """Returns what limits the steps.

    They are compute-bound if they compute for two thirds of the time. Otherwise the largest other cause counts: input,
    communication, or overhead, which is named after its largest kind.

    Args:
        shares: where the time went.

    Returns:
        `"input-bound"`, `"launch-bound"`, `"python-bound"`, `"compile-bound"`, `"compute-bound"`,
        `"communication-bound"`, or `"unknown"` without any time.

    Example:
        >>> bound(Shares({"compute": 0.5, "input": 0.3, "launch": 0.2}, device=False))
        'input-bound'
    """
    if not any(shares.parts.values()):
        return "unknown"
    if shares["compute"] >= ENOUGH:
        return "compute-bound"
    cause = _greatest(CAUSES, shares)
    return _greatest(OVERHEADS, shares) if cause == "overhead" else cause


def _greatest(causes: dict[str, tuple[str, ...]], shares: Shares) -> str:
    return max(causes, key=lambda name: sum(shares[part] for part in causes[name]))


@dataclass(frozen=True)
class Report:
    """The result of a profile.

    Args:
        verdict: the result of `bound`.
        shares: where the time of the steps went.
        window: the steps.
        findings: the problems found, the largest first.
        top: the operations that took longest.
        gaps: the longest times in which nothing computed.
        tensor_cores: shares of the kernel time on Tensor Cores, and that could run there; None without a GPU.
        stages: the stages of the input, the busiest first.
        around: facts of the process.
        unknown: sentences on what this trace cannot show.
        batch: rows of a step; None if unknown.
        parts: the spans of each part of the time, on the first device or the host.
    """

    verdict: str
    shares: Shares
    window: Window
    findings: tuple[Finding, ...]
    top: tuple[Top, ...]
    gaps: tuple[Gap, ...]
    tensor_cores: tuple[float, float] | None
    stages: tuple[InputStage, ...]
    around: Around
    unknown: tuple[str, ...]
    batch: int | None = None
    parts: dict[str, list[Span]] = field(default_factory=dict, repr=False)

    @property
    def step_s(self) -> float | None:
        """Average seconds per step; None if the trace does not mark steps."""
        return self.window.length / 1e9 / self.window.steps if self.window.steps else None

    def as_json(self) -> dict[str, Any]:
        """Returns JSON-compatible values."""
        on, could = self.tensor_cores or (None, None)
        return {
            "verdict": self.verdict,
            "shares": {name: round(self.shares[name], 4) for name in reading.PARTS},
            "device_trace": self.shares.device,
            "steps": self.window.steps,
            "step_s": self.step_s,
            "batch": self.batch,
            "steps_marked_by": self.window.marked_by,
            "findings": [asdict(one) for one in self.findings],
            "tensor_core_share": on,
            "tensor_core_could": could,
            "top": [asdict(one) for one in self.top],
            "gaps": [asdict(one) for one in self.gaps],
            "input_stages": [asdict(one) | {"busy_s": one.busy_s} for one in self.stages],
            "unknown": list(self.unknown),
            "around": self.around.as_json(),
        }


def judge(trace: Trace, look: Callable[[set[str]], Around] | None = None) -> Report:
    """Analyzes a trace.

    Args:
        trace: from `trace.read`.
        look: returns the facts of the process, given the names of the retraced tf.functions; None for a trace of
            another process.

    Returns:
        The report.
    """
    found = sorting.sort(trace)
    around = look({call.name for call in found.calls if call.traced}) if look else Around()
    window = reading.window(found, trace.length)
    divisions = {name: reading.divided(found, window, name) for name in list(found.kernels) or ["host"]}
    shares = reading.shares(divisions, window, device=bool(found.kernels))
    parts = next(iter(divisions.values()))
    stages = input_stages(trace.host)
    cores = reading.tensor_core_share(found, window)
    batch = around.batch or _batch(trace)
    work = [one for each in found.kernels.values() for one in each] or found.operations
    seen, name = Seen(found, window, shares, stages, cores, around, batch), bound(shares)
    rules = findings.judge(seen)
    caused = sum(shares[part] for part in (CAUSES | OVERHEADS).get(name, ()))
    more = general(name, caused, seen, rules)
    problems = tuple(sorted([*rules, *more], key=lambda finding: -(finding.share or 0)))
    top, gaps, unknown = reading.top(work, window), reading.gaps(parts, window), _unknown(found, window, shares, around)
    return Report(name, shares, window, problems, top, gaps, cores, stages, around, unknown, batch, parts)


def _batch(trace: Trace) -> int | None:
    """The batch size: of the stage that makes most batches, or the common first size of an element's tensors."""
    counts: Counter[int] = Counter()
    rooted: set[int] = set()
    for line in trace.host:
        for event in line.events:
            if event.name.startswith("Iterator::") and "batch_size" in event.stats:
                counts[int(event.stats["batch_size"])] += 1
            elif event.name == "Iterator::Root" and not counts:
                shapes = _FIRST.findall(str(event.stats.get("shapes", "")))
                rooted |= {int(size) if size.isdecimal() else 0 for size in shapes}
    if counts:
        return counts.most_common(1)[0][0]
    return next(iter(rooted)) or None if len(rooted) == 1 else None


def _unknown(found: Sorted, window: Window, shares: Shares, around: Around) -> tuple[str, ...]:
    texts = []
    if window.steps is None:
        texts.append("The trace does not mark steps: the shares cover the whole recorded time.")
    if not shares.device:
        texts.append(
            "No GPU was recorded: computing means operations on the host, and Tensor Cores, kernels and gaps between "
            "kernels are unknown."
        )
        if any(name.startswith("GPU") for name in around.devices):
            texts.append(
                "There is a GPU, but without CUPTI, or if another profiler runs, TensorFlow does not record its work."
            )
    if not found.kernels and not found.operations:
        texts.append("No operation of the model was recorded.")
    if around.workers > 1:
        texts.append("This is one of several workers: profile the others to see what they wait for.")
    return tuple(texts)
