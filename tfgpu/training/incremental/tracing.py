"""Retracing a model's steps after a change."""

import keras


def trace_anew(model: keras.Model) -> None:
    """Lets the next `fit` or `evaluate` trace its steps: one that is traced already knows nothing of the change."""
    model.train_function = model.test_function = None
