"""Copies batches to a GPU while it still computes the previous steps.

A step's own copy cannot begin before the kernels of the step before have ended: TensorFlow makes the two streams wait
for each other, because the kernels may still use the memory that the copy writes to. tf.data's copy is begun two
batches ahead. On an H100 with ResNet-50 in mixed precision, steps whose batch is copied within them take 1.17 times as
long (`python -m benchmarks.gpu`).
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfgpu.compat import datasets, slots
from tfgpu.compat import tensorflow as private
from tfgpu.compat.device_iterators import Dealer, only_iterator
from tfgpu.core import replication
from tfgpu.core.feed import reach

BATCHES = 2
"""How many batches are on the GPU, or on the way to it, beside the step's own."""
_HOST = tf.DeviceSpec(device_type="CPU", device_index=0)


class ReadAhead:
    """A dataset whose iterators copy batches to a device ahead of the steps.

    `tf.data.experimental.prefetch_to_device` makes its iterator of the dataset when the first batch is read. Keras
    makes iterators that it never reads, each of which draws a new order of a shuffled dataset: later epochs would get
    another order.

    Args:
        dataset: a dataset of batches that hold only numbers.
        device: such as "GPU:0".
    """

    def __init__(self, dataset: tf.data.Dataset, device: str):
        self.dataset, self.element_spec = dataset, dataset.element_spec
        self._dealer = Dealer(dataset, [device], BATCHES)
        # Tracing takes some 30 ms. The functions do not hold the dataset: in a cycle, it would outlive its last use.
        kept = vars(slots.of(dataset)).setdefault("read_ahead", {})
        self._dealer.templates = kept.setdefault(device, self._dealer.templates)

    def __iter__(self) -> tf.data.Iterator:
        return only_iterator(self._dealer.iterator())


def read_ahead(strategy: tf.distribute.OneDeviceStrategy, dataset: tf.data.Dataset) -> tf.data.Dataset | ReadAhead:
    """The dataset, read ahead into a GPU's memory if `can_read_ahead`; else unchanged."""
    return ReadAhead(dataset, *strategy.extended.worker_devices) if can_read_ahead(strategy, dataset) else dataset


def can_read_ahead(strategy: tf.distribute.Strategy, dataset: tf.data.Dataset) -> bool:
    """Whether batches go to GPUs, hold only numbers, and are the same if they are read ahead.

    Data that calls Python or reads variables may depend on the steps, and `shuffle(n).repeat()` on how far it was read.
    They are read ahead only if they end with `prefetch`, which asks for that. Strings, ragged and sparse tensors stay
    in host memory, and so do token numbers in int32 in batches of any size.
    """
    if replication.is_on_host(strategy) or not isinstance(dataset, tf.data.Dataset):
        return False
    specs = [spec for spec in tf.nest.flatten(dataset.element_spec) if not isinstance(spec, private.NoneTensorSpec)]
    on_host = tf.string, tf.resource, tf.variant
    can_be_on_gpu = all(isinstance(spec, tf.TensorSpec) and spec.dtype not in on_host for spec in specs)
    if not can_be_on_gpu or not _is_worth_its_int32(specs):
        return False
    depends = reach.reaches_out(dataset) or reach.reads_state(dataset) or reach.draws_again(dataset)
    return datasets.ends_with_prefetch(dataset) or not depends


def device_of(iterator: object) -> str | None:
    """The device, such as "GPU:0", to which an iterator reads ahead; None where its batches are in host memory."""
    resource = private.iterator_resource(iterator)
    found = tf.DeviceSpec.from_string(resource.device) if resource is not None else _HOST
    kind, index = found.device_type, found.device_index
    return None if (kind, index) == (_HOST.device_type, _HOST.device_index) else f"{kind}:{index}"


def can_time() -> bool:
    """Whether steps may read the clock: TensorFlow refuses it where operations are deterministic."""
    return not private.is_op_determinism_enabled()


def timed(read: Callable) -> tuple[object, tf.Tensor]:
    """What `read()` returns, in a graph, and how long that takes in microseconds, int32.

    tf.data keeps such times of iterators in host memory alone.
    """
    with tf.device(_HOST):
        began = tf.timestamp()
    with tf.control_dependencies([began]):
        found = read()
    tensors = [each for each in tf.nest.flatten(found, expand_composites=True) if tf.is_tensor(each)]
    with tf.device(_HOST), tf.control_dependencies(tensors):
        return found, tf.cast(1e6 * (tf.timestamp() - began), tf.int32)


def _is_worth_its_int32(specs: Sequence[tf.TensorSpec]) -> bool:
    """Whether no step would copy token numbers back to the host: on a GPU the shape of an int32 tensor is asked there.

    Shapes that are known beforehand are not asked for, and class labels are few beside pictures.
    """
    asked = [spec for spec in specs if has_int32([spec]) and not spec.shape.is_fully_defined()]
    is_large = any(spec.shape.rank is not None and spec.shape.rank >= 3 and not has_int32([spec]) for spec in specs)
    return not asked or (is_large and all(spec.shape.rank == 1 for spec in asked))


def has_int32(specs: Sequence[object]) -> bool:
    """Whether any of these components is an int32 tensor."""
    return any(getattr(spec, "dtype", None) == tf.int32 for spec in specs)
