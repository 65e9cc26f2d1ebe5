"""Variables of which each replica keeps a piece alone: gathered for a layer while it runs, and dropped after it.

Stage 3 of the sharded optimizer ("fully sharded"). The layer still has its variable, now `GatheredVariable`, which
holds nothing; the model trains the variable's shard in its place. What reads a `GatheredVariable`

- within a unit gets what the unit has gathered. A unit is a layer that the model calls, with all that lies within it.
  It gathers once its inputs are there, in one exchange, and is recomputed: in the backward pass it gathers anew. So at
  no time more than the variables of the units that are at work lie on a device;
- elsewhere in a replica gathers it there and then;
- outside of replicas gets the whole, put together.

The gradient of what was gathered goes back to the pieces, each replica's its own, summed over all.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np
import tensorflow as tf
from keras.src import backend, tree
from keras.src.backend.common.stateless_scope import get_stateless_scope, in_stateless_scope
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from tfgpu.compat.patch import wrap
from tfgpu.core import collectives, gradient_weights, layer_state, replication, step_context
from tfgpu.errors import InputError
from tfgpu.parallel import device_placement, model_graph, sharded_variable
from tfgpu.parallel.rematerialization import remat
from tfgpu.parallel.zero import sharding
from tfgpu.repairs import saving

_ADDS_UP = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)
_here = threading.local()


class GatheredVariable(backend.Variable):
    """A variable that is in pieces; made of one that was not, so that whoever holds it holds this."""

    @property
    def shards(self) -> list[keras.Variable]:
        """What is trained in its place."""
        return [self._tfgpu_shard]

    @property
    def value(self) -> tf.Tensor:
        return self._maybe_autocast(self._found())

    def _found(self) -> tf.Tensor:
        if in_symbolic_scope():
            return tf.zeros(self._shape, self._dtype)
        found = get_stateless_scope().get_current_value(self) if in_stateless_scope() else None
        if found is None:
            return (
                _together([self], {id(self)})[0]
                if replication.replica_context() is not None
                else _outside(self._tfgpu_shard)
            )
        getattr(_here, "reads", set()).add(id(self))
        return found

    @property
    def handle(self):
        raise InputError(
            f"{self.path!r} lies in pieces on the replicas and has no gradient of its own. Take those of "
            "`model.trainable_variables`."
        )

    @property
    def trainable(self) -> bool:
        return self._tfgpu_shard.trainable

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self._tfgpu_shard.trainable = value

    def numpy(self) -> np.ndarray:
        return sharded_variable.ShardedVariable(self.shards).numpy()

    def assign(self, value):
        if replication.replica_context() is not None:
            raise InputError(
                f"{self.path!r} lies in pieces on the replicas, and a layer assigns it within a step. Shard the model "
                "with stage=2, which leaves it whole."
            )
        return super().assign(value)

    def _direct_assign(self, value) -> None:
        sharded_variable.ShardedVariable(self.shards).assign(value.numpy())

    @property
    def _shared_name(self) -> str:
        return self._tfgpu_shard.value._shared_name

    def _serialize_to_tensors(self) -> dict:
        return {sharded_variable.CHECKPOINT_KEY: tf.constant(self.numpy())}

    def _restore_from_tensors(self, restored_tensors: dict) -> None:
        sharded_variable.ShardedVariable(self.shards).assign(restored_tensors[sharded_variable.CHECKPOINT_KEY].numpy())


def shard_parameters(
    model: keras.Model, place_of: Callable, strategy: tf.distribute.Strategy, how: sharding.ZeroConfig
) -> None:
    """Gives the model shards in the place of its variables that can be trained; what a layer assigns stays whole.

    Args:
        model: built; its variables may lie anywhere.
        place_of: the home that a variable is used at.
        strategy: the replicas.
        how: stage 3.
    """
    repair_export()
    made: dict[int, keras.Variable] = {}
    own: dict[int, list] = {}
    for layer in [model, *model_graph.layers_within(model).values()]:
        if id(layer) in own:  # one that lies within two others
            continue
        own[id(layer)] = found = list(layer._trainable_variables)
        for variable in found:
            if id(variable) not in made:
                made[id(variable)] = _gathered(variable, place_of(variable), strategy, how)
        if found:
            _replace(layer, [made[id(variable)] for variable in found])
    for unit in {id(unit): unit for unit in _units(model)}.values():
        inner = [unit, *model_graph.layers_within(unit).values()]
        _gather_for(unit, list({id(v): v for layer in inner for v in own[id(layer)]}.values()), inner)


@functools.cache
def repair_export() -> None:
    """Lets `export` write variables, not pieces: a SavedModel would hold those of the first replica."""

    @wrap(keras.Model, "export")
    def export(stock, self, *args, **kwargs):
        if not any(map(sharding.is_fully_sharded, self.weights)):
            return stock(self, *args, **kwargs)
        if not model_graph.is_functional(self):
            raise InputError(
                f"{self.name!r} lies in pieces and has no graph, so `export` cannot make it anew. Save it with "
                "`model.save`, open the file on one device, and export that."
            )
        values = self.get_weights()  # which all workers must read
        if saving.writes(self):
            whole = keras.models.clone_model(self)
            whole.set_weights(values)
            whole.export(*args, **kwargs)


def _gathered(variable, place: device_placement.DevicePlacement, strategy, how: sharding.ZeroConfig) -> keras.Variable:
    """The variable's shard; the variable itself holds nothing from now on."""
    shard = sharding.create_shard(variable, place, strategy, how)
    shard.trainable, shard._tfgpu_constraint = variable.trainable, variable.constraint
    if variable.regularizer is not None:
        shard.regularizer = _Regularizer(variable)
    sharded_variable.ShardedVariable([shard]).assign(np.asarray(variable._value.numpy()))
    variable._value = None  # so that its memory is free
    variable._tfgpu_shard, shard._tfgpu_whole = shard, variable
    variable.__class__ = GatheredVariable
    return shard


