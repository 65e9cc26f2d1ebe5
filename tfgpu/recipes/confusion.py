"""The confusion matrix of a trained model."""

from typing import Any

import numpy as np

from tfgpu.data import Data
from tfgpu.recipes.report import MOST_CLASSES

MOST_PREDICTED = 100_000  # test examples; larger splits get no matrix


def confusion(model: Any, data: Data) -> list[list[int]] | None:
    """Counts the test examples by true and predicted class; None for too many examples or classes, or where
    the model learns something else than one class per example.

    Args:
        model: trained.
        data: the run's data.
    """
    classes = data.info.classes
    if (
        classes > MOST_CLASSES
        or data.info.test_examples > MOST_PREDICTED
        or data.info.labels not in ("class", "one_hot")
    ):
        return None
    labels = np.concatenate([np.asarray(y) for _, y, *_ in data.test])
    labels = labels.argmax(-1) if data.info.labels == "one_hot" else labels.astype(int).ravel()
    guesses = np.argmax(model.predict(data.test, verbose=0), axis=-1).ravel()
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (labels, guesses), 1)
    return counts.tolist()
