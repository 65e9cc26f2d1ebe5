"""A worker's share of data that Spark holds, as batches for `model.fit`.

Spark's partitions reach the worker as Arrow record batches, which go to a file on the executor's disk. The file is
mapped into memory, so it may be larger than memory, and batches may be read in any order.
"""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tfgpu.errors import InputError, MachineError, required, unknown
from tfgpu.launch.spark.frame import RowAssignment

Columns = str | Sequence[str] | Mapping[str, object]


@dataclass(frozen=True)
class SparkData:
    """The first argument of the function that `spark_job` runs.

    Attributes:
        assignment: which rows each worker gets.
        rank: this worker's number.
        path: the Arrow file with this worker's rows, in their order.
    """

    assignment: RowAssignment
    rank: int
    path: str

    @property
    def rows(self) -> int:
        """Rows of the whole data frame."""
        return self.assignment.rows

    @property
    def steps(self) -> int:
        """Batches of an epoch, the same for all workers."""
        return self.assignment.batches

    def batches(
        self,
        features: Columns,
        label: str | None = None,
        *,
        strategy=None,
        weight: str | None = None,
        prepare: Callable | None = None,
        seed: int | None = None,
    ):
        """Makes the dataset for `model.fit`: each worker reads its own rows, and each row is read once per epoch.

        Floating-point numbers become float32; integers, booleans, strings and bytes keep their types. A column of
        lists, all of one length, becomes a dimension.

        Args:
            features: a column, or a list of columns to concatenate as float32, or, for a model with named inputs, a
                mapping from each input to one of these.
            label: the column to predict.
            strategy: the strategy under which the model was made.
            weight: the column with the sample weights.
            prepare: a function from `(x, y)` (or `(x,)`, or `(x, y, weight)`) to such a tuple, for tf.data's `map`:
                one that decodes images, say. It sees some rows of a batch and must keep their number and order.
            seed: shuffles the batches in each epoch, in the same order on all workers; None keeps Spark's order.

        Returns:
            A distributed dataset if there are several workers; else a `tf.data.Dataset` of whole batches.

        Raises:
            InputError: a column does not exist or is not numeric, or the strategy is not the job's.

        Example:
            model.fit(data.batches(["x0", "x1"], "y", strategy=strategy), epochs=3)
        """
        import tensorflow as tf

        from tfgpu.core import replication

        reader = _Reader(self, (features, label, weight))
        numbers = tf.data.Dataset.range(self.steps)
        if seed is not None:
            numbers = numbers.shuffle(self.steps, seed=seed, reshuffle_each_iteration=True)
        if strategy is None or not replication.spans_processes(strategy):
            if self.assignment.workers > 1:
                why = f"This job has {self.assignment.workers} workers: pass the model's strategy to `batches`."
                raise InputError(f"{why} It must be a multi-worker strategy. Received: strategy={strategy!r}.")
            return numbers.map(reader.whole(prepare), tf.data.AUTOTUNE).prefetch(tf.data.AUTOTUNE)
        devices = len(strategy.extended.worker_devices)
        if devices != self.assignment.devices:
            raise InputError(
                f"The strategy uses {devices} devices of each worker; the rows were split for "
                f"{self.assignment.devices}. Give `spark_job` gpus_per_worker={devices}."
            )

        def of_worker(_):
            own = tf.data.Dataset.from_tensor_slices([int(at) for at in self.assignment.pieces_of(self.rank)])
            pairs = numbers.flat_map(lambda batch: own.map(lambda at: (batch, tf.cast(at, tf.int64))))
            pieces = pairs.map(reader.piece(prepare), tf.data.AUTOTUNE, deterministic=True)
            if devices == 1:  # Keras takes it for the number of steps, but it counts one per device
                pieces = pieces.apply(tf.data.experimental.assert_cardinality(self.steps))
            return pieces.prefetch(tf.data.AUTOTUNE)

        return strategy.distribute_datasets_from_function(of_worker)


