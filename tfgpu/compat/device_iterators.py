"""TensorFlow's iterator over several devices, recreated for each epoch without retracing its functions.

`OwnedMultiDeviceIterator` traces six functions for each device, which takes tens of milliseconds a device and epoch.
"""

from collections.abc import Sequence

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops.multi_device_iterator_ops import OwnedMultiDeviceIterator, _PerDeviceGenerator
from tensorflow.python.ops import gen_dataset_ops

from tfgpu.compat import slots

DeviceIterators = OwnedMultiDeviceIterator
"""Deals the elements of a dataset to devices in turn; may be passed to a tf.function."""
_HOST = "/cpu:0"


class Dealer:
    """Makes iterators that deal a dataset's elements to devices in turn.

    Args:
        dataset: the dataset.
        devices: names of devices.
        buffered: elements that are read ahead on each device, of those that were asked for.

    Attributes:
        templates: the functions of each device, empty until the first iterator is made; a dealer of the same dataset
            and devices may share them.
    """

    def __init__(self, dataset: tf.data.Dataset, devices: Sequence[str], buffered: int):
        options = tf.data.Options()
        options.experimental_distribute.num_devices = len(devices)
        self._dataset = dataset.with_options(options)._apply_debug_options()
        self._devices, self._buffered = list(devices), buffered
        self._source = tf.constant(_HOST)
        self.templates: list[_PerDeviceGenerator] = []

    def iterator(self) -> DeviceIterators:
        """A new iterator. A shuffled dataset draws its order now, as where an iterator of its own is made."""
        resource = self._resource()
        with tf.device(_HOST):
            number = gen_dataset_ops.multi_device_iterator_init(
                self._dataset._variant_tensor, resource, max_buffer_size=self._buffered
            )
            handle = gen_dataset_ops.multi_device_iterator_to_string_handle(resource)
        if not self.templates:
            self.templates += self._make_templates()
        each = [self._on_device(*made, resource, number, handle) for made in enumerate(self.templates)]
        return DeviceIterators(
            devices=self._devices,
            source_device=_HOST,
            components=[resource, *each],
            element_spec=self._dataset.element_spec,
        )

    def _resource(self) -> tf.Tensor:
        with tf.device(_HOST):
            return gen_dataset_ops.anonymous_multi_device_iterator_v3(
                devices=self._devices, **self._dataset._flat_structure
            )

    def _make_templates(self) -> list[_PerDeviceGenerator]:
        """The functions of each device, which read from an iterator that is never filled."""
        resource, number, made = self._resource(), tf.constant(0, tf.int64), []
        for at, device in enumerate(self._devices):
            with tf.device(device):
                spec = self._dataset.element_spec
                made.append(_PerDeviceGenerator(at, resource, number, self._source, spec, iterator_is_anonymous=True))
        return made

    def _on_device(
        self, at: int, template: _PerDeviceGenerator, resource: tf.Tensor, number: tf.Tensor, handle: tf.Tensor
    ) -> tf.data.Iterator:
        first = list(template._init_captured_args)
        first[_handle_index(template)] = handle
        following = list(template._next_captured_args)
        following[template._incarnation_id_index], following[-1] = number, resource
        with tf.device(self._devices[at]):
            of = {"init_func": template._init_func, "next_func": template._next_func} | template._flat_structure
            of["finalize_func"] = template._finalize_func
            variant = gen_dataset_ops.generator_dataset(first, following, template._finalize_captured_args, **of)
            made = dataset_ops._VariantDataset(variant, self._dataset.element_spec)
            return iter(made.prefetch(self._buffered))


def _handle_index(template: _PerDeviceGenerator) -> int:
    """Where the function that begins takes the iterator's name; its other text is the name of the host."""
    (found,) = [at for at, given in enumerate(template._init_captured_args) if given.numpy() != _HOST.encode()]
    return found


def iterators_of(iterator: DeviceIterators) -> list[tuple[str, tf.data.Iterator]]:
    """The devices, and the iterator of each one's elements."""
    return list(zip(iterator._devices, iterator._device_iterators, strict=True))


def only_iterator(iterator: DeviceIterators) -> tf.data.Iterator:
    """The iterator of the one device there is; what it reads from is destroyed with it."""
    ((_, found),) = iterators_of(iterator)
    slots.of(found).source = iterator._multi_device_iterator_resource  # the whole object would be a cycle
    return found
