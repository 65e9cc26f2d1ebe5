"""Says which stages of a dataset every worker runs, what that costs, and how to share them."""

import logging
import threading
from dataclasses import dataclass
from enum import Enum

import tensorflow as tf

from tfgpu.compat import datasets
from tfgpu.compat import tensorflow as private
from tfgpu.core import step_blocks
from tfgpu.core.feed import costs
from tfgpu.core.feed.rewriting import Cut

_log = logging.getLogger(__name__)
BATCHES = 10
"""So many batches are read before the cost of stages is reported; fewer if the run ends."""
_LOOK_S = 0.02
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
    LENGTH = (
        "It pads each batch to its longest element, so it needs all elements. With `padded_shapes`, each worker makes "
        "only its own"
    )
    STRUCTURE = "It takes sparse or ragged tensors. Give it plain ones"


@dataclass(frozen=True)
class Note:
    """That every worker runs stages of a dataset.

    Attributes:
        dataset: the dataset.
        cut: of it; None if every worker makes all of it.
        obstacle: why the last of the stages is not shared.
    """

    dataset: tf.data.Dataset
    cut: Cut | None
    obstacle: Obstacle

    @property
    def stages(self) -> list[str]:
        """Names of what every worker runs, the source first."""
        return names(self.dataset if self.cut is None else self.cut.base)

    def tell(self, cost: costs.Cost | None = None) -> None:
        """Logs which costly stages every worker runs; nothing if there are none."""
        stages = self.stages
        kinds = [stage.split(" ")[0] for stage in stages]
        if not _COSTLY.intersection(kinds):
            return
        passed = _PASSED - {"padded_batch"} if self.obstacle is Obstacle.LENGTH else _PASSED
        last = max((at for at, kind in enumerate(kinds) if kind not in passed), default=len(kinds) - 1)
        _log.info(
            "Every worker runs these stages of a dataset for all rows: %s.%s The last that workers cannot share is "
            "`%s`. %s.",
            ", ".join(stages),
            "" if cost is None else f" They take {cost}.",
            stages[last],
            _PYTHON if kinds[last] == "from_generator" else self.obstacle.value,
        )

    def tell_with_cost(self, run: step_blocks.Run) -> None:
        """Logs it when the first batches of a run have been read, with what the stages have cost.

        Args:
            run: that is about to read the dataset.
        """
        _Measuring(self, run)


class _Measuring:
    """Waits for the first batches of a run.

    TensorFlow forgets what a stage's input cost once the stage has read all of it, as `shuffle` over a whole dataset
    has before the first batch. So a thread reads the cost every 20 ms until it is reported.
    """

    def __init__(self, note: Note, run: step_blocks.Run):
        self._note, self._run, self._batches, self._seen = note, run, 0, None
        self._is_told = threading.Event()
        self._thread = threading.Thread(target=self._look, name="tfgpu-costs", daemon=True)
        self._thread.start()
        run.after_block.append(self._after_block)
        run.exits.callback(self._tell)

    def _after_block(self, steps: int, seconds: float) -> None:
        self._batches += steps
        if self._batches >= BATCHES:
            self._tell()

    def _tell(self) -> None:
        if not self._is_told.is_set():
            self._is_told.set()
            self._thread.join()
            self._note.tell(self._cost(self._batches))

    def _look(self) -> None:
        epoch = int(self._note.dataset.cardinality())
        while epoch > 0 and not self._is_told.wait(_LOOK_S):
            self._seen = self._cost(epoch) or self._seen

    def _cost(self, batches: int) -> costs.Cost | None:
        block, note = self._run.block, self._note
        iterator = None if block is None else block.iterator
        data = getattr(iterator, "data", None)
        if getattr(data, "dataset", None) is not note.dataset or not isinstance(iterator.unread, tf.data.Iterator):
            return None
        cut = note.cut if iterator.has_rows else None
        return costs.measure(iterator.unread, batches, cut, note.stages, self._seen)


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
