"""Everything that training changes: as variables, and as arrays copied at one moment and restored on any devices.

| group | what |
|---|---|
| `weights` | the model's weights |
| `draws` | its seed generators, then Keras's global one |
| `optimizer` | its variables: slots, iterations, learning rate, loss scale, averages, accumulated gradients |
| `optimizer.NAME` | those of an optimizer in the model's attribute `NAME`, as a GAN has; and which weights it updates |
| `metrics` | the metrics, in the middle of an epoch |

The names do not depend on the number of devices. A feature that keeps state of its own registers a `StateProvider`
when it is imported: gradient compression adds `residual/...`, local SGD `outer`.

A variable with a value of its own on each replica (a metric, an accumulated gradient) is saved with all its values:
splitting their sum again would round differently. On several workers that is a collective. The name of such an array
ends in `@` and how one device's value follows from the replicas': `sum`, `mean`, or else the first.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tfgpu.compat import keras as private_keras
from tfgpu.compat import optimizers as private_optimizers
from tfgpu.compat.attributes import OF_TRACKING
from tfgpu.compat.keras import BaseOptimizer, LossScaleOptimizer
from tfgpu.compat.variables import has_copies, held
from tfgpu.core import extensions
from tfgpu.core.state import host_copies, replica_values, sharded_variable
from tfgpu.core.state.array_slices import ArraySlices
from tfgpu.errors import InputError

_REPLICAS = "@"
_GLOBAL_DRAWS = "draws/global"
_TRAINED = "/places"


class StateProvider:
    """What a feature adds to the state of a training. Each method may be overridden; by default it adds nothing.

    On several workers every method is called on every worker, in the same order, so it may use collectives.
    """

    def settle(self, model) -> None:
        """Completes pending work, so that the model's variables hold one state; called before they are read."""

    def variables(self, model) -> dict:
        """The feature's variables by names such as `group/0000`; saved and restored as weights are."""
        return {}

    def each_replica(self, model) -> dict[str, tf.Variable]:
        """TensorFlow variables with a value of its own on each replica, whose values are saved as an array."""
        return {}

    def arrays(self, model) -> dict[str, np.ndarray]:
        """State outside variables that are the same on every replica, by names such as `group/...`."""
        return {}

    def put_arrays(self, model, arrays: Mapping[str, np.ndarray | ArraySlices]) -> None:
        """Restores what `arrays` and `each_replica` returned, on any number of replicas.

        Args:
            model: the compiled and built model.
            arrays: all arrays of a checkpoint by name; those of this feature may be missing, which resets its state.
        """


def settle(model) -> None:
    """Completes pending work, so that weights, optimizer and metrics hold one state.

    Waits for the steps that a parameter server's workers still run, and averages replicas that train independently. On
    several workers, each must call this.
    """
    for provider in extensions.state_providers:
        provider.settle(model)


def variables(model, *, metrics: bool, merge: Callable[[Sequence], list] = sharded_variable.merged) -> dict:
    """Everything that training changes, by name.

    Args:
        model: the compiled and built model.
        metrics: whether to include the metrics.
        merge: how to merge sharded variables; `list` leaves the shards as they are.
    """
    found = name_group("weights", merge(model.weights)) | draws(model)
    if model.optimizer is not None:
        if not model.optimizer.built:
            with model.distribute_strategy.scope():
                model.optimizer.build(model.trainable_variables)
        found |= name_group("optimizer", merge(model.optimizer.variables))
    for name, optimizer in other_optimizers(model).items():
        if optimizer.built:  # otherwise it has changed nothing yet
            found |= name_group(name, merge(optimizer.variables))
    for provider in extensions.state_providers:
        found |= provider.variables(model)
    return found | (name_group("metrics", model.metrics_variables) if metrics else {})


def paths(model) -> dict[str, str]:
    """The paths of all variables by their names here, for those who read a checkpoint without the model."""
    return {name: getattr(variable, "path", name) for name, variable in variables(model, metrics=True).items()}