def _replace(layer: keras.layers.Layer, found: Sequence[keras.Variable]) -> None:
    layer._tracker.unlock()
    for variable, shard in zip(list(layer._trainable_variables), found, strict=True):
        layer._untrack_variable(variable)
        trains, shard.trainable = shard.trainable, True  # else it would come among those that are never trained
        layer._track_variable(shard)
        shard.trainable = trains
    layer._tracker.lock()
    object.__setattr__(layer, "quantize", functools.partial(_refuse, layer, "quantize"))


def _refuse(layer: keras.layers.Layer, name: str, *args, **kwargs) -> None:
    raise InputError(
        f"`{name}` changes the variables of {layer.name!r}, which lie in pieces. Call it on the model that `save` "
        "writes."
    )


def _units(layer: keras.layers.Layer) -> Iterator[keras.layers.Layer]:
    """The layers that a model calls, those of models within it too; a layer with variables of its own is one."""
    if isinstance(layer, keras.Model) and not layer._trainable_variables:
        for inner in layer._flatten_layers(include_self=False, recursive=False):
            yield from _units(inner)
    elif layer.variables:
        yield layer


def _gather_for(unit: keras.layers.Layer, variables: Sequence[GatheredVariable], layers: Sequence) -> None:
    """Lets a unit run on what it gathers, which is dropped when it has run."""
    if not variables:
        return
    stock, dtype = unit.call, _narrow(layers)

    def within(*args, **kwargs):
        given = [leaf for leaf in tree.flatten((args, kwargs)) if tf.is_tensor(leaf)]
        mapping, reads = get_stateless_scope().state_mapping, set()
        with tf.control_dependencies(tf.nest.flatten(given, expand_composites=True)):
            found = _together(variables, reads, dtype)
        before = {id(v): mapping.get(id(v)) for v in variables}, getattr(_here, "reads", set())
        mapping |= {id(v): value for v, value in zip(variables, found, strict=True)}
        _here.reads = reads
        try:
            return stock(*args, **kwargs)
        finally:
            mapping |= before[0]
            _here.reads = before[1]

    within.__self__ = next((layer for layer in layers if not isinstance(layer, keras.Model)), None)
    recomputed = remat.remat(within)

    def call(*args, **kwargs):
        if in_symbolic_scope() or replication.replica_context() is None:
            return stock(*args, **kwargs)
        if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in tree.flatten((args, kwargs))):
            return stock(*args, **kwargs)  # cannot be recomputed: what it reads is gathered there and then, and stays
        is_within = in_stateless_scope() and isinstance(
            get_stateless_scope(), (remat.RecordingScope, remat.ReplayScope)
        )
        return (within if is_within else recomputed)(*args, **kwargs)

    object.__setattr__(unit, "call", functools.update_wrapper(call, stock, updated=()))


