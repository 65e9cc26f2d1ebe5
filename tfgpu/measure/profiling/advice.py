"""General advice for each verdict, for traces in which no rule has found the cause."""

from collections.abc import Sequence

from tfgpu.measure.profiling import knobs
from tfgpu.measure.profiling.findings import Finding, Seen, pauses

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
