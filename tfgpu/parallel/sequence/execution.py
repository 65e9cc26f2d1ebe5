"""Runs a model's step on parts of the sequence, inside the model's own `call`.

The model is called with all positions and returns all positions, so the loss, its divisors, masks, metrics and the
update stay Keras's. Inside, each rank runs the model's code on its part; the gradient of all ranks is taken at once.
"""

import functools

import keras
import tensorflow as tf

from tfgpu.compat import keras_hub, layers, slots
from tfgpu.compat.keras import in_symbolic_scope, tree
from tfgpu.compat.patch import override, wrap
from tfgpu.core import logits, replication
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, model_graph
from tfgpu.parallel.mesh import Mesh
from tfgpu.parallel.sequence import attention, hub_blocks, positions, rules
from tfgpu.parallel.sequence.ranks import Group, Rank
from tfgpu.parallel.tensor import local_shards


def install(model: keras.Model, mesh: Mesh) -> None:
    """Makes a model compute parts of each sequence on the devices along `sequence`; outside replicas it stays as it is.

    Args:
        model: built.
        mesh: with devices.
    """
    rules.install()
    attention.install()
    _compute_losses_in_parts()
    hub_blocks.install(model)
    local_shards.draw_seeds_once()
    placements = [
        device_placement.on_devices(mesh.device(data=at, sequence=rank) for at in range(mesh.data))
        for rank in range(mesh.sequence)
    ]
    stock = model.call

    @functools.wraps(stock)
    def call(*args, **kwargs):
        if in_symbolic_scope() or replication.replica_context() is None:
            return stock(*args, **kwargs)
        return _Run(model, stock, [each.local_device for each in placements], args, kwargs).outputs()

    override(model, "call", call, by=__name__)


@functools.cache
def _compute_losses_in_parts() -> None:
    """Computes the cross-entropy and the accuracy of outputs in parts where the parts are, without gathering them."""

    @wrap("nn.sparse_categorical_crossentropy")
    def sparse(stock, target, output, from_logits=False, axis=-1):
        found = logits.noted(output, "sequence_parts")
        if found is None or not from_logits or axis not in (-1, len(output.shape) - 1) or len(output.shape) < 3:
            return stock(target, output, from_logits, axis)
        parts, devices = found

        def losses(own, part):
            return stock(own, tf.cast(part, output.dtype), from_logits, axis)

        own = tf.split(tf.convert_to_tensor(target), len(parts), 1)
        return tf.concat(positions.on_each(losses, devices, own, parts), 1)

    @wrap("numpy.argmax")
    def argmax(stock, x, axis=None, keepdims=False):
        found = logits.noted(x, "sequence_parts")
        if found is None or keepdims or len(x.shape) < 3 or axis not in (-1, len(x.shape) - 1):
            return stock(x, axis, keepdims)
        parts, devices = found
        # In int64, because concatenating int32 works in host memory.
        found = positions.on_each(lambda part: tf.cast(stock(part, -1, False), tf.int64), devices, parts)
        return tf.cast(tf.concat(found, 1), tf.int32)


