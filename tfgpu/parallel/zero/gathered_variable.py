"""ZeRO stage 3: variables of which each replica keeps one piece, gathered for a layer while it runs.

The layer keeps its variable, now a `GatheredVariable`, which holds nothing; the model trains the variable's shard in
its place. Reading a `GatheredVariable`

- in a unit returns what the unit has gathered. A unit is a layer that the model calls, with all layers within it. It
  gathers its variables in one collective, while the unit before it runs, and is rematerialized: the backward pass
  gathers them again. So a device holds no more than the variables of the units at work and of the next one;
- elsewhere in a replica gathers the variable there and then;
- outside replicas returns the full value.

The gradient of a gathered value is reduced to the pieces: each replica gets its own piece of the sum over all replicas.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf

from tfgpu.compat import layers, slots, variables
from tfgpu.compat import tensorflow as private
from tfgpu.compat.keras import get_stateless_scope, in_stateless_scope, in_symbolic_scope, tree
from tfgpu.compat.patch import override, wrap
from tfgpu.core import collectives, gradient_weights, replication, step_context
from tfgpu.core.state import layer_state, sharded_variable
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError
from tfgpu.parallel import compiled_calls, device_placement, model_graph, shard_patches
from tfgpu.parallel.rematerialization import remat
from tfgpu.parallel.zero import reduction, sharding, trial_weights
from tfgpu.repairs import saving

_SUMS = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
"""Regularizers whose value for a variable is the sum of those for its pieces."""
_reads = step_context.Slot("zero.reads")
"""The ids of the variables that the running unit has read."""


class GatheredVariable(variables.VirtualVariable):
    """A variable of which each replica keeps one piece.

    An existing variable gets this class, so that all who hold the variable hold this one.
    """

    @property
    def shards(self) -> list[keras.Variable]:
        """The one shard, which is trained in its place."""
        return [sharded_variable.shard_of(self)]

    def read(self) -> tf.Tensor:
        if in_symbolic_scope():
            return tf.zeros(self.shape, variables.storage_dtype(self))
        found = get_stateless_scope().get_current_value(self) if in_stateless_scope() else None
        if found is not None:
            reads = _reads.get()
            if reads is not None:
                reads.add(id(self))
            return found
        if replication.replica_context() is None:
            shard = sharded_variable.shard_of(self)
            tried = trial_weights.value_of(shard)
            return _full_value(shard) if tried is None else tried
        return _all_gather([self], {id(self)})[0]

    def write(self, value: np.ndarray | ArraySlices) -> None:
        sharded_variable.ShardedVariable(self.shards).assign(value)

    def shared_name(self) -> str:
        return variables.shared_name(sharded_variable.shard_of(self))

    def numpy(self) -> np.ndarray:
        return sharded_variable.ShardedVariable(self.shards).numpy()

    def assign(self, value):
        if replication.replica_context() is not None:
            raise InputError(
                f"{self.path!r} is sharded over the replicas, and a layer assigns it in a step. Shard the model with "
                "stage=2, which leaves variables whole."
            )
        return self.write(value) if isinstance(value, ArraySlices) else super().assign(value)

    @property
    def handle(self):
        raise InputError(
            f"{self.path!r} is sharded over the replicas and has no gradient of its own. Use the gradients of "
            "`model.trainable_variables`."
        )

    @property
    def trainable(self) -> bool:
        return sharded_variable.shard_of(self).trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        sharded_variable.shard_of(self).trainable = value


def shard_parameters(
    model: keras.Model, placement_of: Callable, strategy: tf.distribute.Strategy, config: sharding.ZeroConfig
) -> None:
    """Replaces the model's trainable variables by shards. What layers assign themselves stays whole.

    Args:
        model: built; its variables may be on any device.
        placement_of: the placement at which a variable is used.
        strategy: the replicas.
        config: of stage 3.
    """
    export_full_variables()
    shards: dict[int, list] = {}
    own: dict[int, list] = {}
    for layer in [model, *model_graph.layers_within(model).values()]:
        if id(layer) in own:  # a layer within two others
            continue
        own[id(layer)] = found = list(layers.own_trainable(layer))
        for variable in found:
            if id(variable) not in shards:
                shards[id(variable)] = [_shard(variable, placement_of(variable), strategy, config)]
        if found:
            shard_patches.replace_variables(layer, shards)
            shard_patches.refuse_methods(layer, ("quantize",), f"the variables of {layer.name!r}, which are sharded")
    for unit in {id(unit): unit for unit in _units(model)}.values():
        inner = [unit, *model_graph.layers_within(unit).values()]
        _gather_while_running(unit, list({id(v): v for layer in inner for v in own[id(layer)]}.values()), inner)


@functools.cache
def export_full_variables() -> None:
    """Makes `Model.export` write full variables: a SavedModel would hold the pieces of the first replica."""

    @wrap("keras.Model.export")
    def export(stock, self, *args, **kwargs):
        if not any(map(shard_patches.is_piece, self.weights)):
            return stock(self, *args, **kwargs)
        if not model_graph.is_functional(self):
            raise InputError(
                f"{self.name!r} is sharded over replicas and has no graph, so `export` cannot rebuild it. Save it with "
                "`model.save`, open the file on one device, and export that model."
            )
        values = self.get_weights()  # on all workers: reading is a collective
        if saving.writes(self):
            full = keras.models.clone_model(self)
            full.set_weights(values)
            full.export(*args, **kwargs)


def _shard(variable, placement: device_placement.DevicePlacement, strategy, config) -> keras.Variable:
    """The variable's shard; the variable itself holds nothing from now on."""
    shard = sharding.create_shard(variable, placement, strategy, config)
    shard.trainable = variable.trainable
    if variable.regularizer is not None:
        shard.regularizer = _ShardRegularizer(variable)
    sharded_variable.ShardedVariable([shard]).assign(variables.take_value(variable))  # frees its memory
    variable.__class__ = GatheredVariable
    return shard


