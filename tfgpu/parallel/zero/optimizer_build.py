"""Makes Keras build an optimizer on shards: flat ones, or dealt ones where it must see whole variables.

The slots of shards start, are averaged and are swapped as those of one device.
"""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence

import keras
import numpy as np

from tfgpu.compat import optimizers, variables
from tfgpu.compat.keras import BaseOptimizer, MultiOptimizer
from tfgpu.compat.patch import wrap
from tfgpu.core import extensions, replication, step_context
from tfgpu.core.state import sharded_variable
from tfgpu.core.state.sharded_variable import full_variable, shard_info
from tfgpu.errors import InputError
from tfgpu.optim import parameter_groups
from tfgpu.parallel import shard_patches
from tfgpu.parallel.zero import dealing, update
from tfgpu.parallel.zero.dealing import flat_of, is_dealt, target_of
from tfgpu.parallel.zero.optimizer_kinds import Sees, what_it_sees
from tfgpu.parallel.zero.sharding import full_shape, is_fully_sharded, is_sharded, state_of

_log = logging.getLogger(__name__)
_building = step_context.Slot("zero.building")
"""Whether an optimizer is being built on shards."""


@functools.cache
def install() -> None:
    """Makes optimizers that are built on sharded variables take the shards, in this process from now on."""
    extensions.gradient_extensions.register(update.ShardedUpdates(), order=30)
    extensions.xla_obstacles.register(lambda model: any(map(is_fully_sharded, model.trainable_variables)))
    _build_on_shards_everywhere()
    shard_patches.install_averages()

    _make_slots_of_dealt_variables()
    if MultiOptimizer.__module__.startswith("keras."):
        _name_shards_to_multi_optimizers()

    @wrap("BaseOptimizer.use_weight_decay")
    def use_weight_decay(stock, self, variable):
        return stock(self, full_variable(variable))


def _make_slots_of_dealt_variables() -> None:
    @wrap("BaseOptimizer.add_variable_from_reference")
    def add_variable(stock, self, reference_variable, name=None, initializer="zeros"):
        if not is_dealt(reference_variable):
            return stock(self, reference_variable, name=name, initializer=initializer)
        with variables.shaped_as(reference_variable, (1,)):  # so that no replica but the owner takes memory for it
            made = stock(self, reference_variable, name=name, initializer="zeros")
        value = keras.initializers.get(initializer)(reference_variable.shape, reference_variable.dtype)
        dealing.make_slot(made, reference_variable, name or "var", np.asarray(value))
        return made


def _name_shards_to_multi_optimizers() -> None:
    """A `MultiOptimizer` looks up whose each variable is before its optimizers see it."""

    @wrap(MultiOptimizer, "apply")
    def apply(stock, self, grads, trainable_variables=None):
        if trainable_variables is not None and any(map(is_sharded, trainable_variables)):
            if not self.built:
                self.build(list(trainable_variables))
            trainable_variables = [target_of(variable) for variable in trainable_variables]
        return stock(self, grads, trainable_variables)

    @wrap(MultiOptimizer, "finalize_variable_values")
    def finalize(stock, self, var_list):
        return stock(self, [target_of(variable) for variable in var_list])


def _build_on_shards_everywhere() -> None:
    @wrap("BaseOptimizer.__init__")
    def init(stock, self, *args, **kwargs):
        for cls in type(self).__mro__:
            if issubclass(cls, BaseOptimizer):
                _build_on_shards(cls)
        stock(self, *args, **kwargs)

    left = [BaseOptimizer]
    while left:
        cls = left.pop()
        _build_on_shards(cls)
        left += cls.__subclasses__()


@functools.cache
def _build_on_shards(cls: type) -> None:
    if "build" not in vars(cls):
        return

    @wrap(cls, "build")
    def on_shards(stock, self, variables):
        targets = [target_of(variable) for variable in variables]
        if not any(map(is_sharded, targets)):
            return stock(self, targets)
        if _building.get():  # an optimizer within another, or the class's own base
            stock(self, targets)
            optimizers.show_to_checkpoints(self, [state_of(target).variable for target in targets])
            return None
        with _building.set_to(True):
            return _build(self, targets, functools.partial(stock, self))


def _build(optimizer, targets: Sequence, stock: Callable[[list], None]) -> None:
    """Builds an optimizer that no other one builds.

    Args:
        optimizer: perhaps a `LossScaleOptimizer` or a `MultiOptimizer`.
        targets: shards, from a build before this one or flat.
        stock: builds the optimizer on the shards that it gets.

    Raises:
        InputError: some of the variables have no shard; or they are parts of variables that the optimizer must see
            whole.
    """
    _check_all_are_sharded(targets)
    inner, flats = getattr(optimizer, "inner_optimizer", optimizer), [flat_of(target) for target in targets]
    is_multi = isinstance(inner, MultiOptimizer)
    found = [optimizers.choice_of(inner, state_of(flat).variable) if is_multi else inner for flat in flats]
    sees = [what_it_sees(each, state_of(flat).variable) for each, flat in zip(found, flats, strict=True)]

    def make() -> None:
        shards = _shards_for(flats, found, sees)
        chosen = {id(shard): each for shard, each in zip(shards, found, strict=True)}
        _outside_replicas(shards, lambda: _fill(shards))
        with optimizers.choosing(inner, lambda shard: chosen[id(shard)]) if is_multi else contextlib.nullcontext():
            stock(shards)
        optimizers.show_to_checkpoints(optimizer, [state_of(shard).variable for shard in shards])
        _outside_replicas(shards, lambda: _fill_slots(optimizer, shards))
        for each in {id(each): each for each in found}.values():
            _move_slots(each)
            seen = {kind for kind, other in zip(sees, found, strict=True) if other is each}
            _log_what_travels(each, Sees.ALL in seen)

    if set(sees) == {Sees.NUMBER}:
        make()
    else:
        _outside_replicas(flats, make)


