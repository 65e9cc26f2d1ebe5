"""One epoch as blocks of steps: each block is one call of a compiled loop, and callbacks run between the blocks.

`Steps.run(iterator, num_steps)` decides how a block runs; the code here decides when.
"""

import time
from collections.abc import Callable, Mapping

import keras

MOST_STEPS = 1024
BLOCK_S = 0.1
"""Blocks grow to about this many seconds: rare enough for speed, often enough for progress bars and Ctrl-C."""
STEPS_ACROSS_PROCESSES = 16
"""Workers must agree on a block's length, so it does not follow their clocks."""


class Pace:
    """How many steps the next block has. It changes when callbacks run, and never what is learned.

    Args:
        steps: a fixed number, or None: 1 doubled until a block takes `BLOCK_S`.
    """

    def __init__(self, steps: int | None = None):
        self._is_fixed = steps is not None
        self.steps = steps or 1

    def note(self, done: int, seconds: float) -> None:
        """Takes in how long a block took."""
        if not self._is_fixed and done == self.steps and seconds < BLOCK_S / 2:
            self.steps = min(2 * self.steps, MOST_STEPS)


def run_epoch(
    batches,
    steps,
    pace: Pace,
    *,
    before: Callable[[int], None],
    after: Callable[[int, Mapping], bool],
) -> dict:
    """Runs one epoch.

    Args:
        batches: where the data comes from, a `tfgpu.keras_fixes.inputs.Batches`.
        steps: what runs on it, a `tfgpu.keras_fixes.trainer.Steps`.
        pace: the length of the blocks.
        before: called with the number of a block's first step.
        after: called with the number of a block's last step and the logs after it; True ends the epoch.

    Returns:
        The logs after the last step; empty where there was no data.
    """
    limit, logs, ended = batches.steps, {}, False
    at = batches.begin_epoch()
    while not ended and (limit is None or at < limit):
        count = pace.steps if limit is None else min(pace.steps, limit - at)
        started = time.perf_counter()
        before(at)
        done, new = batches.run(steps, count)
        if done == 0:
            break
        at, logs = at + done, new
        ended = after(at - 1, logs) or done < count
        pace.note(done, time.perf_counter() - started)
    batches.end_epoch(is_short=limit is not None and at < limit)
    return logs


def needs_every_batch(callback: keras.callbacks.Callback) -> bool:
    """Whether a callback looks at single batches, so that it must be called after each.

    A callback of one's own that can do with blocks says so by an attribute `every_batch = False`.
    """
    if hasattr(callback, "every_batch"):
        return callback.every_batch
    for attribute in ("save_freq", "update_freq"):  # ModelCheckpoint, BackupAndRestore, TensorBoard
        if hasattr(callback, attribute):
            return getattr(callback, attribute) != "epoch"
    if isinstance(callback, (keras.callbacks.History, keras.callbacks.ProgbarLogger)):
        return False
    stock = keras.callbacks.Callback()
    hooks = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    # By function, because LambdaCallback puts its hooks on the instance.
    return any(_function(callback, hook) is not _function(stock, hook) for hook in hooks)


def _function(callback: keras.callbacks.Callback, name: str):
    hook = getattr(callback, name)
    return getattr(hook, "__func__", hook)