def _narrow(layers: Sequence[keras.layers.Layer]) -> str | None:
    """The dtype that all of a unit computes in, where that is narrower than its variables: half as much travels."""
    dtypes = {layer.compute_dtype if layer.autocast else None for layer in layers}
    return dtypes.pop() if dtypes in ({"float16"}, {"bfloat16"}) else None


def _together(variables: Sequence[GatheredVariable], reads: set, dtype: str | None = None) -> list[tf.Tensor]:
    """The variables' values, of the pieces of all replicas.

    Args:
        variables: in pieces.
        reads: the ids of those that will have been read when the gradient is taken; the others have none.
        dtype: to cast to before the pieces travel; None leaves them.
    """
    found = [variable._tfgpu_shard for variable in variables]
    narrow = [dtype if dtype and v._autocast and backend.is_float_dtype(v._dtype) else None for v in variables]

    @tf.custom_gradient
    def gather(*pieces):
        sent = [tf.cast(piece, narrower) if narrower else piece for piece, narrower in zip(pieces, narrow, strict=True)]

        def gradient(*upstream):
            wanted = [v.trainable and id(v) in reads for v in variables]
            wide = [_cast(g, p.dtype) if want else None for g, p, want in zip(upstream, pieces, wanted, strict=True)]
            return _scattered(wide, found)

        return sharding.all_gather(sent, found), gradient

    return gather(*(_read(shard) for shard in found))


def _read(shard) -> tf.Tensor:
    copy = layer_state.own(shard)
    with tf.device(copy.device):
        return tf.convert_to_tensor(copy)


def _cast(gradient, dtype: tf.DType):
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(tf.cast(gradient.values, dtype), gradient.indices, gradient.dense_shape)
    return tf.cast(gradient, dtype)


def _scattered(grads: list, found: Sequence) -> list:
    """This replica's pieces of the sums over all replicas of what each one's rows give; None stays None."""
    facts = step_context.step()
    grads = gradient_weights.weigh(grads, facts is not None and facts.loss_is_divided)
    return sharding.reduce_pieces(grads, found, scatter=True)


def _outside(shard) -> tf.Tensor:
    """The whole, outside of replicas."""
    strategy = shard._value.distribute_strategy
    if replication.spans_processes(strategy):
        return tf.convert_to_tensor(sharded_variable.ShardedVariable([shard]).numpy())
    sizes, pieces = sharding.full_shape(shard), [tf.convert_to_tensor(piece) for piece in shard._value.values]

    def whole(*found):
        return tf.reshape(tf.concat(found, 0)[: int(np.prod(sizes))], sizes)

    @tf.custom_gradient
    def told(*found):
        def gradient(*upstream):
            raise InputError(
                "A sharded model (stage 3) has gradients within its replicas alone. Use `model.fit`, `Trainer`, or "
                "`strategy.run`."
            )

        return whole(*found), gradient

    if tf.executing_eagerly():
        return told(*pieces)
    return whole(*map(tf.stop_gradient, pieces))  # `export` would trace a gradient of one's own


class _Regularizer:
    """A variable's regularizer, for its shard."""

    def __init__(self, variable):
        self._stock, self._variable = variable.regularizer, variable

    def __call__(self, piece) -> tf.Tensor:
        if replication.replica_context() is None:
            return self._stock(self._variable)
        if not isinstance(self._stock, _ADDS_UP):
            return remat.remat(lambda _: self._stock(self._variable))(tf.convert_to_tensor(piece))
        return _summed(self._stock, tf.convert_to_tensor(piece))

    def get_config(self) -> dict:
        return self._stock.get_config()


def _summed(regularizer: Callable, piece: tf.Tensor) -> tf.Tensor:
    """The regularizer of the whole: the sum over the replicas' pieces."""

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