class _Reader:
    """Reads rows of the Arrow file by position, as tensors."""

    def __init__(self, data: SparkData, parts: tuple):
        self._assignment, self._rank = data.assignment, data.rank
        self._table = _Table(data.path)
        self._parts = tuple(planned(part, self._table.names) for part in parts if part is not None)
        self._like = self._arrays(0, 1)

    def whole(self, prepare: Callable | None) -> Callable:
        """The function for tf.data from a batch's number to its rows."""
        import tensorflow as tf

        def read(number):
            batch = self._tensors(self._batch, number)
            return batch if prepare is None else prepare(*batch)

        return tf.autograph.experimental.do_not_convert(read)

    def piece(self, prepare: Callable | None) -> Callable:
        """The function for tf.data from the numbers of a batch and a piece to the `ReplicaBatch`."""
        import tensorflow as tf

        from tfgpu.core.batch_sharding import ReplicaBatch

        def read(batch, at):
            rows = self._tensors(self._piece, batch, at)
            place = tf.numpy_function(self._place, [batch, at], [tf.int32] * 3, stateful=False)
            for number in place:
                number.set_shape([])
            return ReplicaBatch(rows if prepare is None else prepare(*rows), *place)

        return tf.autograph.experimental.do_not_convert(read)

    def _tensors(self, read: Callable, *numbers):
        import tensorflow as tf

        leaves = tf.nest.flatten(self._like)
        types = [tf.as_dtype(leaf.dtype) if leaf.dtype != object else tf.string for leaf in leaves]
        found = tf.numpy_function(lambda *at: tf.nest.flatten(read(*map(int, at))), numbers, types, stateful=False)
        for tensor, leaf in zip(found, leaves, strict=True):
            tensor.set_shape([None, *leaf.shape[1:]])
        return tf.nest.pack_sequence_as(self._like, found)

    def _batch(self, number: int):
        return self._arrays(number * self._assignment.global_batch, self._assignment.size(number))

    def _piece(self, batch: int, at: int):
        """The rows of a piece; if it is empty, this worker's first row stands in."""
        before = [p for p in self._assignment.pieces_of(self._rank) if p < at]
        first = self._assignment.rows_of(self._rank, batch) + sum(self._assignment.piece(batch, p)[1] for p in before)
        count = self._assignment.piece(batch, at)[1]
        return self._arrays(first, count) if count else self._arrays(0, 1)

    def _place(self, batch, at):
        import numpy as np

        first, count = self._assignment.piece(int(batch), int(at))
        offset = first - int(batch) * self._assignment.global_batch if count else 0
        return tuple(np.array(v, np.int32) for v in (count, offset, self._assignment.size(int(batch))))

    def _arrays(self, first: int, count: int) -> tuple:
        columns = self._table.rows(first, count)
        return tuple(arrays_of(part, columns) for part in self._parts)


class _Table:
    """The record batches of a memory-mapped Arrow file."""

    def __init__(self, path: str):
        arrow = pyarrow()
        self._file = arrow.ipc.open_file(arrow.memory_map(path))
        self.names = self._file.schema.names
        self._starts = [0]
        for at in range(self._file.num_record_batches):
            self._starts.append(self._starts[-1] + self._file.get_batch(at).num_rows)

    def rows(self, first: int, count: int):
        """Returns `count` rows from position `first` as an Arrow table."""
        at, found, end = bisect.bisect_right(self._starts, first) - 1, [], first + count
        while at + 1 < len(self._starts) and self._starts[at] < end:
            start = self._starts[at]
            low = max(first - start, 0)
            found.append(self._file.get_batch(at).slice(low, min(end - start, self._starts[at + 1] - start) - low))
            at += 1
        return pyarrow().Table.from_batches(found, self._file.schema)


def spool(batches: Iterable, folder: Path) -> tuple[Path, int]:
    """Writes record batches to an Arrow file, one after another.

    Args:
        batches: `pyarrow.RecordBatch` objects; only one at a time is in memory.
        folder: where the file goes.

    Returns:
        The file, and its number of rows.

    Raises:
        MachineError: the disk is full or not writable.
    """
    arrow, path, rows, writer = pyarrow(), folder / "rows.arrow", 0, None
    try:
        for batch in batches:
            writer = writer or arrow.ipc.new_file(path, batch.schema)
            writer.write_batch(batch)
            rows += batch.num_rows
        if writer is not None:
            writer.close()
    except OSError as error:
        why = f"Cannot keep this worker's rows in {folder}: {error}."
        raise MachineError(f"{why} Set `spark.local.dir` to a larger disk, or use more workers.") from error
    return path, rows


