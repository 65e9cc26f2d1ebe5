"""`jit_compile=True` for a model over several devices: XLA compiles the calls of layers, one device's each.

XLA compiles for one device and knows no other, so it cannot compile the step. A layer's call becomes a function of its
own on the layer's device, which XLA compiles, forward and backward. What goes from device to device, and the
collectives between replicas, stay outside. A call that cannot be compiled runs as ever, and a warning says which and
why; the layers within it have a function each.

Within the function, variables are read from outside, so that their gradients and devices are as ever; what the call
assigns, and the losses that it adds, come out beside its outputs.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from tfgpu.compat import slots, variables
from tfgpu.compat import tensorflow as private
from tfgpu.compat.keras import (
    StatelessScope,
    get_mask,
    get_stateless_scope,
    in_symbolic_scope,
    is_training,
    set_mask,
    tree,
)
from tfgpu.core import extensions, logits, replication, step_context
from tfgpu.core.row_mixing.trials import isolation
from tfgpu.errors import InputError
from tfgpu.parallel import model_graph

_is_inside = step_context.Slot("compiled_calls.is_inside")  # this thread traces a function for XLA
_MEETING = (keras.layers.BatchNormalization,)  # replicas meet in its call
_SLICES = (keras.layers.Embedding,)  # its gradient is slices of the table, which XLA would make whole
_log = logging.getLogger(__name__)


class _Cannot(Exception):
    """XLA cannot compile a call; the message is the end of a sentence that says why."""


def allow(model: keras.Model) -> None:
    """Lets a model that is over several devices be compiled by calls."""
    slots.of(model).compiles_calls = True


extensions.xla_by_calls.register(lambda model: slots.get(model, "compiles_calls", False))


def run(
    layer: keras.layers.Layer,
    stock: Callable,
    args: tuple,
    kwargs: dict,
    device: str,
    by_pieces: Callable | None = None,
) -> object:
    """Calls what a layer computes on one device, compiled by XLA if the model that runs asks for it.

    Args:
        layer: whose call it is.
        stock: takes and returns tensors in any structure.
        args, kwargs: its arguments.
        device: the name of the device.
        by_pieces: of several calls, what computes the same in pieces that are compiled by themselves.
    """
    if not is_wanted() or in_symbolic_scope() or tf.executing_eagerly():
        return stock(*args, **kwargs)
    refused = vars(slots.of(layer)).setdefault("xla_refused", {})
    key = is_training(), by_pieces is None
    if key not in refused:
        try:
            return _Call(layer, stock, args, kwargs, device).run()
        except _Cannot as error:
            refused[key] = str(error)
            if by_pieces is None:
                _tell(layer, str(error))
    return (by_pieces or stock)(*args, **kwargs)


def is_wanted() -> bool:
    """Whether the model that runs in this thread asks for XLA, by calls, and this is not within such a call."""
    context = step_context.current()
    if _is_inside.get() or context.is_trying or step_context.step() is None:
        return False
    return any(slots.get(model, "xla_by_calls", False) for model in context.models)


@contextlib.contextmanager
def around() -> Iterator[None]:
    """Within the block operations are in the step, and not in the function that is traced for XLA."""
    scope = get_stateless_scope()
    with scope.graph.as_default() if isinstance(scope, _Scope) else contextlib.nullcontext():
        yield


def _tell(layer: keras.layers.Layer, why: str) -> None:
    has_layers = bool(model_graph.layers_within(layer))
    _log.warning(
        "jit_compile=True: XLA does not compile the call of %r (%s)%s: %s.",
        layer.name,
        type(layer).__name__,
        " as a whole, but those of layers within it" if has_layers else "",
        why,
    )


class _Scope(StatelessScope):
    """What a call reads, from the graph around it; what it assigns, and the losses that it adds."""

    def __init__(self, graph: tf.Graph, outer: StatelessScope | None):
        super().__init__(collect_losses=True, initialize_variables=False)
        self.assigned: dict[int, tuple[keras.Variable, bool]] = {}
        self.graph, self._outer = graph, outer

    def get_current_value(self, variable):
        value = super().get_current_value(variable)
        if value is None:
            value = None if self._outer is None else self._outer.get_current_value(variable)
            if value is None and not isinstance(variable, variables.VirtualVariable):
                value = variables.held(variable)
            if value is not None:
                with self.graph.as_default():
                    value = tf.convert_to_tensor(value)
                self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update):
        variable, _ = update
        if variable.trainable:
            raise _Cannot(f"it assigns {variable.path!r}, which is trained")
        if variable.aggregation == "sum" and variable.synchronization != "on_read":
            raise _Cannot(f"it keeps a sum over the replicas in {variable.path!r}")
        super().add_update(update)
        self.assigned[id(variable)] = variable, step_context.current().keeps_own_state


class _Call:
    """One call as a function of its own."""

    def __init__(self, layer: keras.layers.Layer, stock: Callable, args: tuple, kwargs: dict, device: str):
        self._layer, self._stock, self._args, self._kwargs = layer, stock, args, kwargs
        self._within = [layer, *model_graph.layers_within(layer).values()]
        self._device = device
        self._outputs, self._leaves = None, []
        self._masks: list[int] = []
        self._logits: list[tuple[int, logits.Logits]] = []

    def run(self) -> object:
        """What the call returns; its losses go to the layer, its assignments to the variables."""
        self._check()
        self._scope = _Scope(tf.compat.v1.get_default_graph(), get_stateless_scope())
        results = iter(self._called(self._traced()))
        leaves = [next(results) if tf.is_tensor(leaf) else leaf for leaf in self._leaves]
        for at in self._masks:
            set_mask(leaves[at], next(results))
        for at, found in self._logits:
            mask = get_mask(leaves[at])
            leaves[at] = found.replace(next(results)).attach_to(leaves[at])
            if mask is not None:
                set_mask(leaves[at], mask)
        for _ in self._scope.losses:
            model_graph.loss_owner(self._within).add_loss(next(results))
        for (variable, keeps_own), value in zip(self._scope.assigned.values(), results, strict=True):
            with step_context.scope(keeps_own_state=True) if keeps_own else contextlib.nullcontext():
                variable.assign(value)
        return tree.pack_sequence_as(self._outputs, leaves)

    def _check(self) -> None:
        leaves = tree.flatten((self._args, self._kwargs))
        if any(isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)) for leaf in leaves):
            raise _Cannot("its inputs are ragged or sparse")
        context = replication.replica_context()
        if context is not None and context.num_replicas_in_sync > 1 and self._has(_MEETING):
            raise _Cannot("the replicas exchange moments in it")
        if self._has(_SLICES):
            raise _Cannot("the gradient of a table is slices, which XLA would make as large as the table")

    def _has(self, classes: tuple) -> bool:
        return any(isinstance(each, classes) for each in self._within)

    def _traced(self):
        """The call as a concrete function that XLA compiles."""
        before = isolation.tensors_in(self._within)
        function = tf.function(self._body, jit_compile=True, autograph=False)
        try:
            with tf.device(self._device):
                found = function.get_concrete_function()
        except _Cannot:
            raise
        except InputError as error:
            raise _Cannot(f"the replicas communicate in it ({_first_line(error)})") from error
        except Exception as error:
            raise _Cannot(f"it cannot be traced by itself ({type(error).__name__}: {_first_line(error)})") from error
        finally:
            kept = self._put_back(before)
        if kept:
            raise _Cannot(f"it keeps a tensor in its attribute {kept!r}")
        self._check_operations(found)
        return found

    def _body(self) -> list[tf.Tensor]:
        with _is_inside.set_to(True), self._scope:
            outputs = self._stock(*self._args, **self._kwargs)
        self._outputs, self._leaves = outputs, tree.flatten(outputs)
        self._masks, self._logits, more = [], [], []
        for at, leaf in enumerate(self._leaves):
            if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
                raise _Cannot("its outputs are ragged or sparse")
            if tf.is_tensor(leaf) and get_mask(leaf) is not None:
                self._masks.append(at)
                more.append(get_mask(leaf))
        for at, leaf in enumerate(self._leaves):
            known = logits.find(leaf) if tf.is_tensor(leaf) else None
            if known is not None:
                self._logits.append((at, known))
                more.append(known.tensor)
        assigned = [self._scope.state_mapping[key] for key in self._scope.assigned]
        return [*filter(tf.is_tensor, self._leaves), *more, *self._scope.losses, *assigned]

    def _put_back(self, before: dict) -> str | None:
        """Takes the function's tensors out of attributes; returns the name of one."""
        found = None
        for (at, name), value in isolation.tensors_in(self._within).items():
            if before.get((at, name)) is not value:
                found = name
                vars(self._within[at])[name] = before.get((at, name))
        return found

    def _check_operations(self, function) -> None:
        """Refuses a function that XLA would refuse when it runs."""
        used = [tf.DeviceSpec.from_string(op.device) for op in function.graph.get_operations() if op.device]
        if len({(each.task, each.device_type, each.device_index) for each in used}) > 1:
            raise _Cannot("its layers are on several devices")
        kind = tf.DeviceSpec.from_string(self._device).device_type or "CPU"
        unknown = private.operations_without_xla(function.graph, kind)
        if unknown:
            raise _Cannot(f"XLA cannot compile {', '.join(sorted(unknown))}")

    def _called(self, function) -> list[tf.Tensor]:
        """Calls the function; its gradient, another function that XLA compiles, runs on the same device."""
        captured = list(function.captured_inputs)
        places = [at for at, value in enumerate(captured) if value.dtype.is_floating]
        came: set[int] = set()

        @tf.custom_gradient
        def call(*given):
            values = list(captured)
            for at, value in zip(places, given, strict=True):
                values[at] = value
            with tf.device(self._device), tf.GradientTape(persistent=True) as tape:
                tape.watch(given)
                function.set_external_captures(values)
                found = function()

            def gradient(*upstream):
                wanted = sorted(came)  # only results that have a gradient: zeros in its place would count as one
                came.clear()
                targets, arrived = [found[at] for at in wanted], [upstream[at] for at in wanted]
                with tf.device(self._device):
                    return tape.gradient(targets, list(given), output_gradients=arrived)

            return found, gradient

        if not places:
            with tf.device(self._device):
                return function()
        results = call(*(captured[at] for at in places))
        return [_noting(came, at, value) if value.dtype.is_floating else value for at, value in enumerate(results)]


def _noting(came: set[int], at: int, value: tf.Tensor) -> tf.Tensor:
    """The value; its gradient adds `at` to `came`."""

    def gradient(upstream):
        came.add(at)
        return upstream

    return tf.custom_gradient(lambda given: (tf.identity(given), gradient))(value)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:160]
