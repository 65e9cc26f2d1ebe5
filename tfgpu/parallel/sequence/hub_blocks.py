"""KerasHub's decoder blocks on parts of the sequence.

A part is to KerasHub's code what a chunk of a prompt is in generation: queries from some position on, and a cache of
all keys. So a rank asks the block for the mask of such a chunk, and gives its attention all keys and values. As in
`attention.py` these are dropped after the forward pass, with the scores and the mask, and gathered again in the
backward pass. The balance loss of experts is computed once, of all positions. Everything else in a block works by
position, which is tried (`rules.py`).
"""

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

import keras
import tensorflow as tf

from tfgpu.compat import keras_hub, layers, slots
from tfgpu.compat.keras import get_mask, in_symbolic_scope, set_mask
from tfgpu.compat.patch import wrap
from tfgpu.compat.tensorflow import without_recording
from tfgpu.core import step_context
from tfgpu.core.randomness import rng
from tfgpu.core.randomness.row_draws import DrawShard
from tfgpu.core.row_mixing import choices
from tfgpu.parallel import hub_attention, model_graph
from tfgpu.parallel.rematerialization import remat
from tfgpu.parallel.sequence import positions, ranks
from tfgpu.parallel.tensor import local_shards


def install(model: keras.Model) -> None:
    """Lets ranks compute parts of KerasHub's blocks within a model, in this process from now on."""
    for layer in model_graph.layers_within(model).values():
        hub_attention.prepare(type(layer))  # what is wrapped here lies around it
        for owner, name in keras_hub.mask_methods(type(layer)):
            _wrap_mask(owner, name)
        if keras_hub.balances(type(layer)):
            _wrap_balance(sys.modules[type(layer).__module__])
        found = keras_hub.attention_method(type(layer))
        if found is not None:
            _wrap_attention(*found)
            choices.by_rows(layer)  # its mask is of more keys than it is called with, which a trial would not know


@functools.cache
def _wrap_mask(owner: type, name: str) -> None:
    found = keras_hub.mask_arguments(owner, name)
    takes, sequence, others, cache, start = found.signature, found.sequence, found.others, found.cache, found.start

    @wrap(owner, name, listed="*_attention_mask")
    def mask(stock, *args, **kwargs):
        rank, given = ranks.here(), takes.bind(*args, **kwargs).arguments
        x = given[sequence]
        if rank is None or in_symbolic_scope() or given.get(cache) is not None:
            return stock(*args, **kwargs)
        length = rank.group.length
        if not positions.is_part(x, length):
            return stock(*args, **kwargs)
        parts = {each: given[each] for each in others if positions.is_part(given.get(each), length)}
        paddings = {each: part for each, part in parts.items() if part.shape.rank == 2}
        brought = rank.meet(ranks.to_all, (get_mask(x), *paddings.values()))
        own, *wholes = (None if parts[0] is None else tf.concat(parts, 1) for parts in brought)
        rows = tf.shape(x)[0]
        given = given | dict(zip(paddings, wholes, strict=True)) | {start: rank.begin}

        def make() -> tf.Tensor:
            chunk = tf.zeros([rows, length, 1])
            chunk.set_shape([x.shape[0], length, 1])
            if own is not None:
                set_mask(chunk, own)
            return stock(**(given | {sequence: chunk, cache: keras_hub.cache_of(owner, length * rank.group.count)}))

        found = make()
        if found is not None:
            slots.of(found).sequence_mask = make
        return found


@functools.cache
def _wrap_attention(owner: type, name: str) -> None:
    takes = inspect.signature(getattr(owner, name))
    query, key, value, mask = list(takes.parameters)[1:5]
    start = next((each for each in ("cache_update_index", "start_index") if each in takes.parameters), None)

    @wrap(owner, name, listed="*_attention")
    def attention(stock, *args, **kwargs):
        rank = ranks.here()
        if rank is None or in_symbolic_scope():
            return stock(*args, **kwargs)
        given = takes.bind(*args, **kwargs).arguments
        parts = (given[query], given[key], given[value])
        if not all(positions.is_part(each, rank.group.length) for each in parts):
            return stock(*args, **kwargs)
        if start is not None:
            given[start] = rank.begin
        made = given.get(mask)
        make = slots.get(made, "sequence_mask", lambda: made)

        def run(query_part, keys, values):
            return stock(**(given | {query: query_part, key: keys, value: values, mask: make()}))

        for variable in layers.own_trainable(given["self"]):
            tf.convert_to_tensor(variable)  # so that the tape around knows of it
        return _Attention(rank, run).outputs(*parts)


@functools.cache
def _wrap_balance(module: ModuleType) -> None:
    @wrap(module, keras_hub.BALANCE, listed="*_load_balancing_loss")
    def balance(stock, router_logits, num_experts, top_k, attention_mask=None):
        rank = ranks.here()
        if rank is None or step_context.current().is_trying:
            return stock(router_logits, num_experts, top_k, attention_mask)

        def of_all(brought: list) -> list:
            """The loss for the first rank, and none for the others."""
            scores, masks = zip(*brought, strict=True)
            parts = [tf.reshape(each, [-1, rank.group.length, num_experts]) for each in scores]
            mask = None if masks[0] is None else tf.concat(masks, 1)
            with tf.device(rank.group.devices[0]):
                loss = stock(tf.reshape(tf.concat(parts, 1), [-1, num_experts]), num_experts, top_k, mask)
            return [loss, *(tf.zeros_like(loss) for _ in brought[1:])]

        if attention_mask is not None and attention_mask.shape.rank == 3:  # it asks only whether a row has any
            attention_mask = tf.reduce_any(tf.cast(attention_mask, tf.bool), -1, keepdims=True)
        return rank.meet(of_all, (router_logits, attention_mask))


class _Attention:
    """One rank's call of a layer's own attention code, with the keys and values of all ranks."""

    def __init__(self, rank: ranks.Rank, run: Callable):
        self._rank, self._run = rank, run
        self._state, self._step = remat.copied_call_state(), step_context.copied()

    def outputs(self, query: tf.Tensor, key: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
        """What the code returns for this rank's queries."""
        keys, values = self._rank.meet(ranks.to_all, (key, value))

        @tf.custom_gradient
        def whole(query, *parts):
            with without_recording(), local_shards.noted_seeds() as seeds:
                output = self._attend(query, parts)

            def gradient(*upstream, variables=()):
                return self._gradient(query, parts, upstream, variables, seeds)

            return output, gradient

        return whole(query, *keys, *values)

    def _attend(self, query: tf.Tensor, parts: Sequence[tf.Tensor]) -> tf.Tensor:
        count = self._rank.group.count
        shard = DrawShard(-2, self._rank.at, count)  # of scores [batch, ..., queries, keys]
        with ranks.alone(), hub_attention.whole(), rng.sharding(shard):
            return self._run(query, tf.concat(parts[:count], 1), tf.concat(parts[count:], 1))

    def _gradient(self, query, parts, upstream, variables, seeds) -> object:
        device = self._rank.group.devices[self._rank.at]
        with (
            tf.device(device),
            remat.call_state(self._state),
            step_context.scope(**self._step),
            tf.control_dependencies(upstream),
            tf.GradientTape() as tape,
        ):
            again = [tf.identity(each) for each in (query, *parts)]
            tape.watch(again)
            with local_shards.repeated_seeds(seeds):
                output = self._attend(again[0], again[1:])
        with tf.device(device):
            found = tape.gradient(output, [*again, *variables], output_gradients=upstream[0])
        return (found[: len(again)], found[len(again) :]) if variables else found