def changed_by_a_step(model) -> list:
    """The variables that a training step may change, without Keras's global seed generator."""
    return [v for name, v in variables(model, metrics=True, merge=list).items() if name != _GLOBAL_DRAWS]


def draws(model) -> dict:
    """The states of the model's random draws, which neither `.keras` nor `.weights.h5` files hold."""
    known = {id(v) for v in (*model.weights, *model.metrics_variables)}
    found = name_group("draws", [v for v in model.variables if id(v) not in known])
    shared = private_keras.global_seed_generator()
    return found | ({_GLOBAL_DRAWS: shared.state} if shared is not None else {})


def optimizers(model) -> dict[str, BaseOptimizer]:
    """The model's optimizer and its other ones, by the names of their groups."""
    own = {} if model.optimizer is None else {"optimizer": model.optimizer}
    return own | other_optimizers(model)


def other_optimizers(model) -> dict[str, BaseOptimizer]:
    """Optimizers in attributes of the model (also in lists and dicts) besides its own, by the names of their groups."""
    found, known = {}, [model.optimizer, getattr(model.optimizer, "inner_optimizer", None)]

    def look(name: str, value) -> None:
        if isinstance(value, BaseOptimizer) and not any(value is other for other in known):
            found[f"optimizer.{name}"] = value
            known.extend([value, getattr(value, "inner_optimizer", None)])
        elif isinstance(value, dict):
            for key in sorted(value, key=str):
                look(f"{name}.{key}".replace("/", "."), value[key])
        elif isinstance(value, (list, tuple)):
            for at, item in enumerate(value):
                look(f"{name}.{at}", item)

    for name, value in sorted(vars(model).items(), key=lambda item: (item[0].startswith("_"), item[0])):
        if name not in OF_TRACKING:
            look(name, value)
    return found


def name_group(name: str, variables: Sequence) -> dict:
    """Names the variables of a group.

    Example:
        >>> name_group("weights", ["kernel", "bias"])
        {'weights/0000': 'kernel', 'weights/0001': 'bias'}
    """
    return {f"{name}/{at:04d}": variable for at, variable in enumerate(variables)}


@dataclass(frozen=True)
class EachReplica:
    """A variable with a value of its own on each replica, as one array [replicas, ...].

    Attributes:
        variable: the TensorFlow variable, with this process's copies in `values`.
    """

    variable: Any


def sources(model, *, metrics: bool) -> dict[str, Any]:
    """Where the state is, by the names of its arrays: Keras variables, `EachReplica`s and arrays. Copies nothing.

    Args:
        model: the compiled and built model, after `settle`.
        metrics: whether to include the metrics.
    """
    pending, found = _pending_sums(model), {}
    for name, variable in variables(model, metrics=metrics).items():
        if not differs_by_replica(variable):
            found[name] = variable
        elif id(variable) in pending and not pending[id(variable)]:
            found[name] = np.zeros(variable.shape, dtype_of(variable))
        else:
            found[f"{name}{_REPLICAS}{variable.aggregation}"] = EachReplica(held(variable))
    for name, optimizer in other_optimizers(model).items():
        if optimizer.built:
            found[name + _TRAINED] = _trained_weights(model, optimizer)
    for provider in extensions.state_providers:
        found |= {name: EachReplica(variable) for name, variable in provider.each_replica(model).items()}
        found |= provider.arrays(model)
    return found


def copy_state(model, *, metrics: bool = False, wanted: bool = True) -> dict[str, np.ndarray]:
    """Copies the state of a training as it is now, after `settle`.

    Args:
        model: the compiled and built model. On several workers, each must call this.
        metrics: whether to include the metrics, as in the middle of an epoch.
        wanted: whether this worker keeps the arrays; one that does not only takes part in collectives.

    Returns:
        Arrays by name; empty if not `wanted`. bfloat16 and similar types are integers of the same bits.
    """
    settle(model)
    found = sources(model, metrics=metrics)
    shared = {name: each for name, each in found.items() if not isinstance(each, (EachReplica, np.ndarray))}
    arrays = _copy_shared(model, shared, wanted)
    for name, source in found.items():
        if isinstance(source, EachReplica):
            arrays[name] = replica_values.gather(model.distribute_strategy, source.variable)
        elif isinstance(source, np.ndarray):
            arrays[name] = source
    return arrays if wanted else {}


