"""All that training changes, as arrays: copied at one moment, put back on any number of replicas.

| group | what |
|---|---|
| `weights` | the model's weights |
| `draws` | its seed generators, then Keras's global one |
| `optimizer` | its variables: slots, iterations, learning rate, loss scale, averages, gradients that wait |
| `optimizer.NAME` | the same of an optimizer in the model's attribute `NAME`, as a GAN has; and which weights are its |
| `residual/...` | what each replica has not sent yet of top-k gradients, by optimizer |
| `outer` | the outer optimizer's variables, where replicas are averaged by one |
| `metrics` | the metrics, in the middle of an epoch |

A variable of which each replica keeps a part (a metric, a gradient that waits) is saved part by part: their sum, cut up
anew, would be rounded otherwise. On several workers that is a collective. Such an array's name ends in `@`
and how the parts make one: `sum`, `mean`, or else the first of them.
"""

import random

import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.optimizers.loss_scale_optimizer import LossScaleOptimizer
from keras.src.random import seed_generator

from tfgpu.core import broadcast
from tfgpu.errors import InputError
from tfgpu.optim import gradient_compression, local_sgd
from tfgpu.parallel import sharded_variable
from tfgpu.parallel.zero import sharding
from tfgpu.parameter_server import coordinator

PARTS = "@"
_SHARED = "draws/global"
_PLACES = "/places"
_RESIDUAL = "residual/"


def draws(model) -> list:
    """The states of the model's random draws, which neither `.keras` nor `.weights.h5` files hold."""
    return list(_draws(model).values())


def _draws(model) -> dict:
    known = {id(v) for v in (*model.weights, *model.metrics_variables)}
    found = _group("draws", [v for v in model.variables if id(v) not in known])
    shared = global_state.get_global_attribute(seed_generator.GLOBAL_SEED_GENERATOR)
    return found | ({_SHARED: shared.state} if shared is not None else {})


def copied(model, *, metrics: bool = False, wanted: bool = True) -> dict[str, np.ndarray]:
    """The state of a training as it is now, which further training leaves alone.

    Steps that a parameter server's workers still run are waited for; replicas that train apart are averaged first.

    Args:
        model: the compiled and built model. On several workers, each must call this.
        metrics: with the metrics, as in the middle of an epoch.
        wanted: this worker keeps the arrays; one that does not takes part where the others need it.

    Returns:
        Arrays by name. bfloat16 and its like are whole numbers of the same bits.
    """
    coordinator.settle(model)
    local_sgd.settle(model)
    waiting = _waiting(model)
    found = {}
    for name, variable in _variables(model, metrics=metrics).items():
        if not _has_parts(variable):
            if wanted or getattr(variable, "is_over_replicas", False):
                found[name] = broadcast.to_bits(np.array(variable.numpy()))
        elif id(variable) in waiting and not waiting[id(variable)]:
            found[name] = np.zeros(variable.shape, _dtype(variable)) if wanted else None
        else:
            found[f"{name}{PARTS}{variable.aggregation}"] = broadcast.parts(model.distribute_strategy, variable._value)
    for name, optimizer in others(model).items():
        if optimizer.built:
            found[name + _PLACES] = _places(model, optimizer)
    for name, optimizer in _optimizers(model).items():
        for at, residual in enumerate(gradient_compression.residuals(optimizer)):
            found[f"{_RESIDUAL}{name}/{at:04d}"] = broadcast.parts(model.distribute_strategy, residual)
    return found if wanted else {}


def changing(model) -> list:
    """The variables that a step of training may change, but for Keras's global seed generator."""
    return [v for name, v in _variables(model, metrics=True, joined=list).items() if name != _SHARED]


def put(model, arrays: dict[str, np.ndarray], source: str) -> None:
    """Gives a model the state that `copied` made; on any number of replicas.

    Args:
        model: the compiled and built model.
        arrays: all of them; others that are there too, of another group, are left alone.
        source: where they come from, for the error.

    Raises:
        InputError: they belong to another model or optimizer.
    """
    has_metrics = any(name.startswith("metrics/") for name in arrays)
    if _SHARED in arrays:
        seed_generator.global_seed_generator()  # Keras makes it at the first draw
    _build_others(model, arrays, source)
    for name, optimizer in _optimizers(model).items():
        found = sorted(key for key in arrays if key.startswith(f"{_RESIDUAL}{name}/"))
        gradient_compression.take_up(model.distribute_strategy, optimizer, [arrays[key] for key in found])
    arrays = {name: value for name, value in arrays.items() if not name.endswith(_PLACES)}
    variables = _variables(model, metrics=has_metrics)
    if _SHARED not in arrays:
        variables.pop(_SHARED, None)
    groups = {name.split("/")[0] for name in variables}
    arrays = {name: v for name, v in arrays.items() if name.split("/")[0] in groups or name.startswith("optimizer")}
    given = {name.partition(PARTS)[0]: value for name, value in arrays.items()}
    kinds = _kinds(arrays)
    if variables.keys() != given.keys():
        raise InputError(
            f"{source} has {len(given)} arrays, this model with its optimizer has {len(variables)}. "
            "Resume with the model, the optimizer and the metrics of the run, or choose another directory."
        )
    for name, variable in variables.items():
        shape = given[name].shape[1 if name in kinds else 0 :]
        if tuple(variable.shape) != shape:
            raise InputError(
                f"{source} has {shape} for {variable.path}, this model has {tuple(variable.shape)}. "
                "Resume with the model, the optimizer and the metrics of the run, or choose another directory."
            )
    for name, variable in variables.items():
        value = broadcast.from_bits(given[name], _dtype(variable))
        if name in kinds:
            _put_parts(model, variable, value, kinds[name])
        else:
            variable.assign(value)


