"""KerasHub's own attention by blocks of queries, where `keras.config.enable_flash_attention()` asks for it.

On TensorFlow, KerasHub's layers compute scores, soft caps, windows, softmax and dropout by their own code. A block of
queries is to this code what a chunk of a prompt is in generation: queries from some position on, all keys and values,
and rows of the mask. So the code runs for one block after another, and again in the backward pass (`blockwise.Loop`).
Masks are made of the same blocks: the whole mask of a decoder block is there for whoever reads it, and nobody does.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from tfgpu.attention import asked, blockwise
from tfgpu.attention.separate_masks import note_rows, rows_of
from tfgpu.compat import keras_hub, layers, slots
from tfgpu.compat.keras import StatelessScope, get_mask, in_symbolic_scope, is_training, set_mask
from tfgpu.compat.patch import wrap
from tfgpu.core import step_context
from tfgpu.parallel.rematerialization import remat
from tfgpu.parallel.tensor import block_run, local_shards

_log = logging.getLogger(__name__)
_is_off = step_context.Slot("hub_attention.is_off")
_begin = step_context.Slot("hub_attention.begin")
"""Of a block, for a window: code of KerasHub's asks `if cache_update_index`, which a tensor does not answer."""


@functools.cache
def install() -> None:
    """Prepares layers of KerasHub's when they are called, and names those whose attention stays as it is."""
    local_shards.draw_seeds_once()

    @wrap("keras.layers.Layer.__call__")
    def call(stock, self, *args, **kwargs):
        kind = type(self)
        if not asked.is_enabled() or kind.__module__.startswith(("keras.", "tfgpu.")):
            return stock(self, *args, **kwargs)
        prepare(kind)
        if in_symbolic_scope():
            return stock(self, *args, **kwargs)
        if (rows := rows_of(kwargs.get("attention_mask"))) is not None and keras_hub.balances(kind):
            kwargs["attention_mask"] = _which_see_any(kwargs["attention_mask"], rows)
        if "Attention" not in kind.__name__ or _works_by_class(self):
            return stock(self, *args, **kwargs)
        with asked.attentions(seen := []):
            result = stock(self, *args, **kwargs)
        if seen:
            asked.note_attention()  # for a layer around
            slots.of(kind).works_by_blocks = True  # the next call may be answered without computing anything
        elif not slots.get(kind, "works_by_blocks", False):
            _tell(kind)
        return result


@functools.cache
def prepare(kind: type) -> None:
    """Lets a class of KerasHub's work by blocks, in this process from now on."""
    for owner, name in keras_hub.mask_methods(kind):
        _wrap_mask(owner, name)
    if (found := keras_hub.attention_method(kind)) is not None:
        _wrap_attention(*found)
    if (found := keras_hub.window_method(kind)) is not None:
        _wrap_window(*found)
    if keras_hub.is_mask_asked(kind):
        _wrap_call(keras_hub.attention_method(kind)[0])


def _works_by_class(layer: keras.layers.Layer) -> bool:
    """Whether a layer's class is known to work by blocks."""
    if isinstance(layer, (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)):
        return not layers.has_own_attention(layer)
    return keras_hub.attention_method(type(layer)) is not None and not _is_bidirectional(layer)


def whole():
    """Inside the block, KerasHub's code gets all queries that it is called with."""
    return _is_off.set_to(True)


@functools.cache
def _tell(kind: type) -> None:
    _log.warning(
        "%s computes attention by its own code, which `keras.config.enable_flash_attention()` does not change: its "
        "memory grows with the square of the length. Use `keras.layers.MultiHeadAttention` or "
        "`keras.ops.dot_product_attention` in a layer of your own, or shorter sequences.",
        kind.__name__,
    )


def _works_by_blocks(layer: keras.layers.Layer, length: int | None) -> bool:
    """Whether a layer's attention of so many queries is computed by blocks."""
    if not asked.is_enabled() or _is_off.get() or in_symbolic_scope():
        return False
    return (length is None or length > blockwise.BLOCK) and not _is_bidirectional(layer)


def _is_bidirectional(layer: keras.layers.Layer) -> bool:
    """Whether a layer of Gemma 3's is an encoder's, whose code needs all queries."""
    return getattr(layer, "use_bidirectional_attention", False)


@functools.cache
def _wrap_mask(owner: type, name: str) -> None:
    """Notes on a block's mask how its rows are made."""
    found = keras_hub.mask_arguments(owner, name)
    takes, sequence, others, cache, start = found.signature, found.sequence, found.others, found.cache, found.start
    pairs = [each for each in others if each.endswith("attention_mask")]
    known = {cache, start, *pairs, *(each for each in others if each.endswith(("padding_mask", "use_causal_mask")))}

    @wrap(owner, name, listed="*_attention_mask")
    def mask(stock, *args, **kwargs):
        found, given = stock(*args, **kwargs), takes.bind(*args, **kwargs).arguments
        if not asked.is_enabled() or in_symbolic_scope() or found is None or found.shape[1] == 1:
            return found
        is_other = any(given.get(each) is not None for each in {*others} - known) or given.get(cache) is not None
        if is_other or _is_bidirectional(given["self"]):
            return found
        x, made = given[sequence], {each: _rows_of(given[each]) for each in pairs if given.get(each) is not None}
        batch, length, own = tf.shape(x)[0], x.shape[1] or tf.shape(x)[1], get_mask(x)

        def rows(begin, count):
            chunk = tf.zeros([batch, count, 1])
            set_mask(chunk, own)
            parts = {each: make(begin, count) for each, make in made.items()}
            changed = {sequence: chunk, cache: keras_hub.cache_of(owner, length), start: begin}
            return stock(**(given | parts | changed))

        return note_rows(found, rows)