def _copy_shared(model, shared: dict, wanted: bool) -> dict[str, np.ndarray]:
    """Copies the variables that are the same on all replicas."""
    if not wanted:  # reading it is a collective
        shared = {name: variable for name, variable in shared.items() if getattr(variable, "is_over_replicas", False)}
    arrays = host_copies.copy(model, list(shared.values()))
    return dict(zip(shared, map(replica_values.to_bits, arrays), strict=True))


def restore_state(
    model, arrays: Mapping[str, np.ndarray | ArraySlices], source: str, *, absent: Sequence[str] = ()
) -> None:
    """Restores the state that `copy_state` copied or a checkpoint has, on any number of replicas.

    Args:
        model: the compiled and built model.
        arrays: all arrays of that state; those of groups that this training does not have are ignored.
        source: where they come from, for the error message.
        absent: the names of arrays that are not there; their variables stay.

    Raises:
        InputError: they belong to another model or optimizer.
    """
    has_metrics = any(name.startswith("metrics/") for name in arrays)
    if _GLOBAL_DRAWS in arrays:
        private_keras.make_global_seed_generator()  # otherwise Keras makes it at the first draw
    _build_others(model, arrays, source)
    for provider in extensions.state_providers:
        provider.put_arrays(model, arrays)
    arrays = {name: value for name, value in arrays.items() if not name.endswith(_TRAINED)}
    known = variables(model, metrics=has_metrics)
    for name in (*absent, *(() if _GLOBAL_DRAWS in arrays else (_GLOBAL_DRAWS,))):
        known.pop(name, None)
    groups = {name.split("/")[0] for name in known}
    arrays = {name: v for name, v in arrays.items() if name.split("/")[0] in groups or name.startswith("optimizer")}
    given = {name.partition(_REPLICAS)[0]: value for name, value in arrays.items()}
    kinds = _kinds(arrays)
    _check_fits(known, given, kinds, source)
    for name, variable in known.items():
        _assign(model, variable, given[name], kinds.get(name))


def _check_fits(known: Mapping, given: Mapping, kinds: Mapping, source: str) -> None:
    """Refuses arrays that are not those of the model, its optimizer and its metrics.

    Raises:
        InputError: with the first difference.
    """
    found = f"it has {len(given)} arrays, and this model with its optimizer has {len(known)}"
    for name, variable in known.items():
        if name not in given:
            found = f"it has no {getattr(variable, 'path', name)}"
            break
        there, here = given[name].shape[1 if name in kinds else 0 :], tuple(variable.shape)
        if there != here:
            found = f"{variable.path} has shape {there} there and {here} here"
            break
    else:
        if known.keys() == given.keys():
            return
    raise InputError(
        f"{source} does not fit this model: {found}. Resume with the model, the optimizer and the metrics of the run, "
        "or choose another directory."
    )


def restore_metrics(model, arrays: Mapping[str, np.ndarray | ArraySlices]) -> None:
    """Restores only the metrics: Keras resets them at the beginning of an epoch."""
    kinds = _kinds(arrays)
    for name, variable in name_group("metrics", model.metrics_variables).items():
        if name in kinds:
            _assign(model, variable, arrays[f"{name}{_REPLICAS}{kinds[name]}"], kinds[name])
        elif name in arrays:
            _assign(model, variable, arrays[name], None)


def trained_weights(model) -> np.ndarray | None:
    """The positions of the weights that the model's optimizer updates; None while it is not built."""
    optimizer = model.optimizer
    return _trained_weights(model, optimizer) if optimizer is not None and optimizer.built else None


