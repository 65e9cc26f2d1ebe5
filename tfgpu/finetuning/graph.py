"""The graph of a language model for training: one level of layers, and a mask where sequences share a row."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfgpu.attention.separate_masks import note_rows
from tfgpu.parallel import model_graph

TOKENS, PADDING, SEGMENTS, POSITIONS = "token_ids", "padding_mask", "segment_ids", "positions"
_MASK = "decoder_attention_mask"


@keras.saving.register_keras_serializable(package="tfgpu")
class SegmentMask(keras.layers.Layer):
    """Which tokens of a row are of one sequence: bool [batch, length, length] from int [batch, length] numbers."""

    def call(self, segment_ids):
        def rows(begin, count):
            own = tf.gather(segment_ids, tf.minimum(begin + tf.range(count), tf.shape(segment_ids)[1] - 1), axis=1)
            return tf.equal(own[:, :, None], segment_ids[:, None, :])

        return note_rows(keras.ops.equal(segment_ids[:, :, None], segment_ids[:, None, :]), rows)


def packed_inputs(task: keras.Model) -> tuple[str, ...] | None:
    """Returns the model's inputs for packed sequences, or None if its layers cannot keep sequences apart.

    Its blocks must take a mask of queries and keys, and a table of positions must take the positions.
    """
    inner = list(model_graph.layers_within(task.backbone).values())
    calls = model_graph.calls(task.backbone)
    blocks = [call.operation for call in calls if PADDING in _ends(_parameters(call.operation))]
    if not blocks or not all(_MASK in _parameters(block) for block in blocks):
        return None
    tables = [layer for layer in inner if _is_table(layer) and layer.weights]
    outer = {id(call.operation) for call in calls}
    if any(id(table) not in outer or POSITIONS not in _parameters(table) for table in tables):
        return None
    return (TOKENS, SEGMENTS, POSITIONS) if tables else (TOKENS, SEGMENTS)


def flat(task: keras.Model, names: Sequence[str] | None) -> keras.Model:
    """A functional model of the same layers, none of which is a model.

    Args:
        task: a `keras_hub.models.CausalLM`.
        names: of `packed_inputs`, for rows of several sequences; None: the inputs are tokens and a padding mask.

    Returns:
        A model from `{name: int32 [batch, length]}` to logits [batch, length, vocabulary].
    """
    inputs = {name: keras.Input((None,), dtype="int32", name=name) for name in names or (TOKENS, PADDING)}
    given = {TOKENS: inputs[TOKENS], PADDING: inputs.get(PADDING)}
    extra = {}
    if names is not None:
        given[PADDING] = keras.ops.ones_like(inputs[TOKENS])  # the mask keeps padding, segment 0, apart
        extra = {_MASK: SegmentMask(name="segment_mask")(inputs[SEGMENTS]), POSITIONS: inputs.get(POSITIONS)}
    outputs = _run(task, given, extra)
    return keras.Model(inputs, outputs, name=f"{task.name}_training")


def _run(model: keras.Model, given: Mapping[str, Any], extra: Mapping[str, Any]) -> Any:
    """What the model's layers make of symbolic inputs; those of models within it are called one by one."""

    def called(operation: Any) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if isinstance(operation, keras.Model) and model_graph.is_functional(operation):
                return _run(operation, args[0], extra)
            accepted = _parameters(operation)
            if _MASK in extra and _MASK in accepted and PADDING in _ends(kwargs):
                kwargs = {**kwargs, _MASK: extra[_MASK]}
            if extra.get(POSITIONS) is not None and _is_table(operation):
                kwargs = {**kwargs, POSITIONS: extra[POSITIONS]}
            return operation(*args, **kwargs)

        return call

    values = {id(symbolic): given[name] for name, symbolic in model.input.items()}
    model_graph.run(model_graph.calls(model), values, called)
    return values[id(model.output)]


def _is_table(operation: Any) -> bool:
    """Whether a layer is a table of positions."""
    return isinstance(operation, keras.layers.Layer) and "PositionEmbedding" in type(operation).__name__


def _parameters(operation: Any) -> set[str]:
    call = getattr(operation, "call", None)
    return set(inspect.signature(call).parameters) if call is not None else set()


def _ends(names: Any) -> set[str]:
    """Names with what stands before `padding_mask` left out: blocks call it `decoder_padding_mask` too."""
    return {PADDING if name.endswith(PADDING) else name for name in names}
