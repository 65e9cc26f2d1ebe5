"""Accuracy, forgetting and transfer by hand."""

import keras
import numpy as np
import pytest

import tfgpu
from tfgpu.training.incremental import Accuracies, accuracies

MATRIX = np.array([[0.9, 0.0, 0.0], [0.95, 0.8, 0.0], [0.5, 0.7, 1.0]])


def test_a_matrix_by_hand():
    found = Accuracies(MATRIX)
    assert found.average == pytest.approx(2.2 / 3)
    assert found.averages == pytest.approx([0.9, 0.875, 2.2 / 3])
    assert found.forgetting == pytest.approx((0.45 + 0.1) / 2)  # 0.95 was the best of the first task
    assert found.backward_transfer == pytest.approx((-0.4 - 0.1) / 2)
    assert (Accuracies([[0.5]]).forgetting, Accuracies([[0.5]]).backward_transfer) == (0.0, 0.0)
    with pytest.raises(tfgpu.InputError, match=r"\(2, 3\)"):
        Accuracies(np.zeros((2, 3)))


def test_a_known_task_restricts_the_classes():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Identity()])
    x = np.array([[0.1, 0.2, 0.9, 0.0], [0.3, 0.2, 0.9, 0.0]])
    tasks = [(x, [1, 0]), (x, [2, 2])]
    assert accuracies(model, tasks) == [0.0, 1.0]
    assert accuracies(model, tasks, classes=[(0, 1), (2, 3)]) == [1.0, 1.0]
    assert accuracies(model, [(x, [4, 5])], classes=[(4, 5)])[0] == 0.0  # classes that it does not have yet
    with pytest.raises(tfgpu.InputError, match="1 for 2 tasks"):
        accuracies(model, tasks, classes=[(0, 1)])
