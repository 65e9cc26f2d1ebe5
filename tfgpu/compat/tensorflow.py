"""Private parts of TensorFlow's functions, tapes, graphs and kernels."""

import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.data.ops import batch_op, cache_op, dataset_ops, prefetch_op
from tensorflow.python.eager import backprop, record
from tensorflow.python.eager import context as eager_context
from tensorflow.python.eager.polymorphic_function import tf_method_target
from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function
from tensorflow.python.framework import kernels, op_def_registry, ops, tensor_util
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.framework.none_tensor import NoneTensorSpec
from tensorflow.python.framework.ops import EagerTensor
from tensorflow.python.ops import control_flow_util
from tensorflow.python.trackable import data_structures
from tensorflow.python.util import tf_decorator

from tfgpu.compat import slots
from tfgpu.compat.patch import wrapped

__all__ = ["EagerTensor", "Function", "NoneTensorSpec", "is_op_determinism_enabled", "tensor_util"]

SOURCE_FOLDER = "/tensorflow/python/"
KERAS_LOOP = ("/keras/src/trainers/", "/keras/src/callbacks/")
"""Parts of the paths of TensorFlow's files, and of those of Keras's training loop."""
READERS = ("/framework/ops.py", "/ops/resource_variable_ops.py", "/distribute/values.py")
"""Ends of the paths of TensorFlow's files through which Python reads a tensor: numpy(), float() and the like."""


def runtime() -> eager_context.Context:
    """TensorFlow's runtime in this process. It holds the global seed and the devices, and starts them on first use."""
    return eager_context.context()


def devices_of(operation: str) -> frozenset[str]:
    """The kinds of device on which an operation can run, such as `{"CPU", "GPU"}`.

    Args:
        operation: its registered name, such as `"MatMul"`.

    Example:
        >>> "CPU" in devices_of("MatMul")
        True
    """
    return frozenset(kernel.device_type for kernel in kernels.get_registered_kernels_for_op(operation).kernel)


def operations_without_xla(graph: tf.Graph, kind: str) -> set[str]:
    """The types of a graph's operations, and of those of its functions, that XLA cannot compile.

    Args:
        graph: of a function.
        kind: of device, `"CPU"` or `"GPU"`.
    """
    _register_xla()
    written = graph.as_graph_def()
    called = {function.signature.name for function in written.library.function}
    nodes = [*written.node, *(node for function in written.library.function for node in function.node_def)]
    found = {node.op for node in nodes} - called - _NEEDS_NO_KERNEL
    return {each for each in found if f"XLA_{kind}_JIT" not in devices_of(each)}


_NEEDS_NO_KERNEL = {"Placeholder", "NoOp", "_Arg", "_Retval"}


@functools.cache
def _register_xla() -> None:
    """TensorFlow registers the kernels of XLA when it compiles for the first time."""
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(lambda x: x + 1.0, jit_compile=True, autograph=False)(tf.constant(1.0))


def is_left_to_host(operation: tf.Operation) -> bool:
    """Whether a GPU leaves an operation to the host: no GPU kernel has these dtypes, or its kernel uses host memory.

    TensorFlow's CUDA build registers the kernels of GPUs on every machine.
    """
    given = {name: _dtypes(value) for name, value in operation.node_def.attr.items()}
    found = [
        kernel
        for kernel in kernels.get_registered_kernels_for_op(operation.type).kernel
        if kernel.device_type in ("GPU", "DEFAULT")
        and all(given[each.name] <= set(each.allowed_values.list.type) for each in kernel.constraint)
    ]
    outputs = {output.name for output in op_def_registry.get(operation.type).output_arg}
    return not found or all(outputs & set(kernel.host_memory_arg) for kernel in found)


def _dtypes(value) -> set[int]:
    return {value.type} if value.WhichOneof("value") == "type" else set(value.list.type)


def is_stateful(operation: str) -> bool:
    """Whether an operation is registered as stateful; False for function calls."""
    found = op_def_registry.get(operation)
    return found is not None and found.is_stateful


def is_compiled_by_xla(graph: tf.Graph) -> bool:
    """Whether XLA compiles a graph, or one that contains it."""
    return control_flow_util.GraphOrParentsInXlaContext(graph)


def asks_for_xla(function: Function) -> bool:
    """Whether a tf.function was made with `jit_compile=True`."""
    return bool(function._jit_compile)


def python_function_of(function: Function) -> Callable:
    """The Python function of a tf.function, ready to be called in the graph that is being traced.

    Autograph converts it if the tf.function asks for that. A method is returned bound to its object, not to
    TensorFlow's weak-reference wrapper.
    """
    found = function._python_function
    _, method = tf_decorator.unwrap(found)
    owner = getattr(method, "__self__", None)
    if isinstance(owner, tf_method_target.TfMethodTarget):
        found = types.MethodType(method.__func__, owner.target)
    return with_autograph(found) if function._autograph else found


def stored_list(thing: object) -> object:
    """The list in which TensorFlow's wrapper of a list attribute holds its elements; anything else as it is."""
    return thing._storage if isinstance(thing, data_structures.ListWrapper) else thing


