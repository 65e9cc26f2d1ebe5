"""The confusion matrix of a trained model."""

from typing import Any

import numpy as np

from tfgpu.data import Data
from tfgpu.recipes.report import MOST_CLASSES

MOST_PREDICTED = 100_000  # test examples; larger splits get no matrix


def confusion(model: Any, data: Data) -> list[list[int]] | None:
    """Counts the test examples by true and predicted class.

    Args:
        model: trained.
        data: the run's data.

    Returns:
        None for too many examples or classes, or if the model does not learn one class per example.
    """
    info, classes = data.info, data.info.classes
    if classes > MOST_CLASSES or info.test_examples > MOST_PREDICTED or info.labels not in ("class", "one_hot"):
        return None
    labels = np.concatenate([np.asarray(y) for _, y, *_ in data.test])
    labels = labels.argmax(-1) if info.labels == "one_hot" else labels.astype(int).ravel()
    guesses = np.argmax(model.predict(data.test, verbose=0), axis=-1).ravel()
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (labels, guesses), 1)
    return counts.tolist()
