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

from tfgpu.compat.keras import CallbackList

_METHODS = {
    "on_train_begin": "after_train_begin",
    "on_train_batch_end": "after_train_batch",
    "on_epoch_end": "after_epoch",
    "on_test_batch_end": "after_test_batch",
}


def call(callbacks: CallbackList, name: str, at: int | None) -> None:
    """Calls the methods that belong to a hook of Keras.

    Args:
        callbacks: of the `fit`.
        name: of the hook that every callback has run.
        at: the batch or the epoch, from 0.
    """
    method = _METHODS[name]
    with_number = (at,) if method in ("after_train_batch", "after_epoch") else ()
    for callback in [callback for callback in callbacks.callbacks if hasattr(callback, method)]:
        getattr(callback, method)(callbacks, *with_number)
