"""Callback hooks that run after every callback's own: what a callback saves there is up to date for all of them.

A callback takes part by defining a method of one of these names.

| method | called when |
|---|---|
| `after_train_begin(callbacks)` | every `on_train_begin` has run |
| `after_train_batch(callbacks, batch)` | every `on_train_batch_end` has run; `batch` is the last step that ran |
| `after_epoch(callbacks, epoch)` | every `on_epoch_end` has run, including that of `History` |
| `after_test_batch(callbacks)` | every `on_test_batch_end` has run |

`callbacks` is Keras's `CallbackList`.
"""

from tfgpu.compat import training
from tfgpu.compat.keras import CallbackList
from tfgpu.compat.patch import wrap
from tfgpu.core import step_blocks


def add_after_hooks() -> None:
    """Makes Keras call the methods above."""

    @wrap("CallbackList.on_train_begin")
    def on_train_begin(stock, self, logs=None):
        stock(self, logs)
        for callback in _with(self, "after_train_begin"):
            callback.after_train_begin(self)

    @wrap("CallbackList.on_train_batch_end")
    def on_train_batch_end(stock, self, batch, logs=None):
        stock(self, batch, logs)
        for callback in _with(self, "after_train_batch"):
            callback.after_train_batch(self, step_blocks.last_step(batch))

    @wrap("CallbackList.on_epoch_end")
    def on_epoch_end(stock, self, epoch, logs=None):
        stock(self, epoch, logs)
        for callback in _with(self, "after_epoch"):
            callback.after_epoch(self, epoch)

    @wrap("CallbackList.on_test_batch_end")
    def on_test_batch_end(stock, self, batch, logs=None):
        stock(self, batch, logs)
        for callback in _with(self, "after_test_batch"):
            callback.after_test_batch(self)


def _with(callbacks: CallbackList, name: str) -> list:
    return [callback for callback in callbacks.callbacks if hasattr(callback, name)]


def wait(callbacks: CallbackList) -> None:
    """Waits for hooks that Keras runs in other threads, as it does if no callback needs every batch."""
    training.wait_for_callbacks(callbacks)
