"""What helps against each verdict where no rule has seen its reason: a verdict never stands without a knob."""

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
"""The findings of rules whose knobs help against a verdict."""


class _Advice(NamedTuple):
    name: str
    seen: str
    knob: str


def general(verdict: str, share: float, seen: Seen, found: Sequence[Finding]) -> list[Finding]:
    """Says what helps against a verdict, unless a rule has said so.

    Args:
        verdict: what bounds the steps.
        share: of the time that speaks for it.
        seen: what the rules judged.
        found: what they found.

    Returns:
        One finding, or none.
    """
    if verdict not in _ADVICE or any(one.name in SPEAKING[verdict] for one in found):
        return []
    name, text, knob = _ADVICE[verdict](seen, f"{share:.0%}")
    return [Finding(name, text, knob, "", share, {"share": share})]


def _input(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time the model waits for its next batch, or for the batch's copy to the device."
    knob = (
        ".prefetch(tf.data.AUTOTUNE) as the last stage; what the device can cast or scale itself goes there as uint8; "
        "`tfgpu bench input` tries each setting of the input."
    )
    return _Advice("waiting_for_input", text, knob)


def _communication(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time collectives run and nothing computes: more than any other reason to wait."
    knob = (
        "a larger batch a replica, which changes what is learned; same result: compile(..., "
        "gradient_accumulation_steps=4) with smaller batches."
    )
    return _Advice("communication", text, knob)


def _launch(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time a step runs and nothing computes: operations wait to be launched."
    knob = f"{knobs.launches(seen.window)} Where other processes take the processors, profile again without them."
    return _Advice("launching", text, knob.strip())


def _python(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time Python runs and nothing computes."
    between = pauses(seen)
    if between and max(between) > sum(between) / 2 and sum(between) > seen.shares["python"] * seen.window.length:
        text += " Most of it is a single pause, such as the end of an epoch."
        knob = "record more steps, so that it has its true weight: --calls 100 --seconds 20. "
        return _Advice("python_time", text, knob + knobs.python(seen.window))
    return _Advice("python_time", text, knobs.python(seen.window))


def _compile(seen: Seen, share: str) -> _Advice:
    text = f"For {share} of the time graphs are made and compiled, which comes once for each shape."
    knob = (
        "record later and more steps: --skip 20 --calls 100. If it stays: .batch(n, drop_remainder=True) keeps shapes; "
        "compile(jit_compile=False) leaves XLA out."
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
"""Of its findings."""