def _check_all_are_sharded(shards: Sequence) -> None:
    left = [variable.path for variable in shards if not is_sharded(variable)]
    if left:
        raise InputError(
            f"The variable {left[0]!r} was made after `parallel.shard`, so the optimizer would mix sharded and whole "
            "variables. Build all variables first, then call `parallel.shard`, then `compile`."
        )


def _shards_for(flats: Sequence, found: Sequence, sees: Sequence[Sees]) -> list:
    """The shards on which the optimizers are built.

    Args:
        flats: the flat shards.
        found: the optimizer of each.
        sees: what it must see.
    """
    shards, groups = list(flats), {}
    for at, (flat, each, seen) in enumerate(zip(flats, found, sees, strict=True)):
        if seen is Sees.NUMBER:
            dealing.hold_pieces(flat)
            continue
        if shard_patches.is_along_axis(shard_info(flat)):
            raise InputError(
                f"{type(each).__name__} looks at each variable as a whole, and {flat.path!r} is cut along an axis. Use "
                "an optimizer that works element by element (Adam, AdamW, Lion, SGD, RMSprop, Adagrad, ...)."
            )
        groups.setdefault((id(each), seen, state_of(flat).placement.devices), []).append(at)
    for (_, seen, _), places in groups.items():
        count = dealing.strategy_of(flats[places[0]]).num_replicas_in_sync
        owners = dealing.deal([int(np.prod(full_shape(flats[at]))) for at in places], count)
        for at, own in zip(places, owners, strict=True):
            shards[at] = dealing.create(flats[at], own if seen is Sees.VARIABLE else tuple(range(count)))
    return shards


def _outside_replicas(shards: Sequence, run: Callable) -> None:
    """Runs something as if outside any step."""
    if replication.replica_context() is None:
        run()
    else:
        replication.run_cross_replica(dealing.strategy_of(shards[0]), run)


def _fill(shards: Sequence) -> None:
    """Gives the shards the values of the variables."""
    for shard in shards:
        full = full_variable(shard)
        if full is not shard:
            has_pieces = is_fully_sharded(full)
            value = sharded_variable.ShardedVariable([full]) if has_pieces else variables.held(full)
            sharded_variable.ShardedVariable([shard]).assign(value.numpy())


def _fill_slots(optimizer, shards: Sequence) -> None:
    """Gives slots that start with the variable's values each replica's own piece: all copies have the first one's."""
    shard_by_key = {shard_info(shard).of: shard for shard in shards if not is_dealt(shard)}
    for slot in optimizer.variables:
        info = shard_info(slot)
        shard = shard_by_key.get(info.of[:-1]) if info is not None else None
        if shard is None:
            continue
        copies, pieces = variables.held(slot).values, variables.held(shard).values
        values = copies[0].numpy()
        if values.dtype.kind == "V" or not values.any():
            continue
        if not np.array_equal(values, pieces[0].numpy()):
            if (values == values[0]).all():
                continue
            raise InputError(
                f"{type(optimizer).__name__} initializes {slot.path!r} with numbers that differ within the variable, "
                "which shards would mix up. Use an optimizer whose slots start with a constant or with the weights."
            )
        for copy, piece in zip(copies, pieces, strict=True):
            copy.assign(piece)


def _move_slots(optimizer) -> None:
    """Moves to the owners those slots that have been made on all replicas, as Adafactor's of rows and columns."""
    own = {id(variable) for variable in optimizer.variables}
    found, _ = parameter_groups.slots_by_variable(optimizer)
    for shard in optimizers.trained(optimizer):
        for at, slot in enumerate(found[id(shard)] if is_dealt(shard) else ()):
            if id(slot) in own and variables.held(slot) is not None and shard_info(slot) is None:
                dealing.make_slot(slot, shard, f"slot_{at}", np.array(variables.held(slot).numpy()))


def _log_what_travels(optimizer, sees_all: bool) -> None:
    dealt = [shard for shard in optimizers.trained(optimizer) if is_dealt(shard)]
    if not dealt:
        return
    name, count = type(optimizer).__name__, dealing.strategy_of(dealt[0]).num_replicas_in_sync
    sizes = [int(np.prod(full_shape(shard))) * variables.held(shard).dtype.size for shard in dealt]
    held = [0] * count
    for shard, size in zip(dealt, sizes, strict=True):
        for owner in dealing.owners_of(shard):
            held[owner] += size
    has_pieces = is_fully_sharded(flat_of(dealt[0]))
    there = "pieces of gradients and weights go" if has_pieces else "gradients go"
    if sees_all:
        _log.warning(
            "%s uses all variables at once, so each of %d replicas holds its whole state and updates all %d variables "
            "(%.2f MiB); in each step their %s to every replica.",
            name, count, len(dealt), sum(sizes) / 2**20, there,
        )  # fmt: skip
        return
    _log.info(
        "%s uses whole variables: %d of %d get an owner each (%.2f MiB; %.2f to %.2f on a replica). In each step "
        "their %s to the owner, and the new weights come back.",
        name, len(dealt), len(optimizers.trained(optimizer)), sum(sizes) / 2**20, min(held) / 2**20, max(held) / 2**20,
        there,
    )  # fmt: skip
