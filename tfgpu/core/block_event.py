"""The event that marks a block of steps in traces of TensorFlow's profiler."""

import tensorflow as tf

STEPS = "tfgpu.steps"
"""Its name; its stats are `step_num`, `steps`, `kind`, `set_by` and `jit`."""


def steps_begin(done: int, count: int, kind: str, set_by: str, *, jit: bool) -> tf.profiler.experimental.Trace:
    """Marks a block of steps in traces; takes a microsecond without a profiler.

    Args:
        done: number of steps before it.
        count: number of its steps.
        kind: `"train"` or `"test"`.
        set_by: what determined that number (`step_blocks.set_by`).
        jit: whether XLA compiles the step, or may.
    """
    about = dict(steps=count, kind=kind, set_by=set_by, jit=int(jit))
    return tf.profiler.experimental.Trace(STEPS, step_num=done, **about, _r=1)
