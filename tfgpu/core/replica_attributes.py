"""What a replica keeps in attributes of its layers while it traces a step: its own, whatever the others do meanwhile.

The replicas of one process trace the same Python objects, each in a thread of its own, and where they meet, so in every
collective, another one goes on. `Layer.losses`, a tensor that a model keeps for its loss (`self.z = ...`), skips
in a list: the first replica would find the last one's there.
"""

import contextlib

import keras
import tensorflow as tf

from tfgpu.compat.keras import call_context
from tfgpu.compat.layers import layers_within
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context


def keep_attributes_apart() -> None:
    """Puts back after every meeting of the replicas what this one had on its layers before it."""

    @wrap("tf.distribute.ReplicaContext.merge_call")
    def merge_call(stock, self, *args, **kwargs):
        with _kept(_layers()):
            return stock(self, *args, **kwargs)


def of_model(model):
    """For the length of the block the attributes of the model's layers are this replica's, between its calls too."""
    return step_context.scope(models=(model,))


def _layers() -> list:
    called = call_context()
    models = (*step_context.current().models, *([called.entry_layer] if called is not None else ()))
    found = {id(layer): layer for model in models for layer in layers_within(model)}
    return list(found.values())


@contextlib.contextmanager
def _kept(layers: list):
    before = [(vars(layer), _look(vars(layer))) for layer in layers]
    try:
        yield
    finally:
        for attributes, was in before:
            for name in [n for n, value in attributes.items() if n not in was and _holds_tensors(value)]:
                del attributes[name]  # made by another replica
            for name, (value, content) in was.items():
                attributes[name] = value
                if content is not None and _differ(value, content):
                    _fill(value, content)


def _look(attributes: dict) -> dict[str, tuple]:
    """The attributes that may hold what a step makes: each value, and for a list or dict what is in it."""
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
    """Whether others have changed a list or dict that a step's tensors are, or were, in."""
    if isinstance(value, dict):
        is_same = value.keys() == content.keys() and all(value[key] is content[key] for key in content)
    else:
        is_same = len(value) == len(content) and all(a is b for a, b in zip(value, content, strict=True))
    return not is_same and (_holds_tensors(value) or _holds_tensors(content))


def _fill(value, content) -> None:
    # Past Keras's tracking, which looks at what is put into a layer's lists.
    if isinstance(value, dict):
        dict.clear(value)
        dict.update(value, content)
    else:
        list.clear(value)
        list.extend(value, content)
