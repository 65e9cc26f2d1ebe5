"""Gradient accumulation under replicas."""

from tfgpu.optim import gradient_accumulation
from tfgpu.repairs import Repair
from tfgpu.repairs.optimizers import accumulation_fails

REPAIRS = (
    Repair(
        name="local-accumulation",
        fault="accumulated gradients are summed over replicas in every batch, or crash",
        issue="https://github.com/keras-team/keras/issues/20582",
        probe=accumulation_fails,
        apply=gradient_accumulation.accumulate_on_each_replica,
    ),
)
