"""The layer that made a model's logits, from which they can be computed again for a few rows at a time.

A call of such a layer leaves a note on its output. The output itself is an ordinary tensor of a graph: if nobody reads
it, TensorFlow removes the operation that would compute it.
"""

import functools
from dataclasses import dataclass, field

import keras
import tensorflow as tf

from tfgpu.compat import slots
from tfgpu.compat.patch import wrap
from tfgpu.core import logits

_NAMES = tuple(name for name in ("Dense", "ReversibleEmbedding") if hasattr(keras.layers, name))
LAYERS = tuple(getattr(keras.layers, name) for name in _NAMES)
"""The layers whose logits can be computed by rows."""


@dataclass(frozen=True)
class Head:
    """One call of a layer that computes logits.

    Attributes:
        layer: the layer.
        inputs: [..., width], what it was called with.
        rows: what was computed of all rows without their logits, one entry for each target (`row_chunks.RowLosses`).
    """

    layer: keras.layers.Layer
    inputs: tf.Tensor
    rows: list = field(default_factory=list)

    @property
    def vocabulary(self) -> int:
        """The number of logits in a row."""
        return self.layer.units if isinstance(self.layer, keras.layers.Dense) else self.layer.input_dim

    def weights(self) -> list[tuple[tf.Tensor, bool]]:
        """The values that `logits` takes, as they are stored, and whether each is trained."""
        if isinstance(self.layer, keras.layers.Dense):
            found = [self.layer.kernel, self.layer.bias]
        else:
            found = [self.layer.embeddings if self.layer.tie_weights else self.layer.reverse_embeddings]
        return [(tf.convert_to_tensor(each), getattr(each, "trainable", True)) for each in found if each is not None]

    def logits(self, rows: tf.Tensor, kernel: tf.Tensor, *bias: tf.Tensor) -> tf.Tensor:
        """The logits of some rows, as the layer computes them.

        Args:
            rows: [rows, width].
            kernel, bias: the values of `weights`, cast by `cast`.
        """
        if isinstance(self.layer, keras.layers.Dense):
            logits = tf.matmul(rows, kernel)
            return logits + bias[0] if bias else logits
        logits = tf.matmul(rows, kernel, transpose_b=self.layer.tie_weights)
        cap = self.layer.logit_soft_cap
        return logits if cap is None else tf.tanh(logits / cap) * cap

    def cast(self, value: tf.Tensor) -> tf.Tensor:
        """A value of the dtype in which the layer computes."""
        value = tf.cast(value, self.layer.compute_dtype)
        dtype = getattr(self.layer, "reverse_dtype", None)
        return value if dtype is None else tf.cast(value, dtype)


def find(value: object) -> Head | None:
    """The call that made these logits, if nothing but a cast to as many bits or more has happened to them since."""
    return logits.noted(value, "logits_head")


@functools.cache
def install() -> None:
    """Lets layers note on their outputs how they were made."""
    for name in _NAMES:

        @wrap(f"keras.layers.{name}.__call__")
        def call(stock, self, *args, **kwargs):
            output = stock(self, *args, **kwargs)
            if args and makes_logits(self, args, kwargs) and tf.is_tensor(args[0]) and hasattr(output, "graph"):
                slots.of(output).logits_head = Head(self, args[0])
            return output


def makes_logits(layer: keras.layers.Layer, args: tuple, kwargs: dict) -> bool:
    """Whether a layer's call multiplies by weights that are whole, and does nothing that mixes logits."""
    kind = next((cls for cls in LAYERS if isinstance(layer, cls)), None)
    if kind is None or type(layer).call is not kind.call or getattr(layer, "quantization_mode", None):
        return False
    if kind is keras.layers.Dense:
        is_linear = layer.activation in (None, keras.activations.linear)
        return is_linear and isinstance(layer.kernel, (keras.Variable, tf.Tensor))
    return bool(args[1] if len(args) > 1 else kwargs.get("reverse", False))