def _rows_of(mask: tf.Tensor) -> Callable:
    """What makes rows of a mask of queries and keys; those behind the last are the last."""
    if (noted := rows_of(mask)) is not None:
        return noted
    if mask.shape[1] == 1:
        return lambda begin, count: mask
    return lambda begin, count: tf.gather(mask, tf.minimum(begin + tf.range(count), tf.shape(mask)[1] - 1), axis=1)


def _which_see_any(mask: tf.Tensor, rows: Callable) -> tf.Tensor:
    """A mask of [batch, queries, 1] that says which queries see any key, for who asks no more than that."""
    size, length = blockwise.BLOCK, tf.shape(mask)[1] if mask.shape[1] is None else mask.shape[1]

    def block(at):
        return tf.reduce_any(tf.cast(rows(at * size, size), tf.bool), -1)

    count = -(-length // size)
    found = tf.map_fn(block, tf.range(count), fn_output_signature=tf.bool, parallel_iterations=1)
    found = tf.reshape(tf.transpose(found, [1, 0, 2]), [tf.shape(mask)[0], count * size, 1])[:, :length]
    return note_rows(tf.cast(found, mask.dtype), rows)


@functools.cache
def _wrap_call(owner: type) -> None:
    @wrap(owner, "call")
    def call(stock, self, x, attention_mask=None, *args, **kwargs):
        rows = rows_of(attention_mask)
        if rows is not None and _works_by_blocks(self, x.shape[1]):
            attention_mask = _which_see_any(attention_mask, rows)
        return stock(self, x, attention_mask, *args, **kwargs)


@functools.cache
def _wrap_window(owner: type, name: str) -> None:
    @wrap(owner, name, listed="*_window")
    def window(stock, self, attention_mask, cache_update_index=0):
        """KerasHub makes the window of all queries and keys, and takes these queries' rows."""
        length = tf.shape(attention_mask)[1]
        if not _works_by_blocks(self, None):
            return stock(self, attention_mask, cache_update_index)
        begin = 0 if _begin.get() is None else _begin.get()
        rows = tf.cast(cache_update_index + begin + tf.range(length), tf.int64)[:, None]
        columns = tf.cast(tf.range(tf.shape(attention_mask)[2]), tf.int64)
        return tf.logical_and(tf.cast(attention_mask, tf.bool), tf.abs(rows - columns) < self.sliding_window_size)


@functools.cache
def _wrap_attention(owner: type, name: str) -> None:
    takes = inspect.signature(getattr(owner, name))
    query, key, value, mask = list(takes.parameters)[1:5]
    start = next((each for each in ("cache_update_index", "start_index") if each in takes.parameters), None)
    if keras_hub.window_method(owner) is not None:  # it alone needs to know
        start = None

    @wrap(owner, name, listed="*_attention")
    def attention(stock, *args, **kwargs):
        given = takes.bind(*args, **kwargs).arguments
        layer = given["self"]
        if not _is_bidirectional(layer):
            asked.note_attention()
        if not _works_by_blocks(layer, given[query].shape[1]):
            return stock(*args, **kwargs)
        made, first = given.get(mask), given.get(start) if start else None
        rows = _rows_of(made) if made is not None else lambda begin, count: None

        def run(parts: Sequence[tf.Tensor], begin, count):
            changed = dict(zip((query, key, value), parts, strict=True)) | {mask: rows(begin, count)}
            if start:
                changed[start] = begin if first is None else first + begin
            with _begin.set_to(begin):
                return stock(**(given | changed))

        dropout = keras_hub.score_dropout(layer)
        inputs = [given[query], given[key], given[value], *map(tf.convert_to_tensor, _weights(layer))]
        with block_run.directly(layer, dropout) as counts:
            return _Blocks(layer, given[query], run, _seed(dropout, given.get("training")), counts).run(inputs)


def _weights(layer: keras.layers.Layer) -> list[keras.Variable]:
    """The variables that a layer's own code reads, which are values of its attributes in ZeRO, too."""
    return [each for each in vars(layer).values() if isinstance(each, keras.Variable)]


def _seed(dropout: keras.layers.Dropout | None, training: bool | None) -> tf.Tensor | None:
    """The seed of this call's dropout of scores, if there is any."""
    is_used = dropout is not None and dropout.rate > 0 and (is_training() if training is None else training)
    return dropout.seed_generator.next() if is_used else None


class _Blocks(blockwise.Loop):
    """One call of a layer's own attention code.

    Args:
        run: calls it for a block of queries.
        seed: of the dropout of scores, or None.
        counts: attributes of the layer on this device.
    """

    def __init__(
        self, layer: keras.layers.Layer, query: tf.Tensor, run: Callable, seed: tf.Tensor | None, counts: dict
    ):
        super().__init__(query, size=blockwise.BLOCK)
        self._layer, self._run_code, self._seed, self._counts = layer, run, seed, counts
        self._state = remat.copied_call_state()

    def backward(self, given: Sequence[tf.Tensor], upstream: tf.Tensor) -> list[tf.Tensor]:
        with remat.call_state(self._state), local_shards.attributes(self._layer, self._counts):
            return super().backward(given, upstream)

    def _block(self, at, query, key, value, others: Sequence[tf.Tensor]) -> tf.Tensor:
        scope = StatelessScope(initialize_variables=False)
        scope.state_mapping.update(zip(map(id, _weights(self._layer)), others, strict=True))
        seeds = [] if self._seed is None else [blockwise.block_seed(self._seed, at)]
        with scope, local_shards.repeated_seeds(seeds):
            return tf.cast(self._run_code((query, key, value), at * self._size, self._size), value.dtype)
