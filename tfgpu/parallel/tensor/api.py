"""`parallel.tensor`: layers that are split over several devices, which work on the same rows at the same time."""

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
    """Splits the large layers of a model over several devices, and prints the plan. Call it before `compile`.

    Each device holds its shard of a kernel, and of the optimizer slots for it. Dense, EinsumDense and Conv are split by
    their outputs, and the next such layer by its inputs, so that the two need one sum over the devices in the forward
    pass and one in the backward pass. Attention is split by heads, an embedding by rows, and a last layer that computes
    logits by columns, from which the cross-entropy is computed without gathering them. Layers of your own, and of
    KerasHub, are split by the plan of their class: see `register_plan` and `plan_for`. Everything else is on the first
    device of each group.

    Args:
        model: functional or Sequential, built; functional models within it are searched as well.
        axis: the mesh's axis along which layers are split: `"tensor"`, the only one.
        plan: `"auto"`, or by pattern of layers `"column"`, `"row"`, `"heads"`, `"vocabulary"`, or None to leave a layer
            whole. The first pattern that matches counts; layers that none matches stay whole. Patterns reach into
            layers of your own as well (`"block/up"`); an attention of your own with `"heads"` takes its class's plan.
        devices: how many, or their names; None uses all GPUs, or all logical CPU devices.
        mesh: devices with an axis `data` as well: several copies of the model, each on its rows of the batch.

    Returns:
        The same model, ready to be compiled and trained. What it saves is an ordinary model.

    Raises:
        InputError: the model has no graph, nothing can be split, or a layer cannot be split as asked; the message gives
            the reason, and a size that would divide.

    Example:
        >>> layers = [keras.layers.Dense(8, "relu", name="body"), keras.layers.Dense(1, name="head")]
        >>> model = keras.Sequential([keras.Input((4,)), *layers])
        >>> model = tensor(model, devices=2)  # doctest: +SKIP

    Source: Shoeybi et al., Megatron-LM, 2019.
    """
    if axis != "tensor":
        raise InputError(f"The axis of a mesh along which layers are split is called 'tensor'. Received: {axis!r}.")
    if mesh is not None and devices is not None:
        raise InputError("Give `devices` or `mesh`, not both: a mesh already has devices.")
    if mesh is None:
        chosen = connection.select(devices)
        mesh = Mesh(tensor=len(chosen), devices=tuple(device.name for device in chosen))
    if mesh.tensor == 1:
        raise InputError(f"`tensor` needs two devices or more along the axis `tensor`. Received: {mesh}.")
    if mesh.pipeline > 1:
        raise InputError(f"`tensor` takes no mesh with stages. Received: {mesh}. Use `parallel.apply(model, mesh)`.")
    return hybrid.apply(model, mesh, plan=plan)
