"""Which number formats a model computes in: dtype policies, TF32, and layer sizes for Tensor Cores.

Example:
    >>> from tfgpu import precision
    >>> with precision.use("mixed_bfloat16"):
    ...     model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16)])
    >>> model.layers[0].compute_dtype, keras.config.dtype_policy().name
    ('bfloat16', 'float32')

A layer takes the policy when it is made, so choose before the model. Under `mixed_float16`, `model.compile`
wraps the optimizer in `keras.optimizers.LossScaleOptimizer` by itself; a hand-written loop has to do that.
"""

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu import environment
from tfgpu.environment import Device
from tfgpu.errors import unknown

NAMES = ("auto", "float32", "tf32", "mixed_float16", "mixed_bfloat16")

_log = logging.getLogger(__name__)
_CONVOLUTIONS = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
)
_WIDTHS = (
    (keras.layers.Dense, "units"),
    (_CONVOLUTIONS, "filters"),
    (keras.layers.Embedding, "output_dim"),
    (keras.layers.MultiHeadAttention, "key_dim"),
)
# Below this, padding the model's output width costs more in label handling than one small product can gain.
_SMALL_OUTPUT = 128


@dataclass(frozen=True)
class Precision:
    """A precision in force. As a context manager it puts back, on exit, what was in force before `use`.

    Args:
        name: `"float32"`, `"tf32"`, `"mixed_float16"` or `"mixed_bfloat16"`, never `"auto"`.
        previous_policy: Keras's global dtype policy before.
        previous_tf32: TensorFlow's TF32 switch before.
    """

    name: str
    previous_policy: keras.DTypePolicy
    previous_tf32: bool

    def __enter__(self) -> "Precision":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """Puts back the dtype policy and the TF32 switch that were in force before."""
        keras.config.set_dtype_policy(self.previous_policy)
        tf.config.experimental.enable_tensor_float_32_execution(self.previous_tf32)


def use(name: str = "auto") -> Precision:
    """Sets Keras's global dtype policy and TensorFlow's TF32 switch, at once.

    | name | layers compute in | variables | TF32 in float32 products |
    |---|---|---|---|
    | `"float32"` | float32 | float32 | off: products are exact to float32 |
    | `"tf32"` | float32 | float32 | on, TensorFlow's default: GPUs from 8.0 round inputs to 10 bits |
    | `"mixed_float16"` | float16 | float32 | on |
    | `"mixed_bfloat16"` | bfloat16 | float32 | on |

    Args:
        name: one of the table, or `"auto"`: what `choose` finds for the visible devices.

    Returns:
        The precision in force; `with precision.use(...):` restores what was before.

    Raises:
        InputError: an unknown name.

    Source: https://docs.nvidia.com/deeplearning/performance/mixed-precision-training/index.html
    """
    if name not in NAMES:
        raise unknown("precision", name, NAMES)
    found = environment.devices()
    name = choose(found) if name == "auto" else name
    _warn_without_hardware(name, found)
    has_tf32 = bool(tf.config.experimental.tensor_float_32_execution_enabled())
    applied = Precision(name, keras.config.dtype_policy(), has_tf32)
    keras.config.set_dtype_policy("float32" if name == "tf32" else name)
    tf.config.experimental.enable_tensor_float_32_execution(name != "float32")
    return applied


def choose(devices: Iterable[Device]) -> str:
    """Picks the fastest precision that all GPUs have in hardware, by their compute capability.

    Args:
        devices: such as `environment.devices()`. CPUs beside GPUs do not count.

    Returns:
        `"mixed_bfloat16"` from 8.0 (Ampere), `"mixed_float16"` from 7.0 (Volta, Turing), else `"float32"`:
        for older or unknown GPUs, and without any.

    Example:
        >>> choose([environment.Device("GPU:0", "GPU", "GPU:0", "NVIDIA T4", (7, 5))])
        'mixed_float16'
    """
    lowest = _lowest(devices)
    if lowest >= (8, 0):
        return "mixed_bfloat16"
    return "mixed_float16" if lowest >= (7, 0) else "float32"


@dataclass(frozen=True)
class Finding:
    """A layer size that does not suit Tensor Cores.

    Args:
        layer: the layer's name.
        dimension: the constructor argument that sets it, such as `"units"`.
        size: its value.
        suggestion: a sentence with the nearest sizes that suit.
    """

    layer: str
    dimension: str
    size: int
    suggestion: str


def advice(model: keras.Model) -> list[Finding]:
    """Finds the layer widths that are not multiples of 8, or of 16 in a layer quantized to 8 bits.

    NVIDIA's libraries use Tensor Cores best when each dimension of a product is a multiple of 16 bytes: 8
    elements of 16 bits, 16 of 8 bits. Each width is reported once, at the layer that sets it. A width below
    128 that is also the model's output, such as 10 classes, is set by the task and left out.

    Args:
        model: any Keras model. Its Dense, convolution, embedding and attention layers are looked at, also
            those within other layers.

    Returns:
        One finding for each width, in the order of the layers; empty when all suit.

    Example:
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100), keras.layers.Dense(10)])
        >>> advice(model)[0].suggestion
        'Use 96 or 104: Tensor Cores work best on multiples of 8.'

    Source: https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/index.html
    """
    # A subclassed model that was never called has no outputs yet.
    outputs = {tensor.shape[-1] for tensor in getattr(model, "outputs", None) or [] if tensor.shape}
    findings = []
    for layer in _layers(model, set()):
        multiple = 16 if getattr(layer, "quantization_mode", None) in ("int8", "float8") else 8
        for dimension in [name for kinds, name in _WIDTHS if isinstance(layer, kinds)]:
            size = getattr(layer, dimension)
            if size % multiple and not (size in outputs and size < _SMALL_OUTPUT):
                findings.append(Finding(layer.name, dimension, size, _suggest(size, multiple)))
    return findings


def _lowest(devices: Iterable[Device]) -> tuple[int, int]:
    """The lowest compute capability of the GPUs; (0, 0) where one is unknown, or there are none."""
    return min((each.compute_capability or (0, 0) for each in devices if each.kind == "GPU"), default=(0, 0))


def _warn_without_hardware(name: str, devices: tuple[Device, ...]) -> None:
    needed = {"tf32": (8, 0), "mixed_float16": (7, 0), "mixed_bfloat16": (8, 0)}.get(name)
    if needed and _lowest(devices) < needed:
        _log.warning(
            "Precision '%s' is fast on GPUs of compute capability %d.%d and above; not all here are. %s",
            name,
            *needed,
            "It has no effect on the others." if name == "tf32" else "It works, but slowly: prefer 'auto'.",
        )


def _layers(layer: keras.Layer, seen: set[int]) -> Iterator[keras.Layer]:
    """Yields a layer and the layers it holds, as attributes or in containers, each once."""
    if id(layer) in seen:
        return
    seen.add(id(layer))
    yield layer
    if isinstance(layer, keras.layers.MultiHeadAttention):
        return  # Its projections have the widths that its own arguments set.
    held = list(layer.layers) if isinstance(layer, keras.Model) else []
    for value in held + list(vars(layer).values()):
        if isinstance(value, dict):
            value = list(value.values())
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, keras.Layer):
                yield from _layers(each, seen)


def _suggest(size: int, multiple: int) -> str:
    below, above = size // multiple * multiple, -(-size // multiple) * multiple
    sizes = f"{below} or {above}" if below else f"{above}"
    return f"Use {sizes}: Tensor Cores work best on multiples of {multiple}."
