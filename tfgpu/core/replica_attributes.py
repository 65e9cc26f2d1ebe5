"""Keeps tensors in attributes of layers separate for each replica that traces a step.

The replicas of one process trace the same Python objects, each in its own thread, and every collective switches
threads. After it, a replica would find another replica's tensors in `Layer.losses`, in an attribute that a model sets
for its loss (`self.z = ...`), or in a list of skip connections.
"""

import contextlib

import keras
import tensorflow as tf

from tfgpu.compat.keras import call_context
from tfgpu.compat.layers import layers_within
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def isolate_replica_attributes() -> None:
    """Restores a replica's attributes of its layers after each collective."""

    @wrap("tf.distribute.ReplicaContext.merge_call")
    def merge_call(stock, self, *args, **kwargs):
        with _preserved(_layers()):
            return stock(self, *args, **kwargs)


def of_model(model):
    """Inside the block, this replica has its own attributes of the model's layers, also between calls of the model."""
    return step_context.scope(models=(model,))


def _layers() -> list:
    called = call_context()
    models = (*step_context.current().models, *([called.entry_layer] if called is not None else ()))
    found = {id(layer): layer for model in models for layer in layers_within(model)}
    return list(found.values())


@contextlib.contextmanager
def _preserved(layers: list):
    before = [(vars(layer), _snapshot(vars(layer))) for layer in layers]
    try:
        yield
    finally:
        for attributes, was in before:
            for name in [n for n, value in attributes.items() if n not in was and _holds_tensors(value)]:
                del attributes[name]  # made by another replica
            for name, (value, content) in was.items():
                attributes[name] = value
                if content is not None and _differ(value, content):
                    _restore(value, content)


def _snapshot(attributes: dict) -> dict[str, tuple]:
    """The attributes that may hold a step's tensors: each value, and the content of a list or dict."""
    found = {}
    for name, value in attributes.items():
        if isinstance(value, (list, dict)):
            found[name] = value, dict(value) if isinstance(value, dict) else list(value)
        elif isinstance(value, tuple) or _is_tensor(value):
            found[name] = value, None
    return found


def _is_tensor(value) -> bool:
    return tf.is_tensor(value) and not isinstance(value, (tf.Variable, keras.Variable, tf.distribute.DistributedValues))


def _holds_tensors(value) -> bool:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else [value]
    return any(map(_is_tensor, values))


def _differ(value, content) -> bool:
    """Whether other replicas have changed a list or dict that holds, or held, tensors."""
    if isinstance(value, dict):
        is_same = value.keys() == content.keys() and all(value[key] is content[key] for key in content)
    else:
        is_same = len(value) == len(content) and all(a is b for a, b in zip(value, content, strict=True))
    return not is_same and (_holds_tensors(value) or _holds_tensors(content))


def _restore(value, content) -> None:
    # Bypasses Keras's tracking of a layer's lists.
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, content)
    else:
        list.clear(value)
        list.extend(value, content)
