"""The one-cycle schedule: the rate rises to its peak and falls far below its start."""

import math

import keras

SHAPES = ("cosine", "linear")


@keras.saving.register_keras_serializable(package="tfgpu")
class OneCycle(keras.optimizers.schedules.LearningRateSchedule):
    """Rises from `peak / initial_division` to `peak`, then falls to that initial rate divided by `final_division`.

    The momentum is constant: Smith lowers it while the rate rises, but Keras's optimizers compile theirs in as a
    number.

    Args:
        peak: the highest rate, at update `rise_steps` (from 0).
        total_steps: updates of the whole training job; update `total_steps` would have the lowest rate.
        rise_steps: updates from the first rate to the peak, at least 1 and less than `total_steps`.
        initial_division: the peak divided by the first rate.
        final_division: the first rate divided by the last one.
        shape: "cosine" (half a cosine up and half a cosine down, as in fastai and PyTorch) or "linear" (Smith's).

    Example:
        >>> rate = OneCycle(1.0, total_steps=6, rise_steps=2, initial_division=5, final_division=2, shape="linear")
        >>> [round(float(rate(step)), 3) for step in range(7)]
        [0.2, 0.6, 1.0, 0.775, 0.55, 0.325, 0.1]

    Source: L. N. Smith, "A disciplined approach to neural network hyper-parameters: Part 1", 2018, arXiv:1803.09820.
    """

    def __init__(
        self,
        peak: float,
        total_steps: int,
        rise_steps: int,
        initial_division: float = 25.0,
        final_division: float = 1e4,
        shape: str = "cosine",
    ):
        self.peak = peak
        self.total_steps = total_steps
        self.rise_steps = rise_steps
        self.initial_division = initial_division
        self.final_division = final_division
        self.shape = shape

    def __call__(self, step):
        step = keras.ops.cast(step, "float32")
        first = self.peak / self.initial_division
        up = self._progress(step / self.rise_steps)
        down = self._progress((step - self.rise_steps) / (self.total_steps - self.rise_steps))
        rising = first + (self.peak - first) * up
        falling = self.peak + (first / self.final_division - self.peak) * down
        return keras.ops.where(step < self.rise_steps, rising, falling)

    def _progress(self, part):
        """Maps the share of the steps that are done to the share of the change in rate, 0 to 1."""
        part = keras.ops.clip(part, 0.0, 1.0)
        return part if self.shape == "linear" else (1.0 - keras.ops.cos(math.pi * part)) / 2.0

    def get_config(self):
        return {
            "peak": self.peak,
            "total_steps": self.total_steps,
            "rise_steps": self.rise_steps,
            "initial_division": self.initial_division,
            "final_division": self.final_division,
            "shape": self.shape,
        }
