"""Several CPU devices per worker: inside the context only. tests/test_strategies.py trains on them."""

import pytest
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from tfgpu.compat import worker_devices
from tfgpu.errors import MachineError


def test_tensorflow_is_restored():
    stock = CollectiveAllReduceExtended._initialize_local_devices
    with pytest.raises(KeyError), worker_devices.worker_devices(["CPU:0", "CPU:1"]):
        inside = CollectiveAllReduceExtended._initialize_local_devices(None, None, "/job:worker/task:1")
        raise KeyError
    names = ("/job:worker/task:1/device:CPU:0", "/job:worker/task:1/device:CPU:1")
    assert inside == (names, "CPU")
    assert CollectiveAllReduceExtended._initialize_local_devices is stock


def test_a_tensorflow_without_the_seam_is_named(monkeypatch):
    monkeypatch.delattr(CollectiveAllReduceExtended, "_initialize_local_devices")
    said = r"TensorFlow 2\.\d+\.\S+ has no `CollectiveAllReduceExtended._initialize_local_devices`.* install "
    said += r'"tensorflow==2\.\d+\.\d+"`, or use one CPU device per worker\.'
    with pytest.raises(MachineError, match=said), worker_devices.worker_devices(["CPU:0"]):
        pass