def with_autograph(function: Callable) -> Callable:
    """A function that autograph converts when it is called, whoever calls it."""
    return autograph.tf_convert(function, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED))


def with_autograph_of_caller(function: Callable) -> Callable:
    """A function that autograph converts if it converts the caller, as `strategy.run` does."""
    return autograph.tf_convert(function, ag_ctx.control_status_ctx(), convert_by_default=False)


def with_body(function: object, body: Callable) -> Callable:
    """A `tf.function` with another's options, and a body of its own."""
    return function._clone(python_function=body)


@contextmanager
def functions_run_eagerly() -> Iterator[None]:
    """Inside the block, a `tf.function` runs its Python code."""
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(before)


@contextmanager
def equalities_hold() -> Iterator[None]:
    """Inside the block what this thread compares elementwise by `==`, `tf.equal` or `keras.ops.equal` is equal.

    Two scalars are compared as they are: Python's control flow may depend on them.

    Example:
        >>> with equalities_hold():
        ...     tf.equal([1, 2], 2).numpy().tolist()
        [True, True]
    """
    here = threading.get_ident()

    def equal(stock, *args, **kwargs) -> tf.Tensor:
        found = stock(*args, **kwargs)
        return tf.ones_like(found) if threading.get_ident() == here and found.shape.rank else found

    with wrapped("gen_math_ops.equal", equal):
        yield


@contextmanager
def comparing(note: Callable[[float], None], as_equal: Callable[[], bool] = lambda: False) -> Iterator[None]:
    """Tells of this thread's comparisons by `==` and `!=` in the block.

    Args:
        note: gets each number with which a larger tensor is compared.
        as_equal: is called where two single numbers are not equal; whether they count as equal nevertheless.

    Example:
        >>> found = []
        >>> with comparing(found.append):
        ...     _ = tf.constant([1, 2]) != 7
        >>> found
        [7]
    """
    here = threading.get_ident()

    def compare(stock, x, y, *args, **kwargs) -> tf.Tensor:
        for number, other in ((x, y), (y, x)) if threading.get_ident() == here else ():
            if tf.is_tensor(other) and other.shape.rank != 0 and (known := _known_number(number)) is not None:
                note(known)
        return stock(x, y, *args, **kwargs)

    def equal(stock, *args, **kwargs) -> tf.Tensor:
        found = compare(stock, *args, **kwargs)
        is_alone = threading.get_ident() == here and found.shape.rank == 0
        is_other = is_alone and tf.get_static_value(found) is not None and not tf.get_static_value(found)
        return tf.ones_like(found) if is_other and as_equal() else found

    with wrapped("gen_math_ops.equal", equal), wrapped("gen_math_ops.not_equal", compare):
        yield


def _known_number(value: object) -> float | int | None:
    """The number that a Python number or a tensor without axes is, if it is known."""
    if isinstance(value, tf.Tensor):
        value = tf.get_static_value(value) if value.shape.rank == 0 else None
    is_number = isinstance(value, (int, float, np.number, np.ndarray)) and not isinstance(value, bool)
    return np.asarray(value).item() if is_number and np.ndim(value) == 0 else None


def autograph_status() -> AbstractContextManager:
    """Autograph's state in this thread, as a context that can be entered in another."""
    return ag_ctx.control_status_ctx()


def without_recording() -> AbstractContextManager:
    """Hides the block's operations from every gradient tape."""
    return record.stop_recording()


def body_of(fn: Callable) -> Callable:
    """The Python function that a call of this runs: of a tf.function, a partial, or an object with a `__call__`."""
    fn = getattr(fn, "python_function", fn)
    while isinstance(fn, functools.partial):
        fn = getattr(fn.func, "python_function", fn.func)
    return fn if hasattr(fn, "__code__") or not callable(fn) else type(fn).__call__


def is_recorded() -> bool:
    """Whether a gradient tape may record what this thread does."""
    return record.could_possibly_record()


def is_of_autograph(function: Callable) -> bool:
    """Whether AutoGraph has made a branch of a condition from an `if`."""
    return "if_stmt" in getattr(function, "__qualname__", "")


def has_own_gradient(operation: tf.Operation) -> bool:
    """Whether an operation of a graph marks the end of a function with a gradient of its own."""
    return "_gradient_op_type" in operation.node_def.attr


def let_graph_own_gradient(operation: tf.Operation) -> None:
    """Makes the custom gradient of an operation live as long as the operation's graph, instead of forever.

    Args:
        operation: one that `tf.custom_gradient` has added to a graph.
    """
    registry, name = ops.gradient_registry, operation.get_attr("_gradient_op_type").decode()
    gradient = registry.lookup(name)
    vars(slots.of(operation.graph)).setdefault("custom_gradients", []).append(gradient)
    held_by_graph = weakref.ref(gradient)
    del registry._registry[name]
    registry.register(lambda *given: held_by_graph()(*given), name)
    weakref.finalize(operation.graph, registry._registry.pop, name, None).atexit = False


