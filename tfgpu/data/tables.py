"""CSV and Parquet files, read with Arrow: one or more columns are what the model learns, the others are numbers.

    iris.csv                 the label is the column `label`, `class`, `target` or `y`
    iris.csv#species         the label is the column `species`
    homes.csv#kind,price     named targets, a column each
    parquet:tables/*.part    the format of files with another extension

Examples are the other columns in order: numbers, and lists of numbers of one length. They become float32. Labels are
whole numbers from 0, booleans, strings, which are sorted into classes, or numbers to predict (floats, or lists of one
length). The column `sample_weight` weighs the examples. A glob or a folder of files is one source; files named
`train...`, `validation...` and `test...` are its splits.
"""

import contextlib
import csv
import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfgpu.data.decoding import Reading, check_unsized
from tfgpu.data.examples import Examples
from tfgpu.data.names import SourceName
from tfgpu.data.records import find, parts_of
from tfgpu.data.spool import keep_rows
from tfgpu.data.structure.arrays import number_of
from tfgpu.data.structure.opening import open_structured
from tfgpu.errors import InputError, MachineError, required, unknown

LABELS = ("label", "class", "target", "y")
WEIGHT = "sample_weight"
_ROWS = 1 << 14  # rows per conversion
_CSV_BLOCK = 1 << 22


def open_tables(source: SourceName, reading: Reading) -> Examples:
    """Reads CSV or Parquet files; rows that do not fit in memory are spooled to a temporary file.

    Args:
        source: kind, path and label, as returned by `names.parse_source`.
        reading: how much to keep in memory.

    Returns:
        float32 examples, ordered by file name and row.

    Raises:
        InputError: no such file or column, text or missing values in numeric columns, a damaged file.
        MachineError: pyarrow is not installed.
    """
    _arrow()
    paths = find(source.value, end=f".{source.kind}")
    name = Path(source.value).name
    check_unsized(name, reading.image_size)
    tables = [_Table(path, source.kind) for path in paths]
    labels = label_columns(tables[0].path, tables[0].schema.names, source.label)
    for table in tables:
        table.check(labels, tables[0])
    chunks = itertools.chain.from_iterable
    parts = {part: chunks(tables[i].rows() for i in numbers) for part, numbers in parts_of(paths).items()}
    if len(labels) == 1 and WEIGHT not in tables[0].schema.names:
        single = {part: ((x, y[0]) for x, y, _ in rows) for part, rows in parts.items()}
        return keep_rows(single, name=name, reading=reading)
    is_whole = _arrow().types.is_integer
    classes = [all(is_whole(table.schema.field(label).type) for table in tables) for label in labels]
    whole = {part: _whole(rows, dict(zip(labels, classes, strict=True)), name, reading) for part, rows in parts.items()}
    return open_structured(whole, name=name, reading=reading)


def _whole(rows: Iterator, labels: dict[str, bool], name: str, reading: Reading) -> tuple:
    """A split's rows as arrays: examples, the label or the labels by name, and weights, if any.

    Args:
        labels: for each label, whether the tables hold integers, which are read as floats (see `_Table`).
    """
    chunks, size = [], 0
    for x, y, weight in rows:
        chunks.append((x, y, weight))
        size += x.nbytes + sum(each.nbytes for each in y)
        if size > reading.memory_bytes:
            raise InputError(
                f"{name}: tables with several targets or sample weights are kept in memory, and this one does not fit "
                f"in memory_bytes={reading.memory_bytes}. Increase it (--memory-bytes)."
            )
    if not chunks:
        raise InputError(f"{name} has no examples. Provide at least one example and its label.")
    xs, ys, weights = zip(*chunks, strict=True)
    y = [np.concatenate(each) for each in zip(*ys, strict=True)]
    for at, is_whole in enumerate(labels.values()):
        if is_whole and np.all(y[at] == np.floor(y[at])):
            y[at] = y[at].astype(np.int64)
    weight = [] if weights[0] is None else [np.concatenate(weights)]
    return (np.concatenate(xs), y[0] if len(labels) == 1 else dict(zip(labels, y, strict=True)), *weight)


def _arrow():
    need, fix = "CSV and Parquet sources need pyarrow", "Run: pip install 'tfgpu[arrow]'"
    return required("pyarrow", need, fix, MachineError)


