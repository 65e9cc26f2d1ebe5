"""Which devices have a kernel for an operation: TensorFlow has no public name that tells."""

from tensorflow.python.framework import kernels


def devices_of(operation: str) -> frozenset[str]:
    """Says on which kinds of device an operation can run, such as `{"CPU", "GPU"}`.

    Args:
        operation: its name as registered, such as `"MatMul"`.

    Example:
        >>> "CPU" in devices_of("MatMul")
        True
    """
    return frozenset(kernel.device_type for kernel in kernels.get_registered_kernels_for_op(operation).kernel)
