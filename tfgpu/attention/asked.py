"""Whether flash attention is asked for, and whether a layer's attention has heard of it."""

import contextlib

import keras

from tfgpu.compat import layers, slots
from tfgpu.core import step_context
from tfgpu.core.extensions import Registry

takers: Registry = Registry()
"""`install()` is called when flash attention is enabled, by those who let other layers take it."""
_seen = step_context.Slot("attention.seen")
"""A list to which each attention adds that can work by blocks; None where nobody asks."""


def is_enabled() -> bool:
    """Whether the script has called `keras.config.enable_flash_attention()`, and not disabled it since."""
    return slots.get(keras.config, "flash_attention", False)


def enable(value: bool) -> None:
    """Notes what the script has called."""
    slots.of(keras.config).flash_attention = value


def of_layer(layer: keras.layers.Layer) -> bool:
    """Whether one of Keras's attention layers is to work by blocks."""
    flash = layers.attention_settings(layer).flash
    return is_enabled() if flash is None else flash


def note_attention() -> None:
    """Notes that attention which can work by blocks is computed here."""
    if (seen := _seen.get()) is not None:
        seen.append(True)


def attentions(seen: list) -> contextlib.AbstractContextManager:
    """Inside the block, `seen` grows with each `note_attention`."""
    return _seen.set_to(seen)