def _units(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """The layers that a model, and models within it, call; a model with variables of its own is one unit."""
    if isinstance(layer, keras.Model) and not layers.own_trainable(layer):
        for inner in layers.layers_within(layer, include_self=False, recursive=False):
            yield from _units(inner)
    elif layer.variables:
        yield layer


def _gather_while_running(unit: keras.layers.Layer, gathered: Sequence[GatheredVariable], inner: Sequence) -> None:
    """Makes a unit gather these variables for each run, and drop them after it.

    Args:
        unit: the layer.
        gathered: its variables, and those of layers within it.
        inner: the unit and the layers within it.
    """
    if not gathered:
        return _compile_while_running(unit)
    stock, dtype = unit.call, _common_narrow_dtype(inner)

    def with_variables(*args, **kwargs):
        with _gathered_for(gathered, dtype, (args, kwargs)):
            return compiled_calls.run(unit, stock, args, kwargs, sharding.device_of(sharded_variable.shard_of(first)))

    first, slots.of(unit).compiles_within = gathered[0], True
    with_variables.__self__ = next((layer for layer in inner if not isinstance(layer, keras.Model)), None)
    rematerialized = remat.remat(with_variables)

    def call(*args, **kwargs):
        is_apart = replication.replica_context() is None or step_context.current().is_trying
        if in_symbolic_scope() or is_apart:
            return stock(*args, **kwargs)
        if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in tree.flatten((args, kwargs))):
            return stock(*args, **kwargs)  # cannot be recomputed: each variable is gathered where it is read, and kept
        is_in_remat = isinstance(get_stateless_scope(), (remat.RecordingScope, remat.ReplayScope))
        return (with_variables if is_in_remat else rematerialized)(*args, **kwargs)

    override(unit, "call", functools.update_wrapper(call, stock, updated=()), by=__name__)


def _compile_while_running(unit: keras.layers.Layer) -> None:
    """Lets XLA compile a unit without sharded variables too: dropout then draws XLA's numbers, as one device does."""
    stock = unit.call

    def call(*args, **kwargs):
        context = replication.replica_context()
        if context is None:
            return stock(*args, **kwargs)
        # `context.devices` looks this worker's devices up by the number of the replica among those of all workers.
        devices = tuple(context.strategy.extended.worker_devices)
        device = device_placement.DevicePlacement(devices).local_device
        return compiled_calls.run(unit, stock, args, kwargs, device)

    override(unit, "call", functools.update_wrapper(call, stock, updated=()), by=__name__)


@contextlib.contextmanager
def _gathered_for(gathered: Sequence[GatheredVariable], dtype: str | None, arguments: object) -> Iterator[None]:
    """Runs the block with these variables gathered, which begins once the unit before it could run."""
    inputs = tf.nest.flatten([leaf for leaf in tree.flatten(arguments) if tf.is_tensor(leaf)], expand_composites=True)
    mapping, reads = get_stateless_scope().state_mapping, set()
    start = _start_of_unit_before(inputs)
    with tf.control_dependencies(None):  # in the second run of a unit all that is traced waits for its gradient
        found = _all_gather(gathered, reads, dtype, after=start)
    before = {id(v): mapping.get(id(v)) for v in gathered}
    mapping |= {id(v): value for v, value in zip(gathered, found, strict=True)}
    try:
        with _reads.set_to(reads):
            yield
    finally:
        mapping |= before


def _start_of_unit_before(inputs: list[tf.Tensor]) -> list:
    """What the unit that this replica traced before waits for; the next unit will get what this one waits for.

    A collective that waits for it runs beside that unit. If it waited for its own unit's inputs, each layer would first
    communicate and then compute; if it waited for nothing, all weights would be gathered at once. The first unit of the
    backward pass waits for its own gradient: the last of the forward pass holds the same variables.
    """
    if tf.executing_eagerly():
        return []
    graph, is_second_run = tf.compat.v1.get_default_graph(), isinstance(get_stateless_scope(), remat.ReplayScope)
    kept = vars(slots.of(graph)).setdefault("zero_units", {})
    replica = replication.replica_number(replication.replica_context())
    start = [*inputs, *private.control_inputs(graph)]
    was_second_run, before = kept.get(replica, (False, []))
    kept[replica] = is_second_run, start
    return before if was_second_run == is_second_run else start


