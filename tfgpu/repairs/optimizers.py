"""Optimizers under replicas."""

from tfgpu.core import gradients
from tfgpu.repairs import probing
from tfgpu.repairs.repair import Repair


def clipping_differs() -> bool:
    """Whether gradients are clipped before they are summed."""
    return probing.differs(rows=2, optimizer={"global_clipnorm": 0.1})


def accumulation_fails() -> bool:
    """Whether gradient accumulation crashes or gives other weights."""
    return probing.differs(rows=2, optimizer={"gradient_accumulation_steps": 2})


REPAIRS = (
    Repair(
        name="gradients-meet-first",
        fault="gradients are clipped, checked and accumulated on each replica before they are summed",
        issue="https://github.com/keras-team/keras/issues/20582",
        probe=clipping_differs,
        apply=gradients.sum_before_applying,
    ),
    Repair(
        name="local-updates",
        fault="accumulation and moving averages call merge_call inside a condition and crash",
        issue="https://github.com/keras-team/keras/issues/20582",
        probe=accumulation_fails,
        apply=gradients.apply_on_every_replica,
    ),
)
