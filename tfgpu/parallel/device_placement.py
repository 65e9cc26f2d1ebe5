"""Places variables and operations on chosen devices: the basis of models that are spread over devices.

A placement lists one device per replica. TensorFlow leaves three things to do:

- an existing variable cannot be moved: `move_variable` gives a Keras variable a new `tf.Variable` of the same value;
- a gradient runs on the device that is current when it is computed, which is the first one. `colocate_gradients` runs
  it where the operation runs that it belongs to, and sums where their first term is;
- so does an optimizer's arithmetic. In `colocate_with_inputs`, an operation runs where its first non-scalar input is.

Source of the second: what `tf.GradientTape.gradient` adds to a graph has no device (seen in TensorFlow 2.21).
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf

from tfgpu.compat import device_groups, distribute, slots, training, variables
from tfgpu.compat.patch import override, wrap
from tfgpu.compat.tensorflow import surround_gradients
from tfgpu.core import extensions, gradients, replication, step_context
from tfgpu.core.state import layer_state
from tfgpu.parallel import compiled_calls, remote_devices

_elsewhere = step_context.Slot("placement.elsewhere")
"""The device on which this thread's layers run in place of their own."""


@dataclass(frozen=True)
class DevicePlacement:
    """Where something is placed: the full names of one device per replica, in the replicas' order."""

    devices: tuple[str, ...]

    @property
    def local_device(self) -> str:
        """This replica's device; outside replicas, the first one's."""
        context = replication.replica_context()
        number = tf.get_static_value(context.replica_id_in_sync_group) if context is not None else 0
        return self.devices[number % len(self.devices)]  # every worker lists its own replicas' devices


def on_devices(devices: Iterable[str]) -> DevicePlacement:
    """The placement on devices with these names: `"GPU:0"`, `"1/GPU:0"` or `"/job:worker/task:1/device:GPU:0"`."""
    return DevicePlacement(tuple(distribute.full_device_name(full_name(device)) for device in devices))


def of_copies(variable: keras.Variable) -> DevicePlacement:
    """The placement of a variable of which each replica has a copy."""
    return on_devices(copy.device for copy in variables.held(variable).values)


def full_name(device: str) -> str:
    """TensorFlow's name of a device, from its name in this process (`"GPU:0"`) or in another one (`"1/GPU:0"`)."""
    if device.startswith("/"):
        return device
    process, _, name = device.rpartition("/")
    is_remote = process and remote_devices.connection() is not None
    return f"/job:{remote_devices.JOB}/replica:0/task:{process}/device:{name}" if is_remote else f"/device:{name}"


def short_name(device: str) -> str:
    """The inverse of `full_name`."""
    found = tf.DeviceSpec.from_string(device)
    process = f"{found.task}/" if remote_devices.connection() is not None else ""
    return f"{process}{found.device_type}:{found.device_index}"


@contextlib.contextmanager
def scope(placement: DevicePlacement) -> Iterator[None]:
    """Places the operations and the variables of the block.

    In a strategy's scope, a variable has a copy on each device of the placement.
    """
    colocate_gradients()
    with tf.device(_elsewhere.get() or placement.local_device), variable_scope(placement):
        yield


def operations_on(device: str) -> contextlib.AbstractContextManager:
    """Inside the block, layers run on this device, whatever placement they have; their variables stay."""
    return _elsewhere.set_to(device)


def variable_scope(placement: DevicePlacement) -> contextlib.AbstractContextManager:
    """Places the variables of the block: in a strategy's scope, each has a copy on each device of the placement."""

    def make(next_creator: Callable, **how):
        if tf.distribute.has_strategy() and replication.is_replicated(tf.distribute.get_strategy()):
            how.setdefault("colocate_with", _Devices(placement.devices))  # the innermost block counts
        return next_creator(**how)

    return tf.variable_creator_scope(make)


class _Devices:
    """What TensorFlow asks for the devices of a new variable."""

    def __init__(self, devices: tuple[str, ...]):
        self._devices = devices