def surround_gradients(
    around_operation: Callable[..., AbstractContextManager], around_sum: Callable[..., AbstractContextManager]
) -> None:
    """Makes gradient tapes compute inside the given contexts, in this process from now on.

    Args:
        around_operation: the context for the gradient of an operation. Takes the operation's type, its inputs and
            outputs (None for those that the tape does not keep), and the gradients of the outputs.
        around_sum: the context in which the gradients of one tensor are added; takes them.
    """
    stock, space = backprop._gradient_function, backprop._default_vspace

    def gradient_function(op_type, attributes, count, inputs, outputs, upstream, *rest):
        with around_operation(op_type, inputs, outputs, upstream):
            return stock(op_type, attributes, count, inputs, outputs, upstream, *rest)

    def add(gradients):
        with around_sum(gradients):
            return space.aggregate_fn(gradients)

    pywrap_tfe.TFE_Py_RegisterGradientFunction(gradient_function)
    pywrap_tfe.TFE_Py_RegisterVSpace(space._replace(aggregate_fn=add))


def add_control_inputs(operation: tf.Operation, sources: list[tf.Operation]) -> None:
    """Makes an operation of a graph wait for others."""
    operation._add_control_inputs(sources)


def sources_of(dataset: tf.data.Dataset) -> list[tf.data.Dataset]:
    """The datasets that a dataset reads from."""
    return dataset._inputs()


def functions_of(dataset: tf.data.Dataset) -> list:
    """The functions that a dataset calls to produce its elements."""
    return dataset._functions()


def python_function_of_stage(dataset: tf.data.Dataset) -> Callable | None:
    """The Python function that was passed to a stage such as `Dataset.map`; None for others."""
    return getattr(getattr(dataset, "_map_func", None), "_func", None)


def writes_cache(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is `Dataset.cache` with a file."""
    return isinstance(dataset, cache_op.CacheDataset) and tf.get_static_value(dataset._filename) != b""


def is_cache(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset is `Dataset.cache`."""
    return isinstance(dataset, cache_op.CacheDataset)


def passes_elements_on(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset gives what it reads, unchanged: `cache`, `prefetch` and `with_options`."""
    return isinstance(dataset, (cache_op.CacheDataset, prefetch_op._PrefetchDataset, dataset_ops._OptionsDataset))


def rows_of_batches(dataset: tf.data.Dataset) -> int | None:
    """The batch size of a dataset that is `Dataset.batch`; None for others."""
    if not isinstance(dataset, (batch_op._BatchDataset, batch_op._ParallelBatchDataset)):
        return None
    return int(dataset._batch_size)


def control_inputs(graph: tf.Graph) -> list[tf.Operation]:
    """What newly traced operations wait for, by `tf.control_dependencies`."""
    return list(graph._current_control_dependencies())


def operations_of(graph: tf.Graph) -> set[str]:
    """The kinds of a graph's operations, and of those in functions that it calls."""
    inner = (node for function in graph._functions.values() for node in function.cached_definition.node_def)
    return {operation.type for operation in graph.get_operations()} | {node.op for node in inner}


def iterator_resource(iterator: object) -> tf.Tensor | None:
    """The resource handle of a single dataset's iterator; None for other objects."""
    return getattr(iterator, "_iterator_resource", None)


def iterator_resources(iterator: object) -> list[tf.Tensor]:
    """The resource handles of an iterator, consumers first; empty for objects that are not tf.data iterators."""
    own = iterator_resource(iterator)
    if own is not None:
        source = getattr(slots.of(iterator), "source", None)  # of `device_iterators.only_iterator`
        return [own] if source is None else [own, source]
    if hasattr(iterator, "_multi_device_iterator_resource"):
        of_devices = [resource for each in iterator._device_iterators for resource in iterator_resources(each)]
        return [*of_devices, iterator._multi_device_iterator_resource]
    found = []
    for worker in getattr(iterator, "_iterators", ()):  # an iterator of a strategy's distributed data
        of_devices = getattr(worker, "_iterator", None)
        for each in getattr(of_devices, "_device_iterators", ()):
            found += iterator_resources(each)
        common = getattr(of_devices, "_multi_device_iterator_resource", None)
        found += [common] if common is not None else iterator_resources(of_devices)
    return found


def distributed_from(data: object) -> list:
    """The datasets from which a strategy's distributed dataset was made; `[None]` if unknown."""
    if hasattr(data, "_original_dataset"):
        return [data._original_dataset]
    return list(getattr(data, "_datasets", None) or [None])  # of `distribute_datasets_from_function`


def eager_random() -> object | None:
    """The generator of seeds for TensorFlow's eager operations, or None if it does not exist yet."""
    return getattr(eager_context.context(), "_rng", None)


def graph_of_call(operation: tf.Operation) -> tf.Graph | None:
    """The graph of the function that an operation of a graph calls; None if only its definition is there."""
    graph, name = operation.graph, operation.get_attr("f").name
    while graph is not None:
        if graph._is_function(name):
            return getattr(graph._get_function(name), "graph", None)
        graph = getattr(graph, "outer_graph", None)
    return None