def label_column(path: Path, columns: list[str], asked: str | None) -> str:
    """Finds a table's label column.

    Args:
        path: the file, for errors.
        columns: the column names.
        asked: the label given by the user, or None.

    Raises:
        InputError: there is no such column.
    """
    if asked is not None:
        if asked not in columns:
            raise unknown(f"column of {path}", asked, columns)
        return asked
    found = next((name for name in LABELS if name in columns), None)
    if found is None:
        raise InputError(
            f"{path} has no column {', '.join(LABELS[:-1])} or y. Received: {', '.join(columns[:20])}. "
            f"Name the label column after a #: '{path}#{columns[-1]}'. (The first line of a file has the column names.)"
        )
    return found


def label_columns(path: Path, columns: list[str], asked: str | None) -> list[str]:
    """Finds a table's label columns: one, or several with commas between them.

    Args:
        path, columns, asked: as for `label_column`.

    Raises:
        InputError: there is no such column, or one is named twice.

    Example:
        >>> label_columns(Path("homes.csv"), ["rooms", "kind", "price"], "kind,price")
        ['kind', 'price']
    """
    if asked is None or asked in columns or "," not in asked:
        return [label_column(path, columns, asked)]
    names = [name.strip() for name in asked.split(",")]
    if len(set(names)) < len(names):
        raise InputError(f"Each label column of {path} must be named once. Received: {asked!r}.")
    return [label_column(path, columns, name) for name in names]


def read_columns(path: Path, kind: str) -> dict[str, list]:
    """Reads a whole table: each column's values as Python objects, None for missing ones.

    Raises:
        InputError: a damaged file.
        MachineError: pyarrow is not installed.
    """
    arrow = _arrow()
    try:
        if kind == "parquet":
            from pyarrow import parquet

            table = parquet.read_table(path)
        else:
            from pyarrow import csv

            lines, kinds = csv.ParseOptions(newlines_in_values=True), csv.ConvertOptions(strings_can_be_null=True)
            table = csv.read_csv(path, parse_options=lines, convert_options=kinds)
    except (arrow.ArrowException, OSError) as error:
        message = " ".join(str(error).split())[:300]
        raise InputError(f"Cannot read {path} as {kind}: {message}.") from error
    return {name: table.column(name).to_pylist() for name in table.column_names}


def place_of(path: Path, kind: str, row: int) -> str:
    """Where a row of a table is, for an error: a line of a CSV file, as an editor counts it, or a row as pandas does.

    Args:
        path: the file.
        kind: `csv` or `parquet`.
        row: number of the row, from 0, without the line of names and empty lines.
    """
    if kind == "csv":
        with (
            contextlib.suppress(OSError, csv.Error),
            open(path, newline="", encoding="utf-8", errors="replace") as file,
        ):
            reader, begins, at = csv.reader(file), 1, -1  # the line of names
            for cells in reader:
                if cells and at == row:
                    return f"line {begins}"
                begins, at = reader.line_num + 1, at + bool(cells)
    return f"row {row} (the first is 0)"