def put_metrics(model, arrays: dict[str, np.ndarray]) -> None:
    """Gives the metrics alone what `put` gave them: Keras resets them as an epoch begins."""
    kinds = _kinds(arrays)
    for name, variable in _group("metrics", model.metrics_variables).items():
        if name in kinds:
            value = broadcast.from_bits(arrays[f"{name}{PARTS}{kinds[name]}"], _dtype(variable))
            _put_parts(model, variable, value, kinds[name])
        elif name in arrays:
            variable.assign(broadcast.from_bits(arrays[name], _dtype(variable)))


def places(model) -> np.ndarray | None:
    """Which of the model's weights its optimizer updates; None where it has not been built yet."""
    optimizer = model.optimizer
    return _places(model, optimizer) if optimizer is not None and optimizer.built else None


def build_optimizer(model, places: np.ndarray | None) -> None:
    """Makes the variables of the model's optimizer for what `places` named, whatever learns at present."""
    if places is not None and model.optimizer is not None and not model.optimizer.built:
        weights = model.weights
        if (places >= 0).all() and (places < len(weights)).all():  # else `put` says what does not fit
            with model.distribute_strategy.scope():
                model.optimizer.build([weights[at] for at in places])


def copied_draws(model) -> dict[str, np.ndarray]:
    """The states of the random draws alone; no collective."""
    return {name: np.array(v.numpy()) for name, v in _draws(model).items()}


def random_states() -> dict:
    """Python's and NumPy's global random generators, as plain values and arrays."""
    version, numbers, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state()
    python = [version, np.array(numbers, "uint64"), gauss]
    return {"python": python, "numpy": [kind, np.array(keys), int(position), int(has_gauss), float(cached)]}


def put_random_states(states: dict) -> None:
    """Sets Python's and NumPy's global random generators to what `random_states` found."""
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(int(number) for number in numbers), gauss))
    np.random.set_state(tuple(states["numpy"]))


def _dtype(variable) -> np.dtype:
    return np.dtype(tf.as_dtype(variable.dtype).as_numpy_dtype)


def _group(name: str, variables) -> dict:
    return {f"{name}/{at:04d}": variable for at, variable in enumerate(variables)}


def _variables(model, *, metrics: bool, joined=sharded_variable.merged) -> dict:
    """Everything that training changes, by a name that does not depend on the number of replicas.

    `joined=list` leaves variables in parts as they are.
    """
    found = _group("weights", joined(model.weights)) | _draws(model)
    if model.optimizer is not None:
        if not model.optimizer.built:
            with model.distribute_strategy.scope():
                model.optimizer.build(model.trainable_variables)
        found |= _group("optimizer", joined(model.optimizer.variables))
    for name, optimizer in others(model).items():
        if optimizer.built:  # else it has changed nothing yet
            found |= _group(name, joined(optimizer.variables))
    averager = local_sgd.averager_of(model)
    if averager is not None and averager.outer is not None:
        found |= _group("outer", averager.outer.variables)
    return found | (_group("metrics", model.metrics_variables) if metrics else {})


def others(model) -> dict[str, BaseOptimizer]:
    """Optimizers in attributes of the model, lists and dicts too, beside its own, by the names of their groups."""
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
        if not name.startswith("_self_"):  # TensorFlow's own list of the attributes
            look(name, value)
    return found


def _optimizers(model) -> dict[str, BaseOptimizer]:
    own = {} if model.optimizer is None else {"optimizer": model.optimizer}
    return own | others(model)


def _places(model, optimizer) -> np.ndarray:
    """Which of the model's weights an optimizer updates; -1 for one that is not among them."""
    numbers = {id(variable): at for at, variable in enumerate(model.weights)}
    trained = [sharding.full_variable(variable) for variable in optimizer._trainable_variables]
    return np.array([numbers.get(id(variable), -1) for variable in trained], "int64")


def _build_others(model, arrays: dict[str, np.ndarray], source: str) -> None:
    """Makes the variables of optimizers that would make them with their first step."""
    for name, optimizer in others(model).items():
        places = arrays.get(name + _PLACES)
        if optimizer.built or places is None:
            continue
        variables = model.weights
        if (places < 0).any() or (places >= len(variables)).any():
            raise InputError(
                f"{source} has the state of `{name.removeprefix('optimizer.')}`, whose weights are not the model's. "
                "Build it before `fit`: optimizer.build(variables)."
            )
        with model.distribute_strategy.scope():
            optimizer.build([variables[at] for at in places])


def _has_parts(variable) -> bool:
    value = variable._value
    is_on_read = getattr(value, "synchronization", None) == tf.VariableSynchronization.ON_READ
    return isinstance(value, tf.distribute.DistributedValues) and is_on_read


def _waiting(model) -> dict[int, bool]:
    """By the accumulators' ids, whether gradients wait there for the next update."""
    optimizer = model.optimizer
    inner = optimizer.inner_optimizer if isinstance(optimizer, LossScaleOptimizer) else optimizer
    sums = getattr(inner, "_accumulated_gradients", None) or []
    if not sums:
        return {}
    waits = int(inner._iterations.numpy()) % inner.gradient_accumulation_steps != 0
    return {id(total): waits for total in sums if total is not None}


def _kinds(arrays) -> dict[str, str]:
    """How the parts of an array make one, by the name of those that have parts."""
    return {name: kind for name, mark, kind in (name.partition(PARTS) for name in arrays) if mark}


def _put_parts(model, variable, parts: np.ndarray, kind: str) -> None:
    if _has_parts(variable):
        broadcast.put_parts(model.distribute_strategy, variable._value, parts, kind)
    else:
        variable.assign(broadcast.as_one(parts, kind))