def _common_narrow_dtype(inner: Sequence[keras.layers.Layer]) -> str | None:
    """The 16-bit dtype that all of a unit computes in, so that half as much is sent; else None."""
    dtypes = {layer.compute_dtype if layer.autocast else None for layer in inner}
    return dtypes.pop() if dtypes in ({"float16"}, {"bfloat16"}) else None


def _all_gather(
    gathered: Sequence[GatheredVariable], reads: set, dtype: str | None = None, after: Sequence = ()
) -> list[tf.Tensor]:
    """The full values of variables, from the pieces of all replicas.

    Args:
        gathered: the variables.
        reads: the ids of those that have been read when the gradient is taken; the others have no gradient.
        dtype: to cast to before pieces are sent; None leaves them.
        after: tensors and operations that come first.
    """
    shards = [sharded_variable.shard_of(variable) for variable in gathered]
    narrow = [dtype if dtype and _is_autocast(variable) else None for variable in gathered]

    @tf.custom_gradient
    def gather(*pieces):
        sent = [tf.cast(piece, narrower) if narrower else piece for piece, narrower in zip(pieces, narrow, strict=True)]

        def gradient(*upstream):
            wanted = [v.trainable and id(v) in reads for v in gathered]
            wide = [_cast(g, p.dtype) if want else None for g, p, want in zip(upstream, pieces, wanted, strict=True)]
            facts = step_context.step()
            weighed = gradient_weights.weigh(wide, facts is not None and facts.loss_is_divided)  # by rows
            return reduction.reduce_pieces(weighed, shards, scatter=True)

        return reduction.all_gather(sent, shards), gradient

    pieces = [_local_value(shard) for shard in shards]
    # Not the reads wait: TensorFlow drops the control inputs of an operation whose variable it captures beside it.
    with tf.control_dependencies(after):
        return gather(*(_on_its_device(piece) for piece in pieces))


def _on_its_device(piece: tf.Tensor) -> tf.Tensor:
    with tf.device(piece.device):
        return tf.identity(piece)


def _is_autocast(variable: GatheredVariable) -> bool:
    return variables.autocasts(variable) and keras.backend.is_float_dtype(variables.storage_dtype(variable))


def _local_value(shard) -> tf.Tensor:
    copy = layer_state.own(shard)
    with tf.device(copy.device):
        return tf.convert_to_tensor(copy)


def _cast(gradient, dtype: tf.DType):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def _full_value(shard) -> tf.Tensor:
    """The full value, outside replicas."""
    held = variables.held(shard)
    if replication.spans_processes(held.distribute_strategy):
        return tf.convert_to_tensor(sharded_variable.ShardedVariable([shard]).numpy())
    sizes, pieces = sharding.full_shape(shard), [tf.convert_to_tensor(piece) for piece in held.values]

    def full(*found):
        return tf.reshape(tf.concat(found, 0)[: int(np.prod(sizes))], sizes)

    @tf.custom_gradient
    def without_gradient(*found):
        def gradient(*upstream):
            raise InputError(
                "A sharded model (stage 3) has gradients within its replicas alone. Use `model.fit`, `Trainer`, or "
                "`strategy.run`."
            )

        return full(*found), gradient

    if tf.executing_eagerly():
        return without_gradient(*pieces)
    return full(*map(tf.stop_gradient, pieces))  # `export` would trace the custom gradient


class _ShardRegularizer(keras.regularizers.Regularizer):
    """A variable's regularizer, as the regularizer of its shard."""

    def __init__(self, variable):
        self._stock, self._variable = variable.regularizer, variable

    def __call__(self, piece) -> tf.Tensor:
        if replication.replica_context() is None:
            return self._stock(self._variable)
        if not isinstance(self._stock, _SUMS):
            return remat.remat(lambda _: self._stock(self._variable))(tf.convert_to_tensor(piece))
        return _sum_over_pieces(self._stock, tf.convert_to_tensor(piece))

    def get_config(self) -> dict:
        return self._stock.get_config()


def _sum_over_pieces(regularizer: Callable, piece: tf.Tensor) -> tf.Tensor:
    """The regularizer of the full variable: the sum over the replicas' pieces."""

    @tf.custom_gradient
    def add(given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            own = tf.convert_to_tensor(regularizer(given))

        def gradient(upstream):
            (total,) = collectives.sum_small(gradient_weights.weigh([upstream], False))
            return tape.gradient(own, given) * tf.cast(total, given.dtype)

        (total,) = collectives.sum_small([own])
        return total, gradient

    return add(piece)
