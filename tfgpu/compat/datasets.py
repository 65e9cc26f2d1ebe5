"""Private parts of tf.data: the stages of a dataset, read from its objects, and the graphs of their functions."""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import tensorflow as tf
from tensorflow.python.data.experimental.ops import cardinality
from tensorflow.python.data.ops import (
    batch_op,
    dataset_ops,
    debug_mode,
    map_op,
    padded_batch_op,
    prefetch_op,
    repeat_op,
    skip_op,
    take_op,
    zip_op,
)
from tensorflow.python.data.util import nest, structure
from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
from tensorflow.python.framework.func_graph import FuncGraph

_COUNTS = {
    repeat_op._RepeatDataset: ("repeat", "_count"),
    take_op._TakeDataset: ("take", "_count"),
    skip_op._SkipDataset: ("skip", "_count"),
    cardinality._AssertCardinalityDataset: ("assert_cardinality", "_expected_cardinality"),
    prefetch_op._PrefetchDataset: ("prefetch", "_buffer_size"),
}


@dataclass(frozen=True)
class Counted:
    """A stage that is known by a number: `repeat`, `take`, `skip`, `assert_cardinality` or `prefetch`.

    Attributes:
        kind: its name.
        number: its argument.
    """

    kind: str
    number: int

    def apply(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """The same stage on another dataset."""
        if self.kind == "assert_cardinality":
            return dataset.apply(tf.data.experimental.assert_cardinality(self.number))
        return getattr(dataset, self.kind)(self.number)


@dataclass(frozen=True)
class Options:
    """`Dataset.with_options`."""


@dataclass(frozen=True)
class Map:
    """`Dataset.map`.

    Attributes:
        function: what it calls, on the tensors of an element.
        element_spec: of the dataset that it reads.
        output_spec: of the dataset that it gives.
        parallel_calls: `num_parallel_calls`; None if it runs one call after another.
    """

    function: ConcreteFunction
    element_spec: object
    output_spec: object
    parallel_calls: int | None

    def call(self, element: object, called: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]) -> object:
        """What the function makes of an element.

        Args:
            element: of the structure of `element_spec`.
            called: runs the function on a list of tensors, such as a function that `imported` returns.
        """
        outputs = called(structure.to_tensor_list(self.element_spec, element))
        return structure.from_compatible_tensor_list(self.output_spec, outputs)

    def call_on_rows(self, batch: object, called: Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]) -> object:
        """What a function of plain tensors makes of a batch, which may have another number of rows than its spec."""
        return tf.nest.pack_sequence_as(self.output_spec, called(tf.nest.flatten(batch)))


@dataclass(frozen=True)
class Batch:
    """`Dataset.batch`, or `padded_batch` whose shapes are all given.

    Attributes:
        rows: elements of a full batch.
        drop_remainder: whether a batch of fewer elements is left out.
        parallel_calls: `num_parallel_calls`; None if it runs in one thread.
        padding: the given shapes and values; None for `batch`.
    """

    rows: int
    drop_remainder: bool
    parallel_calls: int | None = None
    padding: tuple[object, object] | None = None

    def apply(self, dataset: tf.data.Dataset, rows: int) -> tf.data.Dataset:
        """Batches of `rows` elements of a dataset of pairs: an element as this stage batches it, and a scalar."""
        if self.padding is None:
            calls = self.parallel_calls
            how = {} if calls is None else {"num_parallel_calls": calls, "deterministic": True}
            return dataset.batch(rows, self.drop_remainder, **how)
        shapes, values = self.padding
        zero = tf.zeros([], dataset.element_spec[1].dtype)
        return dataset.padded_batch(rows, (shapes, []), (values, zero), self.drop_remainder)


@dataclass(frozen=True)
class Zip:
    """`Dataset.zip`, and so `Dataset.enumerate`.

    Attributes:
        datasets: what it puts together, in the structure of its elements.
    """

    datasets: object

    def parts(self, element: object) -> list:
        """What each of the datasets has given of an element."""
        return nest.flatten_up_to(self.datasets, element)

    def packed(self, parts: Sequence) -> object:
        """The element, from what each of the datasets has given; or the structure, of other datasets."""
        return nest.pack_sequence_as(self.datasets, list(parts))


Stage = Counted | Options | Map | Batch


def stage_of(dataset: tf.data.Dataset) -> tuple[Stage, tf.data.Dataset] | None:
    """The last stage of a dataset, and the dataset that it reads; None for stages that are not described here."""
    kind = type(dataset)
    if kind in _COUNTS:
        name, attribute = _COUNTS[kind]
        number = _number(getattr(dataset, attribute))
        stage = None if number is None else Counted(name, number)
    elif kind is dataset_ops._OptionsDataset:
        stage = Options()
    elif kind in (map_op._MapDataset, map_op._ParallelMapDataset):
        stage = _map_of(dataset)
    elif kind in (batch_op._BatchDataset, batch_op._ParallelBatchDataset, padded_batch_op._PaddedBatchDataset):
        stage = _batch_of(dataset)
    else:
        stage = None
    return None if stage is None else (stage, dataset._input_dataset)


def zip_of(dataset: tf.data.Dataset) -> Zip | None:
    """What a dataset puts together; None if it is not `Dataset.zip`."""
    return Zip(dataset._datasets) if type(dataset) is zip_op._ZipDataset else None


def name_of(dataset: tf.data.Dataset) -> str:
    """A stage's name, such as `shuffle` or `from_generator`, from its class.

    Example:
        >>> name_of(tf.data.Dataset.range(3).shuffle(3)), name_of(tf.data.Dataset.range(3).batch(2))
        ('shuffle', 'batch')
    """
    name = snake_case(re.sub(r"Dataset(V\d)?$", "", type(dataset).__name__).strip("_")).removeprefix("parallel_")
    sources = {"tensor_slice": "from_tensor_slices", "tensor": "from_tensors", "generator": "from_generator"}
    return sources.get(name, name)


