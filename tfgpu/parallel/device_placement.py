"""Variables and operations at home on chosen devices: what a model that is spread over devices is made of.

A home is a device for each replica. Three things are TensorFlow's to know where an operation runs, and it knows none:

- a variable that exists cannot be moved: `move` gives a Keras variable another `tf.Variable` of the same value there;
- a gradient runs on the device that happens to be in force when it is taken, which is the first: `colocate_gradients`
  lets it run where the operation runs whose gradient it is, and sums where their first part is;
- an optimizer's arithmetic likewise: in `colocate_with_inputs` an operation runs where its first input is that is no
  scalar.

Source of the first two: what `tf.GradientTape.gradient` adds to a graph has no device (seen with TensorFlow 2.21).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf
from keras.src.backend.tensorflow import core
from tensorflow.python import pywrap_tfe
from tensorflow.python.distribute import device_util
from tensorflow.python.eager import backprop

from tfgpu.compat.patch import wrap
from tfgpu.core import replication
from tfgpu.parallel import remote_devices


@dataclass(frozen=True)
class DevicePlacement:
    """Where something lives: the full names of devices, one for each replica of the model, in their order."""

    devices: tuple[str, ...]

    @property
    def local_device(self) -> str:
        """This replica's device; outside of replicas the first one's."""
        context = replication.replica_context()
        number = tf.get_static_value(context.replica_id_in_sync_group) if context is not None else 0
        return self.devices[number % len(self.devices)]  # of several workers each has as many


def on_devices(devices: Iterable[str]) -> DevicePlacement:
    """The home on devices of these names, such as `"GPU:0"`, `"1/GPU:0"` or `"/job:worker/task:1/device:GPU:0"`."""
    return DevicePlacement(tuple(device_util.canonicalize(full_name(device)) for device in devices))


def full_name(device: str) -> str:
    """A device's name as TensorFlow takes it, where it stands for this process (`"GPU:0"`) or another (`"1/GPU:0"`)."""
    if device.startswith("/"):
        return device
    process, _, name = device.rpartition("/")
    is_far = process and remote_devices.connection() is not None
    return f"/job:{remote_devices.JOB}/replica:0/task:{process}/device:{name}" if is_far else f"/device:{name}"


def short_name(device: str) -> str:
    """What `full_name` makes a full name of."""
    found = tf.DeviceSpec.from_string(device)
    process = f"{found.task}/" if remote_devices.connection() is not None else ""
    return f"{process}{found.device_type}:{found.device_index}"


@contextlib.contextmanager
def scope(place: DevicePlacement) -> Iterator[None]:
    """Runs what is made in the block at home; variables that are made there stay there.

    In the scope of a strategy, a variable has a copy on each device of the home.
    """

    colocate_gradients()
    with tf.device(place.local_device), variable_scope(place):
        yield


def variable_scope(place: DevicePlacement):
    """A block in which variables that are made have a copy on each device of the home, in the scope of a strategy."""

    def make(next_creator: Callable, **how):
        if tf.distribute.has_strategy() and replication.is_replicated(tf.distribute.get_strategy()):
            how.setdefault("colocate_with", _Devices(place.devices))  # the innermost block counts
        return next_creator(**how)

    return tf.variable_creator_scope(make)


class _Devices:
    """What TensorFlow asks for the devices of a new variable."""

    def __init__(self, devices: tuple[str, ...]):
        self._devices = devices


def attach(model: keras.Model, strategy: tf.distribute.Strategy) -> None:
    """Makes a model, whose variables are moved besides, one of a strategy's, as if it were made in its scope."""
    model._distribute_strategy = strategy
    strategy._tfgpu_has_homes = True


def is_placed(strategy: tf.distribute.Strategy) -> bool:
    """Whether the parts of a replica live on several devices."""
    return getattr(strategy, "_tfgpu_has_homes", False)


def move_variable(variable: keras.Variable, place: DevicePlacement, strategy: tf.distribute.Strategy) -> None:
    """Gives a variable a home; its value stays.

    Args:
        variable: of a model or a metric; an optimizer that is built has lost sight of it.
        place: where to.
        strategy: the replicas that shall have a copy each.
    """
    value, trains, may_train = variable._value.numpy(), variable._trainable, variable._value.trainable
    variable._value = None  # so that its memory is free before the new one takes any
    variable._trainable = may_train  # of a layer that is frozen now, but may learn later
    with strategy.scope(), scope(place):
        variable._initialize(value)
    variable._trainable = trains


