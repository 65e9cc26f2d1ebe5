"""Optimizers that Keras lacks: LARS, and any optimizer with its state in 8 or 16 bits (`with_state_dtype`).

import tfgpu.training.optimizers as optimizers
model.compile(optimizers.LARS(learning_rate=10.0, momentum=0.9, weight_decay=5e-5), loss="mse")
"""

from collections.abc import Sequence
from types import MappingProxyType

import keras
import tensorflow as tf

from tfgpu.compat import optimizers as private_optimizers
from tfgpu.errors import InputError, is_number
from tfgpu.optim.narrow_state import with_state_dtype as with_state_dtype


@keras.saving.register_keras_serializable(package="tfgpu")
class LARS(private_optimizers.WeightDecayHook, keras.optimizers.Optimizer):
    """LARS: momentum SGD with a learning rate scaled per layer, for very large batches.

    A kernel w with gradient g is updated by

        ratio = trust * |w| / (|g| + weight_decay * |w|) if both norms are positive, else 1
        velocity = momentum * velocity + learning_rate * ratio * (g + weight_decay * w)
        w = w - velocity

    Biases and the scales and offsets of normalization layers (variables of rank 0 or 1) are neither scaled nor decayed:
    they get plain momentum SGD. Clipping, accumulation, averages and loss scales are Keras's. A rate of 1 to 30 with
    warmup and the schedule "polynomial" with power=2 is typical.

    Args:
        learning_rate: a number or a Keras schedule. Default 1.0.
        momentum: from 0 to below 1. Default 0.9.
        nesterov: use Nesterov momentum. Default False.
        trust: the paper's trust coefficient: the size of an update relative to the weight. Default 0.001.
        weight_decay: the factor of an L2 penalty, which the ratio includes; not decoupled. Default None: 0.
        exclude: substrings; variables whose path has one of them get plain momentum SGD too, like those of
            `exclude_from_weight_decay`.
        clipnorm, clipvalue, global_clipnorm, use_ema, ema_momentum, ema_overwrite_frequency, loss_scale_factor,
            gradient_accumulation_steps, name: as for every Keras optimizer.

    Raises:
        InputError: a number is out of range.

    Example:
        >>> kernel = keras.Variable([[3.0], [4.0]])
        >>> LARS(1.0, momentum=0.0, trust=0.1).apply([keras.ops.array([[0.0], [2.0]])], [kernel])
        >>> kernel.numpy().ravel().tolist()  # 4 - 0.1 * (5 / 2) * 2
        [3.0, 3.5]

    Source: Y. You, I. Gitman and B. Ginsburg, "Large Batch Training of Convolutional Networks", 2017, arXiv:1708.03888.
    """

    def __init__(
        self,
        learning_rate=1.0,
        momentum: float = 0.9,
        nesterov: bool = False,
        trust: float = 0.001,
        weight_decay: float | None = None,
        exclude: Sequence[str] = (),
        *,
        name: str = "lars",
        **options,
    ):
        super().__init__(learning_rate=learning_rate, weight_decay=weight_decay, name=name, **options)
        if not is_number(momentum) or not 0 <= momentum < 1:
            raise InputError(f"`momentum` must be at least 0 and below 1. Received: momentum={momentum!r}.")
        if not is_number(trust) or not trust > 0:
            raise InputError(f"`trust` must be above 0. Received: trust={trust!r}. The paper's is 0.001.")
        if isinstance(exclude, str):
            raise InputError(f"`exclude` must be a list of strings. Received: {exclude!r}. Write [{exclude!r}].")
        self.momentum, self.nesterov, self.trust = momentum, nesterov, trust
        self.exclude = tuple(exclude)

    def build(self, variables):
        """Creates the velocities and decides which variables are scaled."""
        if self.built:
            return
        super().build(variables)
        self._velocities = self.add_optimizer_variables(variables, "velocity")
        self._scales = [self._is_scaled(variable) for variable in variables]

    def update_step(self, gradient, variable, learning_rate):
        """Updates one variable by its gradient."""
        ops, at = keras.ops, private_optimizers.index(self, variable)
        velocity = self._velocities[at]
        # An embedding's sparse gradient may repeat rows; the norm needs the dense one.
        gradient = ops.cast(tf.convert_to_tensor(gradient), variable.dtype)
        rate = ops.cast(learning_rate, variable.dtype)
        if self._scales[at]:
            decay = self.weight_decay or 0.0
            gradient = self._ratio(variable, gradient, decay) * (gradient + decay * variable)
        step = rate * gradient
        moved = self.momentum * velocity + step
        self.assign(velocity, moved)
        self.assign_sub(variable, self.momentum * moved + step if self.nesterov else moved)

    def get_config(self):
        own = {"momentum": self.momentum, "nesterov": self.nesterov, "trust": self.trust, "exclude": list(self.exclude)}
        return {**super().get_config(), **own}

    def _ratio(self, variable, gradient, decay: float):
        ops = keras.ops
        # In float32: squares of float16 values overflow.
        wide = [ops.cast(value, "float32") for value in (variable, gradient)]
        weight, slope = (ops.sqrt(ops.sum(ops.square(value))) for value in wide)
        below = slope + decay * weight
        usable = ops.logical_and(weight > 0.0, slope > 0.0)
        ratio = ops.where(usable, self.trust * weight / ops.where(usable, below, 1.0), 1.0)
        return ops.cast(ratio, variable.dtype)

    def _is_scaled(self, variable) -> bool:
        named = any(word in getattr(variable, "path", variable.name) for word in self.exclude)
        return len(variable.shape) > 1 and not named and private_optimizers.uses_weight_decay(self, variable)

    def decay_variables(self, variables, stock):
        """Does nothing: the decay is part of the gradient, which the ratio includes."""


#: Optimizers by their names in a recipe, in addition to Keras's.
OPTIMIZERS = MappingProxyType({"lars": LARS})
