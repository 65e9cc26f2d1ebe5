"""What a GPU would leave to the host in a graph: read from TensorFlow's registry of kernels, so no GPU is needed.

TensorFlow's CUDA build registers its GPU kernels on every machine. Many of those for int32 take and give their tensors
in host memory, and some operations have none: what they read was copied from the GPU, and the step waited for it.
"""

from functools import cache
from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.framework import kernels, op_def_registry

_CALLS = {"PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "While", "StatelessWhile", "Case"}
_SOURCES = {"Placeholder", "Const", "NoOp"} | _CALLS  # a constant is put where it is read; the others are unknown


class _Kernel(NamedTuple):
    device_type: str
    dtypes: dict[str, frozenset[int]]
    host_arguments: frozenset[str]


def copied_to_host(graph: tf.Graph) -> list[tf.Tensor]:
    """Tensors that one operation would make on a GPU and another read on the host, if all ran on that GPU.

    The arguments of the graph's function are taken for unknown: hand them through `tf.identity` to have them on the GPU
    (those of int32 stay on the host, as TensorFlow's do). Operations without effect on the outputs are left out.

    Args:
        graph: of a traced function.

    Example:
        >>> def doubled(x):
        ...     return 2 * tf.identity(x)
        >>> spec = tf.TensorSpec([8], tf.float32)
        >>> copied_to_host(tf.function(doubled).get_concrete_function(spec).graph)
        []
    """
    found: dict[str, tf.Tensor] = {}
    for operation in _live(graph):
        if operation.type in _SOURCES:
            continue
        for argument, tensor in zip(_arguments(operation, "input_arg"), operation.inputs, strict=True):
            if tensor.op.type in _SOURCES or tensor.dtype in (tf.resource, tf.variant, tf.string):
                continue
            made = _arguments(tensor.op, "output_arg")[tensor.value_index]
            if _is_on_host(operation, argument) and not _is_on_host(tensor.op, made):
                found[tensor.name] = tensor
    return list(found.values())


def _live(graph: tf.Graph) -> list[tf.Operation]:
    """What the graph's outputs and effects depend on."""
    waiting = [output.op for output in getattr(graph, "outputs", [])]
    waiting += [operation for operation in graph.get_operations() if _has_effect(operation)]
    found: dict[str, tf.Operation] = {}
    while waiting:
        operation = waiting.pop()
        if operation.name not in found:
            found[operation.name] = operation
            waiting += [tensor.op for tensor in operation.inputs] + list(operation.control_inputs)
    return list(found.values())


def _has_effect(operation: tf.Operation) -> bool:
    definition = op_def_registry.get(operation.type)
    return definition is not None and definition.is_stateful and operation.type != "Placeholder"


def _is_on_host(operation: tf.Operation, argument: str) -> bool:
    """Whether an argument or a result of an operation is in host memory."""
    given = {name: _dtypes(value) for name, value in operation.node_def.attr.items()}
    fitting = [
        kernel
        for kernel in _kernels(operation.type)
        if all(given.get(name, frozenset()) <= dtypes for name, dtypes in kernel.dtypes.items())
    ]
    return not fitting or argument in fitting[0].host_arguments


@cache
def _kernels(operation: str) -> tuple[_Kernel, ...]:
    """The kernels that a GPU takes, its own first."""
    found = [
        _Kernel(
            kernel.device_type,
            {each.name: frozenset(each.allowed_values.list.type) for each in kernel.constraint},
            frozenset(kernel.host_memory_arg),
        )
        for kernel in kernels.get_registered_kernels_for_op(operation).kernel
        if kernel.device_type in ("GPU", "DEFAULT") and not kernel.label
    ]
    return tuple(sorted(found, key=lambda kernel: kernel.device_type != "GPU"))


def _dtypes(value) -> frozenset[int]:
    return frozenset([value.type] if value.WhichOneof("value") == "type" else value.list.type)


def _arguments(operation: tf.Operation, kind: str) -> list[str]:
    """The name of each input or output, as the operation's definition gives it."""
    found = []
    for argument in getattr(op_def_registry.get(operation.type), kind):
        count = 1
        if argument.number_attr:
            count = operation.get_attr(argument.number_attr)
        elif argument.type_list_attr:
            count = len(operation.get_attr(argument.type_list_attr))
        found += [argument.name] * count
    return found