def attach(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Makes a model, whose variables are moved separately, one of a strategy's, as if made in its scope."""
    training.set_strategy(model, strategy)
    mark_placed(strategy)


def mark_placed(strategy: tf.distribute.Strategy) -> None:
    """Notes that the variables of one replica are on several devices."""
    slots.of(strategy).is_placed = True
    device_groups.use(strategy)


def is_placed(strategy: tf.distribute.Strategy) -> bool:
    """Whether the variables of one replica are on several devices."""
    return slots.get(strategy, "is_placed", False)


def move_variable(variable: keras.Variable, placement: DevicePlacement, strategy: tf.distribute.Strategy) -> None:
    """Moves a variable to a placement; its value stays.

    Args:
        variable: of a model or a metric; a built optimizer would keep the old one.
        placement: where to.
        strategy: the replicas, each of which gets a copy.
    """
    trains = may_train = variables.trainable_flag(variable)
    if not variables.is_deferred(variable):
        may_train = variables.held(variable).trainable
    value = variables.take_value(variable)  # frees its memory before the new one takes any
    variables.set_trainable_flag(variable, may_train)  # of a layer that is frozen now but may train later
    with strategy.scope(), scope(placement):
        variables.initialize(variable, value)
    variables.set_trainable_flag(variable, trains)


def run_on(layer: keras.layers.Layer | keras.Operation, placement: DevicePlacement, name: str = "call") -> None:
    """Makes a method of one layer, or of an operation between layers such as `x + y`, run on a placement."""
    stock = getattr(layer, name)
    stock = getattr(stock, "unplaced", stock)

    @functools.wraps(stock)
    def method(*args, **kwargs):
        with scope(placement):
            is_compiled = name == "call" and isinstance(layer, keras.layers.Layer)
            if not is_compiled or slots.get(layer, "compiles_within", False):
                return stock(*args, **kwargs)
            return compiled_calls.run(layer, stock, args, kwargs, _elsewhere.get() or placement.local_device)

    method.unplaced = stock
    override(layer, name, method, by=__name__, listed="*.call *.compute_loss *.compute_metrics")


def create_variables_on(
    layer: keras.layers.Layer, placement: DevicePlacement, strategy: tf.distribute.Strategy, name: str
) -> None:
    """Makes a method of one layer, which creates variables outside any step, create them on a placement."""
    stock = getattr(layer, name)

    @functools.wraps(stock)
    def method(*args, **kwargs):
        with strategy.scope(), scope(placement):
            return stock(*args, **kwargs)

    override(layer, name, method, by=__name__, listed="*.enable_lora")


def build_on(layer: keras.layers.Layer, placement: DevicePlacement) -> None:
    """Makes a layer that is not built create its variables on a placement, now or whenever Keras builds it."""
    _defer_with_placement()
    stock = layer.build

    @functools.wraps(stock)
    def build(*args, **kwargs):
        with scope(placement):
            stock(*args, **kwargs)
        for variable in layer.variables:
            if slots.get(variable, "placement") is None:  # a layer within may have set its own
                slots.of(variable).placement = placement

    override(layer, "build", build, by=__name__)


@functools.cache
def _defer_with_placement() -> None:
    @wrap("Variable.deferred_initialize")
    def deferred_initialize(stock, self):
        placement = slots.get(self, "placement")
        with scope(placement) if placement is not None else contextlib.nullcontext():
            stock(self)


@functools.cache
def colocate_gradients() -> None:
    """Makes gradients run where the operations run that they belong to, in this process from now on."""

    def around_operation(op_type, inputs, outputs, upstream):
        # A tape keeps none of the tensors of some operations, such as adding a bias.
        return _device(_device_of_forward(op_type, inputs, outputs) or _first_device(upstream))

    def around_sum(gradients):
        return _device(_first_device(gradients))

    surround_gradients(around_operation, around_sum)


@contextlib.contextmanager
def colocate_with_inputs() -> Iterator[None]:
    """In a graph, runs the operations of the block where their first non-scalar input is.

    Changes nothing where all variables of a replica are on one device.
    """
    if tf.executing_eagerly() or not is_placed(replication.replica_context().strategy):
        yield
        return

    def choose(op) -> str:
        found = (_device_of(value) for value in op.inputs if value.dtype == tf.resource or value.shape.rank != 0)
        return next(filter(None, found), "")

    with tf.compat.v1.get_default_graph().device(choose):
        yield


class _Colocated(gradients.GradientExtension):
    """Gradients are summed, and an optimizer's arithmetic runs, where the variables are."""

    @contextlib.contextmanager
    def around_sum(self, update: gradients.Update) -> Iterator[gradients.Update]:
        strategy = replication.replica_context().strategy
        if not tf.executing_eagerly() and device_groups.of(strategy) is not None:
            moved = [_beside(*pair) for pair in zip(update.gradients, update.variables, strict=True)]
            update = dataclasses.replace(update, gradients=moved)
        with colocate_with_inputs():
            yield update

    @contextlib.contextmanager
    def around_update(self, update: gradients.Update, sums: list, variables: list | None) -> Iterator[tuple]:
        with colocate_with_inputs():
            yield sums, variables


extensions.gradient_extensions.register(_Colocated())
extensions.xla_obstacles.register(lambda model: is_placed(model.distribute_strategy))


def _beside(gradient, variable: keras.Variable):
    """A gradient on the device of this replica's copy of the variable; slices of rows stay where they are."""
    here = _device_of(gradient) if isinstance(gradient, tf.Tensor) else ""
    copy = layer_state.own(variable) if here else None  # None of a variable that is in pieces
    if copy is None or distribute.full_device_name(here) == copy.device:
        return gradient
    with tf.device(copy.device):
        return tf.identity(gradient)


def _device(name: str | None):
    return tf.device(name) if name else contextlib.nullcontext()


def _device_of_forward(op_type: str, inputs, outputs) -> str | None:
    """Where an operation ran, from those of its tensors that a tape keeps."""
    known = [value for value in inputs or () if tf.is_tensor(value)]
    for value in outputs or ():
        if tf.is_tensor(value) and _device_of(value):
            return _device_of(value)
    for value in known:
        if hasattr(value, "graph"):  # not an eager tensor
            for op in value.consumers():
                own = {id(one) for one in op.inputs}
                if op.type == op_type and op.device and all(id(one) in own for one in known):
                    return op.device
    return _first_device(known)


def _first_device(values) -> str | None:
    return next(filter(None, map(_device_of, tf.nest.flatten(values, expand_composites=True))), None)


def _device_of(value) -> str:
    """The device of a tensor, or of the variable that it is read from; an empty name where it is unknown."""
    while hasattr(value, "op"):
        if value.op.device:
            return value.op.device
        if value.op.type == "ReadVariableOp":
            value = value.op.inputs[0]
            continue
        outer = {id(inner): outer for outer, inner in getattr(value.graph, "captures", ())}
        if id(value) not in outer:
            return ""
        value = outer[id(value)]
    return getattr(value, "device", "") or ""
