"""`parallel.memory_by_device`: how many bytes a model and its optimizer keep on each device between steps."""

import keras
import numpy as np

from tfgpu.compat import variables
from tfgpu.parallel import device_placement
from tfgpu.parallel.zero import dealing


def memory_by_device(model: keras.Model) -> dict[str, dict[str, int]]:
    """Counts every copy of every variable on the device that holds it; on several workers, this worker's.

    Args:
        model: built. If its optimizer is built, the slots are counted as well.

    Returns:
        By device (`"GPU:0"`, or `"1/GPU:0"` of connected processes), in bytes: `"weights"` (and states of random
        draws), `"optimizer"` (slots, averages, accumulated gradients, counters), and `"pieces"` (of weights that a
        sharded optimizer is updating).

    Example:
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)])
        >>> [sizes["weights"] for sizes in memory_by_device(model).values()]
        [160]
    """
    optimizer = getattr(model, "optimizer", None)
    groups = {
        "weights": model.variables,
        "optimizer": optimizer.variables if optimizer is not None else [],
        "pieces": [dealing.target_of(v) for v in model.trainable_variables if dealing.target_of(v) is not v],
    }
    metrics = {id(variable) for variable in model.metrics_variables}
    found: dict[str, dict[str, int]] = {}
    for kind, counted in groups.items():
        for variable in {id(v): v for v in counted if id(v) not in metrics}.values():
            for copy in variables.copies(getattr(variable, "value", variable)):
                sizes = found.setdefault(device_placement.short_name(copy.device), dict.fromkeys(groups, 0))
                sizes[kind] += int(np.prod(copy.shape)) * copy.dtype.size
    return found