def build_optimizer(model, trained: np.ndarray | None) -> None:
    """Builds the model's optimizer for the weights that `trained_weights` returned, whichever are trainable now."""
    if trained is not None and model.optimizer is not None and not model.optimizer.built:
        _build(model, model.optimizer, trained)  # or `restore_state` raises


def copy_draws(model) -> dict[str, np.ndarray]:
    """Copies only the states of the random draws, without a collective."""
    return {name: np.array(v.numpy()) for name, v in draws(model).items()}


def random_states() -> dict:
    """The states of Python's and NumPy's global random generators, as plain values and arrays."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    python = [version, np.array(numbers, "uint64"), gauss]
    return {"python": python, "numpy": [kind, np.array(keys), int(position), int(has_gauss), float(cached)]}


def restore_random_states(states: dict) -> None:
    """Restores what `random_states` returned."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))


def dtype_of(variable) -> np.dtype:
    """The dtype of a variable's values."""
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _trained_weights(model, optimizer) -> np.ndarray:
    """The positions of the weights that an optimizer updates; -1 for a variable that is not among the weights."""
    numbers = {id(variable): at for at, variable in enumerate(model.weights)}
    trained = map(sharded_variable.full_variable, private_optimizers.trained(optimizer))
    return np.array([numbers.get(id(variable), -1) for variable in trained], "int64")


def _build_others(model, arrays: Mapping[str, np.ndarray | ArraySlices], source: str) -> None:
    """Builds optimizers that would otherwise be built by their first step."""
    for name, optimizer in other_optimizers(model).items():
        if optimizer.built or name + _TRAINED not in arrays:
            continue
        if not _build(model, optimizer, np.asarray(arrays[name + _TRAINED])):
            raise InputError(
                f"{source} has the state of `{name.removeprefix('optimizer.')}`, which updates weights other than "
                "the model's. Build it before `fit`: optimizer.build(variables)."
            )


def _build(model, optimizer, trained: np.ndarray) -> bool:
    """Builds an optimizer for weights at these positions; returns whether the model has them all."""
    weights = model.weights
    if not ((trained >= 0) & (trained < len(weights))).all():
        return False
    with model.distribute_strategy.scope():
        optimizer.build([weights[at] for at in trained])
    return True


def differs_by_replica(variable) -> bool:
    """Whether a variable has a value of its own on each replica, which one device's follows from."""
    return has_copies(variable) and held(variable).synchronization == tf.VariableSynchronization.ON_READ


def _pending_sums(model) -> dict[int, bool]:
    """Whether each gradient accumulator holds gradients since the last update, by its `id`."""
    optimizer = model.optimizer
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    sums = private_optimizers.accumulators(inner)
    if not sums:
        return {}
    is_pending = int(private_optimizers.iterations(inner).numpy()) % inner.gradient_accumulation_steps != 0
    return {id(total): is_pending for total in sums}


def _kinds(arrays) -> dict[str, str]:
    """How one device's value follows from the replicas', by name of each array that holds replicas' values."""
    return {name: kind for name, mark, kind in (name.partition(_REPLICAS) for name in arrays) if mark}


def _assign(model, variable, saved: np.ndarray | ArraySlices, kind: str | None) -> None:
    """Restores a variable; of an array that can be read in stretches, it reads what this process needs.

    Args:
        model: the variable's.
        variable: a Keras variable or a `ShardedVariable`.
        saved: bits of its value, or of the replicas' values.
        kind: how one device's value follows from the replicas'; None for one value.
    """
    dtype = dtype_of(variable)
    if kind is not None and differs_by_replica(variable):
        replica_values.assign(model.distribute_strategy, held(variable), saved, kind)
    elif kind is not None:
        variable.assign(replica_values.aggregate(replica_values.from_bits(np.asarray(saved), dtype), kind))
    elif isinstance(variable, sharded_variable.ShardedVariable) and isinstance(saved, ArraySlices):
        variable.assign(saved.viewed(dtype) if dtype.kind == "V" else saved)
    else:
        variable.assign(replica_values.from_bits(np.asarray(saved), dtype))
