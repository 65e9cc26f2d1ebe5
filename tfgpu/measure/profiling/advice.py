"""General advice for each verdict, for traces in which no rule has found the cause."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

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


class _Advice(NamedTuple):
    name: str
    seen: str
    knob: str


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
    name, text, knob = _ADVICE[verdict](seen, f"{share:.0%}")
    return [Finding(name, text, knob, "", share, {"share": share})]


def _input(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time the model waits for its next batch, or for the copy of the batch to the device."
    knob = (
        ".prefetch(tf.data.AUTOTUNE) as the last stage; transfer images as uint8, and cast and scale them on the "
        "device; `tfgpu profile input` measures each setting of the input."
    )
    return _Advice("waiting_for_input", text, knob)


def _communication(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time collectives run and nothing computes: the largest overhead."
    knob = (
        "a larger batch per replica, which changes the result; same result: compile(..., "
        "gradient_accumulation_steps=4) with smaller batches."
    )
    return _Advice("communication", text, knob)


def _launch(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time a step runs and nothing computes: operations wait to be launched."
    knob = f"{knobs.launches(seen.window)} If other processes use the CPU, profile again without them."
    return _Advice("launching", text, knob.strip())


def _python(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time Python runs and nothing computes."
    between = pauses(seen)
    if between and max(between) > sum(between) / 2 and sum(between) > seen.shares["python"] * seen.window.length:
        text += " Most of it is a single pause, such as the end of an epoch."
        knob = "record more steps, so that it gets its real weight: --calls 100 --seconds 20. "
        return _Advice("python_time", text, knob + knobs.python(seen.window))
    return _Advice("python_time", text, knobs.python(seen.window))


def _compile(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time graphs are traced and compiled, which happens once for each shape."
    knob = (
        "record later and more steps: --skip 20 --calls 100. If it remains: .batch(n, drop_remainder=True) keeps "
        "shapes constant; compile(jit_compile=False) disables XLA."
    )
    return _Advice("compiling", text, knob)


_ADVICE: dict[str, Callable[[Seen, str], _Advice]] = {
    "input-bound": _input,
    "communication-bound": _communication,
    "launch-bound": _launch,
    "python-bound": _python,
    "compile-bound": _compile,
}
NAMES = ("waiting_for_input", "communication", "launching", "python_time", "compiling")
"""The names of these findings."""
