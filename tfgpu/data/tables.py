"""CSV and Parquet files, read with Arrow: one column is the label, the others are numbers.

    iris.csv                 the label is the column `label`, `class`, `target` or `y`
    iris.csv#species         the label is the column `species`
    parquet:tables/*.part    the format of files with another extension

Examples are the other columns in order: numbers, and lists of numbers of one length. They become float32. Labels are
whole numbers from 0, booleans, or strings, which are sorted into classes. A glob or a folder of files is one source;
files named `train...`, `validation...` and `test...` are its splits.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from tfgpu.data.decoding import Reading, check_unsized
from tfgpu.data.examples import Examples
from tfgpu.data.names import SourceName
from tfgpu.data.records import find, parts_of
from tfgpu.data.spool import keep_rows
from tfgpu.errors import InputError, MachineError, unknown

LABELS = ("label", "class", "target", "y")
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
    label = label_column(tables[0].path, tables[0].schema.names, source.label)
    for table in tables:
        table.check(label, tables[0])
    parts = {part: _rows([tables[i] for i in numbers]) for part, numbers in parts_of(paths).items()}
    return keep_rows(parts, name=name, reading=reading)


def _arrow():
    try:
        import pyarrow
    except ImportError as error:
        raise MachineError("CSV and Parquet sources need pyarrow. Run: pip install 'tfgpu[arrow]'") from error
    return pyarrow


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


def _rows(tables: list["_Table"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for table in tables:
        yield from table.rows()


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

    def check(self, label: str, first: "_Table") -> None:
        """Rejects a table whose columns differ from the first table's or are not numeric."""
        types = _arrow().types
        if self.schema.names != first.schema.names:
            raise InputError(
                f"{self.path} and {first.path} have different columns. Received: {', '.join(self.schema.names[:20])}; "
                f"expected {', '.join(first.schema.names[:20])}."
            )
        self._label = label
        self._features = [name for name in self.schema.names if name != label]
        if not self._features:
            raise InputError(f"{self.path} has only the label column {label!r}. Add columns of numbers.")
        others = {name: self.schema.field(name).type for name in self._features}
        others = {name: kind for name, kind in others.items() if not _is_numbers(types, kind)}
        if others:
            listed = ", ".join(f"{name!r} ({kind})" for name, kind in list(others.items())[:5])
            raise InputError(
                f"{self.path}: {len(others)} column(s) are not numeric: {listed}. Encode them as numbers, or "
                f"remove them from the file. The label is {label!r}."
            )

    def rows(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the rows in chunks of features, float32 [rows, features], and labels."""
        first = 0
        with self._told(), self._batches() as batches:
            for batch in batches:
                if len(batch):
                    x = [self._numbers(batch.column(name), name, first) for name in self._features]
                    yield np.concatenate(x, axis=1), self._labels(batch.column(self._label), first)
                first += len(batch)

    @contextlib.contextmanager
    def _batches(self):
        if self._kind == "parquet":
            from pyarrow import parquet

            with parquet.ParquetFile(self.path) as file:
                yield file.iter_batches(_ROWS, columns=[*self._features, self._label])
        else:
            arrow, kinds = _arrow(), {name: self.schema.field(name).type for name in self._features}
            # Arrow infers types from the first rows, which may hold only whole numbers, or none.
            types = {name: arrow.float32() for name, kind in kinds.items() if not arrow.types.is_boolean(kind)}
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
            if len(values) % count or np.unique(np.diff(_starts(column))).size > 1:
                raise InputError(f"{self.path}: the lists in column {name!r} must have one length.")
            column = values
        if arrow.types.is_decimal(column.type):
            column = column.cast(arrow.float64())
        return column.cast(arrow.float32(), safe=False).to_numpy(zero_copy_only=False).reshape(count, -1)

    def _labels(self, column, first: int) -> np.ndarray:
        types = _arrow().types
        self._check_whole(column, self._label, first)
        if types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if not (types.is_string(column.type) or types.is_large_string(column.type) or _is_number(types, column.type)):
            raise InputError(
                f"{self.path}: labels must be whole numbers or strings. Received: {column.type} in {self._label!r}."
            )
        return column.to_numpy(zero_copy_only=False)

    def _check_whole(self, column, name: str, first: int) -> None:
        if column.null_count:
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
            raise InputError(
                f"{self.path}: column {name!r} has {column.null_count} missing value(s), the first in data row "
                f"{first + row}. Fill them in, or remove these rows."
            )

    @contextlib.contextmanager
    def _told(self):
        try:
            yield
        except (_arrow().ArrowException, OSError) as error:
            message = " ".join(str(error).split())[:300]
            raise InputError(f"Cannot read {self.path} as {self._kind}: {message}.") from error


def _starts(column) -> np.ndarray:
    if hasattr(column, "offsets"):
        return column.offsets.to_numpy()
    return np.arange(len(column) + 1) * column.type.list_size


def _is_numbers(types, kind) -> bool:
    if types.is_list(kind) or types.is_fixed_size_list(kind):
        kind = kind.value_type
    return _is_number(types, kind) or types.is_null(kind)


def _is_number(types, kind) -> bool:
    return types.is_integer(kind) or types.is_floating(kind) or types.is_boolean(kind) or types.is_decimal(kind)