def pyarrow():
    """The module, which Spark also needs wherever Python receives Arrow data."""
    need, fix = "Spark's data needs pyarrow", "Run on all machines: pip install 'tfgpu[spark]'"
    required("pyarrow.ipc", need, fix)
    return required("pyarrow", need, fix)


def planned(part: Columns, names: Sequence[str]):
    """Checks what a model gets: a column's name, a list of names to concatenate, or a dictionary of these.

    Raises:
        InputError: a column does not exist.
    """
    if isinstance(part, Mapping):
        return {name: planned(value, names) for name, value in part.items()}
    for name in [part] if isinstance(part, str) else part:
        if name not in names:
            raise unknown("column", name, names)
    return part if isinstance(part, str) else list(part)


def arrays_of(part, columns):
    """The arrays for a plan that `planned` returned.

    Args:
        part: what `planned` returned.
        columns: `pyarrow.Table`.

    Returns:
        A NumPy array of shape `[rows, ...]`, or a dictionary of them.

    Raises:
        InputError: values are missing, or are not numbers where numbers are needed.
    """
    import numpy as np

    if isinstance(part, dict):
        return {name: arrays_of(value, columns) for name, value in part.items()}
    if isinstance(part, str):
        return to_array(columns[part], part)
    arrays = [to_array(columns[name], name) for name in part]
    for name, array in zip(part, arrays, strict=True):
        if array.dtype == object:
            why = f"Column {name!r} holds strings, which cannot be combined with numbers."
            raise InputError(f"{why} Pass it separately.")
    flat = [array.reshape(len(array), -1).astype(np.float32) for array in arrays]
    return np.concatenate(flat, axis=1)


def to_array(column, name: str):
    """An Arrow column as a NumPy array of shape `[rows, ...]`.

    Args:
        column: `pyarrow.ChunkedArray` or `Array` of numbers, booleans, strings, bytes, or number lists of one length.
        name: its name in error messages.

    Raises:
        InputError: values are missing, lists differ in length, or the type is unsupported.
    """
    import numpy as np

    arrow = pyarrow()
    values, shape = _without_lists(column, name)
    kind = values.type
    if arrow.types.is_decimal(kind):
        values, kind = values.cast(arrow.float64()), arrow.float64()
    if arrow.types.is_string(kind) or arrow.types.is_large_string(kind):
        return np.array([text.encode() for text in values.to_pylist()], object).reshape(shape)
    if arrow.types.is_binary(kind) or arrow.types.is_large_binary(kind):
        return np.array(values.to_pylist(), object).reshape(shape)
    if not (arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind)):
        why = f"Column {name!r} has the type {kind}. Expected numbers, booleans, strings, bytes, or lists of numbers."
        raise InputError(f"{why} Convert a Spark ML vector with `pyspark.ml.functions.vector_to_array`.")
    array = values.to_numpy(zero_copy_only=False).reshape(shape)
    return array.astype(np.float32) if array.dtype.kind == "f" else array


def _without_lists(column, name: str) -> tuple:
    """The values of a column of lists, however deep, in one array, and its shape."""
    import numpy as np

    arrow = pyarrow()
    values, shape = column.combine_chunks() if isinstance(column, arrow.ChunkedArray) else column, [len(column)]
    if isinstance(values, arrow.ChunkedArray):  # no chunks
        values = arrow.array([], values.type)
    while True:
        if values.null_count:
            raise InputError(f"Column {name!r} has {values.null_count} missing value(s). Fill them or drop the rows.")
        if not arrow.types.is_list(values.type) and not arrow.types.is_large_list(values.type):
            return values, shape
        lengths = np.unique(np.diff(values.offsets.to_numpy()))
        if len(lengths) > 1:
            why = f"The lists in column {name!r} must have the same length."
            raise InputError(f"{why} Received: {lengths[0]} to {lengths[-1]}.")
        shape.append(int(lengths[0]) if len(lengths) else 0)
        values = values.flatten()
