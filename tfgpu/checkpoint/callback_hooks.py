"""Moments of a run at which all callbacks have had their turn: what one of them saves then is what all are at.

A callback takes part by having a method of one of these names.

| method | when |
|---|---|
| `after_train_begin(callbacks)` | every `on_train_begin` is done |
| `after_train_batch(callbacks, batch)` | every `on_train_batch_end` is done; `batch` is the last step that ran |
| `after_epoch(callbacks, epoch)` | every `on_epoch_end` is done, `History`'s too |
| `after_test_batch(callbacks)` | every `on_test_batch_end` is done |

`callbacks` is Keras's `CallbackList`.
"""

from keras.src.callbacks.callback_list import CallbackList

from tfgpu.compat.patch import wrap
from tfgpu.core import step_blocks


def tell_when_all_are_done() -> None:
    """Calls the methods above."""

    @wrap(CallbackList, "on_train_begin")
    def on_train_begin(stock, self, logs=None):
        stock(self, logs)
        for callback in _with(self, "after_train_begin"):
            callback.after_train_begin(self)

    @wrap(CallbackList, "on_train_batch_end")
    def on_train_batch_end(stock, self, batch, logs=None):
        stock(self, batch, logs)
        for callback in _with(self, "after_train_batch"):
            callback.after_train_batch(self, step_blocks.last_step(batch))

    @wrap(CallbackList, "on_epoch_end")
    def on_epoch_end(stock, self, epoch, logs=None):
        stock(self, epoch, logs)
        for callback in _with(self, "after_epoch"):
            callback.after_epoch(self, epoch)

    @wrap(CallbackList, "on_test_batch_end")
    def on_test_batch_end(stock, self, batch, logs=None):
        stock(self, batch, logs)
        for callback in _with(self, "after_test_batch"):
            callback.after_test_batch(self)


def _with(callbacks: CallbackList, name: str) -> list:
    return [callback for callback in callbacks.callbacks if hasattr(callback, name)]


def settle(callbacks: CallbackList) -> None:
    """Waits for callbacks that Keras calls in other threads, as it does where none of them looks at batches."""
    callbacks._flush_futures()