class _Run:
    """One call of the model."""

    def __init__(self, model: keras.Model, stock, devices: list[str], args: tuple, kwargs: dict):
        self._model, self._stock = model, stock
        self._given = (args, kwargs)
        self._leaves = tree.flatten(self._given)
        self._floats = [at for at, leaf in enumerate(self._leaves) if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        self._group = Group(devices, _length(model, self._leaves, len(devices)))

    def outputs(self) -> object:
        """The model's outputs for all positions, on the first device."""
        block = tf.custom_gradient(lambda *given: self._forward(given))
        found = list(block(*(self._leaves[at] for at in self._floats)))
        results = tree.flatten(self._structure)
        for kept in self._kept:
            kept.put(found, results)
        for layer, at in self._losses:
            layer.add_loss(found[at])
        return tree.pack_sequence_as(self._structure, results)

    def _forward(self, given) -> tuple[list[tf.Tensor], object]:
        group = self._group
        leaves = list(self._leaves)
        for at, value in zip(self._floats, given, strict=True):
            leaves[at] = value
        tape = tf.GradientTape()
        with tape:
            tape.watch(given)
            whole = tree.pack_sequence_as(self._given, leaves)
            split = positions.split(whole, group.length, group.devices, range(2, 9))

            def call(rank: Rank):
                args, kwargs = split[rank.at]
                return self._stock(*args, **kwargs)

            of_ranks = group.run(call, tape)
            losses = [*group.losses, *self._losses_of_parts()]
        for variable in tape.watched_variables():
            variable.read_value()  # in this thread, too, so that TensorFlow counts it among the block's
        flat = self._keep(of_ranks)
        self._losses = [(layer, len(flat) + at) for at, (layer, _) in enumerate(losses)]
        flat += [loss for _, loss in losses]

        def gradient(*upstream, variables=()):
            found = tape.gradient(flat, [*given, *variables], output_gradients=list(upstream))
            return (found[: len(given)], found[len(given) :]) if variables else found

        return flat, gradient

    def _keep(self, of_ranks: list) -> list[tf.Tensor]:
        """What the block returns: for each output its parts, or the one that all ranks have, and their logits."""
        self._structure, self._kept, flat = of_ranks[0], [], []
        columns = zip(*(tree.flatten(each) for each in of_ranks), strict=True)
        for at, (column, is_parted) in enumerate(zip(columns, self._are_parted(of_ranks[0]), strict=True)):
            column = list(column) if is_parted else [column[0]]
            known = logits.find_all(column)
            tensors = column + (known[0] if known else [])
            if column[0].dtype.is_floating:
                self._kept.append(_Output(at, len(flat), column, known, self._group))
                flat += tensors
            else:
                self._kept.append(_Output(at, None, column, None, self._group))
        return flat

    def _are_parted(self, first: object) -> list[bool]:
        """Whether each output is a part of the sequence on each rank."""
        found = [positions.is_part(leaf, self._group.length) for leaf in tree.flatten(first)]
        symbolic = tree.flatten(self._model.outputs) if model_graph.is_functional(self._model) else found
        sizes = [getattr(each, "shape", (None,) * 2) for each in symbolic]
        return [
            is_part and (len(size) < 2 or size[1] != self._group.length)
            for is_part, size in zip(found, sizes, strict=True)
        ]

    def _losses_of_parts(self) -> list[tuple[keras.layers.Layer, tf.Tensor]]:
        """Each layer's loss that its parts added.

        Raises:
            InputError: it is none whose parts are known to add up.
        """
        found = []
        for layer in [self._model, *model_graph.layers_within(self._model).values()]:
            added = layers.added_losses(layer)
            if added and not keras_hub.balances(type(layer)):
                layers.clear_losses(self._model)
                raise InputError(
                    f"{layer.name!r} adds a loss in training only. Each device would compute it from its part of the "
                    "sequence, and the parts do not add up. Add it in inference too (the layer then gets all "
                    "positions), remove it, or use a mesh without `sequence`."
                )
            if added:
                found.append((layer, tf.add_n(added)))
        layers.clear_losses(self._model)
        return found


class _Output:
    """One output of the model, from what the block returns."""

    def __init__(self, at: int, begin: int | None, column: list[tf.Tensor], known: tuple | None, group: Group):
        self._at, self._begin, self._column, self._known, self._group = at, begin, column, known, group

    def put(self, found: list[tf.Tensor], results: list) -> None:
        """Puts the output in its place among the results."""
        count = len(self._column)
        parts = self._column if self._begin is None else found[self._begin : self._begin + count]
        for part, inner in zip(parts, self._column, strict=True):
            mask = positions.get_mask(inner)
            if mask is not None:
                positions.set_mask(part, mask)
        with tf.device(self._group.devices[0]):
            value = positions.joined(parts) if count > 1 else parts[0]
            if self._known is not None:
                begin = self._begin + count
                inner = found[begin : begin + count]
                mask = positions.get_mask(value)
                value = logits.Logits(tf.concat(inner, 1) if count > 1 else inner[0], self._known[1]).attach_to(value)
                if mask is not None:
                    positions.set_mask(value, mask)
        if count > 1:
            slots.of(value).sequence_parts = tuple(parts), self._group.devices
        results[self._at] = value


def _length(model: keras.Model, leaves: list, count: int) -> int:
    """The positions in a part of the sequence.

    Raises:
        InputError: the inputs have no known length, or one that does not divide.
    """
    sizes = {leaf.shape[1] for leaf in leaves if tf.is_tensor(leaf) and leaf.shape.rank and leaf.shape.rank > 1}
    if not sizes or None in sizes:
        raise InputError(
            f"{model.name!r} is spread along `sequence`, which needs inputs [batch, length, ...] whose length is known "
            "when the step is built. Give it as `keras.Input((1024,))`, and batches of that length."
        )
    length = max(sizes)
    if length % count:
        low = length // count * count
        raise InputError(
            f"A sequence of {length} positions does not divide into {count} parts. Use a length of "
            f"{f'{low} or ' if low else ''}{low + count} (pad and mask), or another size of `sequence`."
        )
    return length // count
