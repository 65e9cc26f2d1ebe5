"""The trial of a step whose replicas each hold a piece of the weights: what the feature that cuts them adds to it."""

import contextlib
from typing import Protocol

import keras
import tensorflow as tf

from tfgpu.core import extensions
from tfgpu.core.row_mixing.trials.step_recorder import Recorder
from tfgpu.core.state.trial_scope import Apart


class TrialWeights(Protocol):
    """What stands in, in a trial, for weights of which each replica holds a piece.

    Attributes:
        ids: the `id` of each variable.
        pieces: the number of pieces of each in the trial.
        refusal: why such a step cannot see the whole batch, and what to use instead; part of an error's sentence.
    """

    ids: set[int]
    pieces: int
    refusal: str

    def draw(self) -> None:
        """Draws the values; called once, before the trial."""

    def seen(self, scope: Apart, piece: int | None) -> contextlib.AbstractContextManager:
        """In the block, a step that runs in `scope` sees a piece of each value; None shows them whole."""

    def larger_first(self, piece: int | None, gradient: tf.Tensor) -> tf.Tensor:
        """A gradient of which the first piece's numbers are 1024 times as large.

        What looks at all pieces then changes the others.

        Args:
            piece: which piece `gradient` is of; None: of the whole weight.
            gradient: of one weight.
        """

    def differing(self, whole: Recorder, pieces: list[Recorder], close: float) -> str | None:
        """What the step makes of whole weights but not of their pieces; None if nothing.

        Args:
            whole: the step on whole weights.
            pieces: on each piece of them.
            close: by how much of the largest number two may differ that are as good as equal.
        """


def of(model: keras.Model) -> TrialWeights | None:
    """What stands in for a model's weights in the trial of its step; None where every replica has them whole."""
    return next((found for find in extensions.trial_weights if (found := find(model)) is not None), None)
