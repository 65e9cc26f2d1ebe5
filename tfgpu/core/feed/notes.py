"""Says which stages of a dataset every worker runs, and how to share them."""

import logging
from enum import Enum

import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.compat import tensorflow as private

_log = logging.getLogger(__name__)
_PASSED = frozenset("prefetch options batch padded_batch repeat take skip assert_cardinality".split())
_PYTHON = (
    "Python makes its batches: a generator, or a PyDataset. To share the work, make a dataset of places or paths, and "
    "do the work in a `map` after the shuffle"
)
_COSTLY = frozenset("map flat_map interleave filter from_generator scan group_by_window".split())


class Obstacle(Enum):
    """What every worker must run whole, and with it what comes before; the value says how to change that."""

    ORDER = (
        "It decides which elements come, and when. Put each `map` that changes one element by itself after it: then a "
        "worker runs that on its own elements only"
    )
    STATE = (
        "Its function has state: another one draws other numbers if it runs less often. Draw with `tf.random.stateless_"
        "uniform` and the like, from a seed that belongs to the element; say `tf.numpy_function(stateful=False)` of "
        "Python that has none"
    )
    ROWS = (
        "Its function is not known to give each row of a batch its own value to the bit. Put it before `batch`, "
        "if it looks at one row at a time"
    )
    STRUCTURE = "It takes sparse or ragged tensors. Give it plain ones"


def tell(dataset: tf.data.Dataset, obstacle: Obstacle) -> None:
    """Logs which costly stages every worker runs; nothing if there are none.

    Args:
        dataset: what every worker makes.
        obstacle: why its last stage is not shared.
    """
    stages = names(dataset)
    kinds = [stage.split(" ")[0] for stage in stages]
    if not _COSTLY.intersection(kinds):
        return
    last = max((at for at, kind in enumerate(kinds) if kind not in _PASSED), default=len(kinds) - 1)
    _log.info(
        "Every worker runs these stages of a dataset for all rows: %s. The last that it cannot share is `%s`. %s.",
        ", ".join(stages),
        stages[last],
        _PYTHON if kinds[last] == "from_generator" else obstacle.value,
    )


def names(dataset: tf.data.Dataset) -> list[str]:
    """The stages of a dataset, the source first, with the names of the functions that they call.

    Example:
        >>> names(tf.data.Dataset.range(3).shuffle(3).batch(2))
        ['range', 'shuffle', 'batch']
    """
    if any("GeneratorDataset" in private.operations_of(each.function.graph) for each in private.functions_of(dataset)):
        return ["from_generator"]
    found = [name for source in private.sources_of(dataset) for name in names(source)]
    function = getattr(private.python_function_of_stage(dataset), "__name__", None)
    name = datasets.name_of(dataset)
    return [*found, f"{name} ({function})" if function else name]