def run_on(layer: keras.layers.Layer, place: DevicePlacement, name: str = "call") -> None:
    """Lets a method of one layer run at home."""
    stock = getattr(layer, name)
    stock = getattr(stock, "tfgpu_stock", stock)

    @functools.wraps(stock)
    def method(*args, **kwargs):
        with scope(place):
            return stock(*args, **kwargs)

    method.tfgpu_stock = stock
    object.__setattr__(layer, name, method)


def create_variables_on(
    layer: keras.layers.Layer, place: DevicePlacement, strategy: tf.distribute.Strategy, name: str
) -> None:
    """Lets a method of one layer, which makes variables outside of any step, make them at home."""
    stock = getattr(layer, name)

    @functools.wraps(stock)
    def method(*args, **kwargs):
        with strategy.scope(), scope(place):
            return stock(*args, **kwargs)

    object.__setattr__(layer, name, method)


def build_on(layer: keras.layers.Layer, place: DevicePlacement) -> None:
    """Lets a layer that is not built make its variables at home, at once or when Keras comes to it."""
    _wait_with_home()
    stock = layer.build

    @functools.wraps(stock)
    def build(*args, **kwargs):
        with scope(place):
            stock(*args, **kwargs)
        for variable in layer.variables:
            if not hasattr(variable, "_tfgpu_home"):  # a layer within may have one of its own
                variable._tfgpu_home = place

    object.__setattr__(layer, "build", build)


@functools.cache
def _wait_with_home() -> None:
    @wrap(core.Variable, "_deferred_initialize")
    def deferred_initialize(stock, self):
        place = getattr(self, "_tfgpu_home", None)
        with scope(place) if place is not None else contextlib.nullcontext():
            stock(self)


@functools.cache
def colocate_gradients() -> None:
    """Lets gradients run where the operations run that they belong to, in this process from now on."""
    stock, space = backprop._gradient_function, backprop._default_vspace

    def gradient_function(op_name, attributes, count, inputs, outputs, upstream, *rest):
        # Of an operation whose gradient needs none of its tensors (adding a bias), a tape knows no tensor.
        with _device(_device_of_forward(op_name, inputs, outputs) or _first_device(upstream)):
            return stock(op_name, attributes, count, inputs, outputs, upstream, *rest)

    def add(gradients):
        with _device(_first_device(gradients)):
            return space.aggregate_fn(gradients)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient_function)
    pywrap_tfe.TFE_Py_RegisterVSpace(space._replace(aggregate_fn=add))


@contextlib.contextmanager
def colocate_with_inputs() -> Iterator[None]:
    """In a graph, lets operations run where their first input is that is no scalar; variables are where they live.

    Nothing is changed where all that a replica has lives on one device.
    """
    if tf.executing_eagerly() or not is_placed(replication.replica_context().strategy):
        yield
        return
    graph = tf.compat.v1.get_default_graph()

    def choose(op) -> str:
        found = (_device_of(value) for value in op.inputs if value.dtype == tf.resource or value.shape.rank != 0)
        return next(filter(None, found), "")

    with graph.device(choose):
        yield


def _device(name: str | None):
    return tf.device(name) if name else contextlib.nullcontext()


def _device_of_forward(kind: str, inputs, outputs) -> str | None:
    """Where an operation ran of which a tape knows this; it keeps only the tensors that the gradient needs."""
    known = [value for value in inputs or () if tf.is_tensor(value)]
    for value in outputs or ():
        if tf.is_tensor(value) and _device_of(value):
            return _device_of(value)
    for value in known:
        if hasattr(value, "graph"):  # an eager tensor has none
            for op in value.consumers():
                mine = {id(one) for one in op.inputs}
                if op.type == kind and op.device and all(id(one) in mine for one in known):
                    return op.device
    return _first_device(known)


def _first_device(values) -> str | None:
    return next(filter(None, map(_device_of, tf.nest.flatten(values, expand_composites=True))), None)


def _device_of(value) -> str:
    """The device of a tensor, or of the variable that it is read from; an empty name where none is known."""
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
