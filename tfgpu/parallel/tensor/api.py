"""Layers in parts on several devices, which work on the same rows at the same time: tensor parallelism."""

from collections.abc import Iterable, Mapping

import keras

from tfgpu.errors import InputError
from tfgpu.parallel import connection, hybrid
from tfgpu.parallel.mesh import Mesh


def tensor(
    model: keras.Model,
    axis: str = "tensor",
    *,
    plan: Mapping[str, str | None] | str = "auto",
    devices: int | str | Iterable[str] | None = None,
    mesh: Mesh | None = None,
) -> keras.Model:
    """Cuts the large layers of a model into parts on several devices, before it is compiled. Prints the plan.

    Each device holds its part of a kernel and the optimizer's slots for it. Dense, EinsumDense and Conv are cut by
    their outputs, and the next one by its inputs, so that the two need one sum over the devices forwards and one
    backwards; attention is cut by heads, an embedding by rows, and a last layer that makes logits by columns, from
    which the cross-entropy is taken without bringing them together. All else is on the first device of each group.

    Args:
        model: functional or Sequential, built; functional models within it are looked into as well.
        axis: the mesh's, along which the parts lie; there is one for it.
        plan: `"auto"`, or by pattern of layers `"column"`, `"row"`, `"heads"`, `"vocabulary"`, or None for whole. The
            first pattern counts; layers that none matches stay whole.
        devices: how many, or their names; None takes all GPUs, or all logical CPU devices.
        mesh: devices with an axis `data` besides: several copies, each on its rows of the batch.

    Returns:
        The same model, to be compiled and fitted. What it saves is an ordinary model.

    Raises:
        InputError: the model has no graph, nothing can be cut, or a layer not as asked: the message says why, and
            which size would divide.

    Example:
        >>> layers = [keras.layers.Dense(8, "relu", name="body"), keras.layers.Dense(1, name="head")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = tensor(model, devices=2)  # doctest: +SKIP

    Source: Shoeybi et al., Megatron-LM, 2019.
    """
    if axis != "tensor":
        raise InputError(f"The axis of a mesh that layers are cut along is called 'tensor'. Received: {axis!r}.")
    if mesh is not None and devices is not None:
        raise InputError("Give `devices` or `mesh`, not both: a mesh has devices of its own.")
    if mesh is None:
        chosen = connection.select(devices)
        mesh = Mesh(tensor=len(chosen), devices=tuple(device.name for device in chosen))
    if mesh.tensor == 1:
        raise InputError(f"There is nothing to cut for: {mesh}. Give two devices or more along `tensor`.")
    if mesh.pipeline > 1:
        raise InputError(f"{mesh} has stages too. Take `parallel.apply(model, mesh)`.")
    return hybrid.apply(model, mesh, plan=plan)