class _Table:
    """One file: its columns, and its rows as arrays."""

    def __init__(self, path: Path, kind: str):
        self.path, self._kind = path, kind
        with self._told():
            if kind == "parquet":
                from pyarrow import parquet

                self.schema = parquet.read_schema(path)
            else:
                with self._open_csv() as file:
                    self.schema = file.schema

    def check(self, labels: list[str], first: "_Table") -> None:
        """Rejects a table whose columns differ from the first table's or are not numeric."""
        types = _arrow().types
        if self.schema.names != first.schema.names:
            raise InputError(
                f"{self.path} and {first.path} have different columns. Received: {', '.join(self.schema.names[:20])}; "
                f"expected {', '.join(first.schema.names[:20])}."
            )
        self._labels = labels
        self._weight = [name for name in (WEIGHT,) if name in self.schema.names and name not in labels]
        self._features = [name for name in self.schema.names if name not in (*labels, *self._weight)]
        if not self._features:
            raise InputError(f"{self.path} has only the label column {', '.join(labels)!r}. Add columns of numbers.")
        others = {name: self.schema.field(name).type for name in (*self._features, *self._weight)}
        others = {name: kind for name, kind in others.items() if not _is_numbers(types, kind)}
        if others:
            listed = ", ".join(f"{name!r} ({kind})" for name, kind in list(others.items())[:5])
            raise InputError(
                f"{self.path}: {len(others)} column(s) are not numeric: {listed}.{self._first_text(others)} Encode "
                f"them as numbers, or remove them from the file. The label is {', '.join(labels)!r}."
            )

    def _first_text(self, names) -> str:
        """Says where the first text in one of the columns of a CSV file is; empty if it is not known."""
        if self._kind != "csv":
            return ""
        for name in names:
            row = 0
            with contextlib.suppress(_arrow().ArrowException), self._open_csv({name: _arrow().string()}) as file:
                for batch in file:
                    values = batch.column(name).to_pylist()
                    found = next((at for at, v in enumerate(values) if v is not None and np.isnan(number_of(v))), None)
                    if found is not None:
                        return (
                            f" Column {name!r} has {values[found]!r} in {place_of(self.path, self._kind, row + found)}."
                        )
                    row += len(values)
        return ""

    def rows(self) -> Iterator[tuple[np.ndarray, list[np.ndarray], np.ndarray | None]]:
        """Yields the rows in chunks: features, float32 [rows, features]; each label; and sample weights, or None."""
        first = 0
        with self._told(), self._batches() as batches:
            for batch in batches:
                if len(batch):
                    x = [self._numbers(batch.column(name), name, first) for name in self._features]
                    y = [self._label(batch.column(name), name, first) for name in self._labels]
                    weight = [self._numbers(batch.column(name), name, first)[:, 0] for name in self._weight]
                    yield np.concatenate(x, axis=1), y, *(weight or [None])
                first += len(batch)

    @contextlib.contextmanager
    def _batches(self):
        if self._kind == "parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(self.path) as file:
                yield file.iter_batches(_ROWS, columns=[*self._features, *self._labels, *self._weight])
        else:
            arrow, kinds = _arrow(), {name: self.schema.field(name).type for name in self.schema.names}
            # Arrow infers types from the first rows, which may hold only whole numbers, or none.
            numeric = [*self._features, *self._weight]
            types = {name: arrow.float32() for name in numeric if not arrow.types.is_boolean(kinds[name])}
            types |= {name: arrow.float64() for name in self._labels if arrow.types.is_integer(kinds[name])}
            with self._open_csv(types) as file:
                yield file

    def _open_csv(self, types=None):
        from pyarrow import csv

        options = csv.ConvertOptions(column_types=types, strings_can_be_null=True)
        return csv.open_csv(self.path, csv.ReadOptions(block_size=_CSV_BLOCK), convert_options=options)

    def _numbers(self, column, name: str, first: int) -> np.ndarray:
        arrow = _arrow()
        self._check_whole(column, name, first)
        count = len(column)
        if arrow.types.is_fixed_size_list(column.type) or arrow.types.is_list(column.type):
            values = column.flatten()
            self._check_whole(values, name, first)
            starts = column.offsets.to_numpy() if hasattr(column, "offsets") else ()  # else all have one size
            if len(values) % count or np.unique(np.diff(starts)).size > 1:
                raise InputError(f"{self.path}: the lists in column {name!r} must have one length.")
            column = values
        if arrow.types.is_decimal(column.type):
            column = column.cast(arrow.float64())
        return column.cast(arrow.float32(), safe=False).to_numpy(zero_copy_only=False).reshape(count, -1)

    def _label(self, column, name: str, first: int) -> np.ndarray:
        types = _arrow().types
        self._check_whole(column, name, first)
        if types.is_list(column.type) or types.is_fixed_size_list(column.type):
            return self._numbers(column, name, first)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not (types.is_string(column.type) or types.is_large_string(column.type) or _is_number(types, column.type)):
            raise InputError(
                f"{self.path}: labels must be whole numbers or strings. Received: {column.type} in {name!r}."
            )
        return column.to_numpy(zero_copy_only=False)

    def _check_whole(self, column, name: str, first: int) -> None:
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(
                f"{self.path}: column {name!r} has {column.null_count} missing value(s), the first in "
                f"{place_of(self.path, self._kind, first + row)}. Fill them in, or remove these rows."
            )

    @contextlib.contextmanager
    def _told(self):
        try:
            yield
        except (_arrow().ArrowException, OSError) as error:
            message = " ".join(str(error).split())[:300]
            numeric = [*getattr(self, "_features", ()), *getattr(self, "_weight", ()), *getattr(self, "_labels", ())]
            where = self._first_text(numeric) if "conversion error" in message else ""
            raise InputError(f"Cannot read {self.path} as {self._kind}: {message}.{where}") from error


def _is_numbers(types, kind) -> bool:
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return _is_number(types, kind) or types.is_null(kind)


def _is_number(types, kind) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