def flat(structure: object) -> list:
    """The leaves of a structure as tf.data sees it: a list is a leaf."""
    return nest.flatten(structure)


def flat_up_to(shallow: object, given: object) -> list:
    """What `given` has in the places of another structure's leaves.

    Raises:
        TypeError, ValueError: it does not have that structure.
    """
    return nest.flatten_up_to(shallow, given)


def packed(structure: object, leaves: Sequence) -> object:
    """Leaves in a structure."""
    return nest.pack_sequence_as(structure, list(leaves))


def snake_case(name: str) -> str:
    """A name as Python writes it.

    Example:
        >>> snake_case("ParallelMap")
        'parallel_map'
    """
    return re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()


@dataclass(frozen=True)
class StageCost:
    """What TensorFlow has measured of a stage of a running iterator.

    Attributes:
        name: the stage's, such as `ParallelMapV2`.
        seconds: that it has taken, without those of the stages that it reads from; of all threads together.
        inputs: numbers of the stages that it reads from.
    """

    name: str
    seconds: float
    inputs: tuple[int, ...]


def costs_of(iterator: tf.data.Iterator) -> tuple[dict[int, StageCost], int]:
    """What the stages of an iterator have cost, by number, and the last stage's number; nothing if that is unknown."""
    try:
        model = tf.data.experimental.get_model_proto(iterator)
    except (tf.errors.OpError, ValueError):  # its options switch autotuning off
        return {}, 0
    found = {at: StageCost(n.name, 1e-9 * n.processing_time, tuple(n.inputs)) for at, n in model.nodes.items()}
    return found, model.output


def ends_with_prefetch(dataset: tf.data.Dataset) -> bool:
    """Whether a dataset's last stage, but for options, is `prefetch`."""
    while isinstance(dataset, dataset_ops._OptionsDataset):
        (dataset,) = dataset._inputs()
    return isinstance(dataset, prefetch_op._PrefetchDataset)


def is_in_debug_mode() -> bool:
    """Whether `tf.data.experimental.enable_debug_mode` was called: functions run in Python, and stages are changed."""
    return debug_mode.DEBUG_MODE


def is_callable_anew(function: ConcreteFunction) -> bool:
    """Whether `imported` can make a function again: it captures by value, and calls no others but TensorFlow's own."""
    return isinstance(function.graph, FuncGraph) and not function.graph.deferred_external_captures


def imported(function: ConcreteFunction) -> Callable[[Sequence[tf.Tensor]], Sequence[tf.Tensor]]:
    """The operations of a function, to be added to the graph that calls them: of tensors of other shapes, too.

    TensorFlow infers the shapes again. Python code is not run again.

    Args:
        function: for which `is_callable_anew` holds.
    """
    graph = function.graph
    inner = [internal for _, internal in graph.captures]
    given = [tensor for tensor in graph.inputs if not any(tensor is each for each in inner)]
    definition = graph.as_graph_def()
    placeholders = {tensor.op.name for tensor in graph.inputs}
    kept = [node for node in definition.node if node.name not in placeholders]
    del definition.node[:]
    definition.node.extend(kept)

    outputs = [tensor.name for tensor in graph.outputs]
    read = {each if ":" in each else f"{each}:0" for node in kept for each in node.input}  # tensors, by their names

    def call(tensors: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        here = tf.compat.v1.get_default_graph()
        values = {tensor.name: value for tensor, value in zip(given, tensors, strict=True)}
        values |= {internal.name: here.capture(external) for external, internal in graph.captures}
        made = [name for name in outputs if name not in values]
        mapped = {name: value for name, value in values.items() if name in read}
        found = tf.graph_util.import_graph_def(definition, mapped, made, name="stage")
        values |= dict(zip(made, found, strict=True))
        return [values[name] for name in outputs]

    return call


def _number(tensor: tf.Tensor) -> int | None:
    found = tf.get_static_value(tensor)
    return None if found is None else int(found)


def _map_of(dataset: tf.data.Dataset) -> Map | None:
    function, calls = dataset._map_func.function, getattr(dataset, "_num_parallel_calls", None)
    number = None if calls is None else _number(calls)
    if not isinstance(function, ConcreteFunction) or (calls is not None and number is None):
        return None
    return Map(function, dataset._input_dataset.element_spec, dataset.element_spec, number)


def _batch_of(dataset: tf.data.Dataset) -> Batch | None:
    rows, drop = _number(dataset._batch_size), tf.get_static_value(dataset._drop_remainder)
    calls = getattr(dataset, "_num_parallel_calls", None)
    number = None if calls is None else _number(calls)
    if rows is None or drop is None or (calls is not None and number is None):
        return None
    padding = None
    if isinstance(dataset, padded_batch_op._PaddedBatchDataset):
        shapes = tf.nest.map_structure(tf.get_static_value, dataset._padded_shapes)
        if any(shape is None or (shape < 0).any() for shape in tf.nest.flatten(shapes)):
            return None  # the longest row of the batch decides
        padding = tf.nest.map_structure(lambda shape: tf.TensorShape(shape.tolist()), shapes), dataset._padding_values
    return Batch(rows, bool(drop), number, padding)


@contextlib.contextmanager
def without_elements(iterators: Iterable[tf.data.Iterator], instead: Callable) -> Iterator[None]:
    """Inside the block, who asks one of these iterators for its next element calls `instead`."""
    found = [each for each in iterators if hasattr(each, "_next_internal")]
    for each in found:
        vars(each)["_next_internal"] = instead
    try:
        yield
    finally:
        for each in found:
            del vars(each)["_next_internal"]
