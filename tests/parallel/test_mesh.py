"""Sizes and positions of a mesh, without any device."""

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.errors import InputError
from tfgpu.parallel import Mesh
from tfgpu.parallel.mesh import AXES

SIZES = st.integers(1, 5)


def names(count):
    return [f"GPU:{at}" for at in range(count)]


def test_tensor_is_innermost_and_data_outermost():
    mesh = Mesh(data=2, pipeline=2, tensor=2, devices=names(8))
    places = [(d, p, t) for d in range(2) for p in range(2) for t in range(2)]
    assert [mesh.device(*place) for place in places] == names(8)
    assert mesh.along("tensor") == (("GPU:0", "GPU:1"), ("GPU:2", "GPU:3"), ("GPU:4", "GPU:5"), ("GPU:6", "GPU:7"))
    assert mesh.along("pipeline") == (("GPU:0", "GPU:2"), ("GPU:1", "GPU:3"), ("GPU:4", "GPU:6"), ("GPU:5", "GPU:7"))
    assert mesh.along("data") == (("GPU:0", "GPU:4"), ("GPU:1", "GPU:5"), ("GPU:2", "GPU:6"), ("GPU:3", "GPU:7"))


@given(SIZES, SIZES, SIZES)
def test_each_axis_parts_all_devices(data, pipeline, tensor):
    mesh = Mesh(data, pipeline, tensor).on(names(data * pipeline * tensor))
    for axis in AXES:
        groups = mesh.along(axis)
        assert sorted(name for group in groups for name in group) == sorted(mesh.devices)
        assert {len(group) for group in groups} == {getattr(mesh, axis)}


@given(SIZES, SIZES, SIZES, st.integers(1, 40))
def test_suggested_sizes_fit(data, pipeline, tensor, count):
    mesh = Mesh(data, pipeline, tensor)
    if mesh.size == count:
        mesh.check(count)
        return
    with pytest.raises(InputError, match=f"takes {mesh.size} devices; there are {count}. These fit: ") as told:
        mesh.check(count)
    for fit in str(told.value).rpartition("These fit: ")[2].rstrip(".").split(" or "):
        sizes = {axis: getattr(mesh, axis) for axis in AXES}
        sizes |= {part.split("=")[0]: int(part.split("=")[1]) for part in fit.strip("()").split(", ")}
        assert math.prod(sizes.values()) == count


def test_names_are_normalized():
    assert Mesh(data=3, devices=["gpu:0", "1/gpu:00", "CPU:2"]).devices == ("GPU:0", "1/GPU:0", "CPU:2")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mesh(data=0), "`data` must be a whole number of at least 1. Received: 0"),
        (lambda: Mesh(tensor=True), "`tensor` must be"),
        (lambda: Mesh(pipeline=2.0), "`pipeline` must be"),
        (lambda: Mesh(data=2, devices="GPU:0"), "must be names"),
        (lambda: Mesh(devices=["TPU:0"]), "A device's name is"),
        (lambda: Mesh(data=2, devices=["GPU:0", "gpu:0"]), "Listed twice: GPU:0"),
        (lambda: Mesh(data=2, devices=names(3)), "takes 2 devices; there are 3. These fit: data=3."),
        (lambda: Mesh(data=2).device(), "has no devices yet"),
        (lambda: Mesh(data=2, devices=names(2)).device(data=2), "has data from 0 to 1. Received: data=2"),
        (lambda: Mesh(data=2, devices=names(2)).device(tensor=-1), "has tensor from 0 to 0"),
        (lambda: Mesh(devices=names(1)).along("tensors"), "tensor"),
        (lambda: Mesh(devices=names(1)).on(["GPU:1"]), "already has devices: GPU:0"),
    ],
)
def test_bad_input(make, message):
    with pytest.raises(InputError, match=message):
        make()


def test_a_mesh_starts_no_tensorflow():
    code = "import sys; from tfgpu.parallel import Mesh; Mesh(data=64); assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=550)
