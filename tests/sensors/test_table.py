import os
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgpu.sensors.table import Table, last, read


@pytest.fixture
def path(tmp_path):
    return tmp_path / "deep/table.csv"


def test_rows_are_there_as_soon_as_they_are_appended(path):
    table = Table(path)
    table.append({"a": 1, "b": 0.5, "why": "the cores, busy"})
    assert read(path) == [{"a": 1.0, "b": 0.5, "why": "the cores, busy"}]
    table.append({"a": 2, "b": None, "why": 'a "word"\nand a line'})
    assert read(path)[1] == {"a": 2.0, "b": None, "why": 'a "word" and a line'}
    assert os.listdir(path.parent) == ["table.csv"]


def test_an_existing_table_is_continued(path):
    Table(path).append({"a": 1, "b": 2})
    Table(path).append({"b": 3, "a": 4})
    assert read(path) == [{"a": 1.0, "b": 2.0}, {"a": 4.0, "b": 3.0}]


def test_half_a_row_of_a_killed_process_is_removed(path):
    Table(path).append({"a": 1, "b": 2})
    with path.open("a") as file:
        file.write("7,8")
    assert read(path) == [{"a": 1.0, "b": 2.0}] == last(path, 5)
    Table(path).append({"a": 3, "b": 4})
    assert [row["a"] for row in read(path)] == [1.0, 3.0]


def test_a_new_column_keeps_the_rows(path):
    table = Table(path)
    table.append({"a": 1})
    table.append({"a": 2, "gpu0_power_w": 70.0})
    table.append({"a": 3})
    assert read(path) == [
        {"a": 1.0, "gpu0_power_w": None},
        {"a": 2.0, "gpu0_power_w": 70.0},
        {"a": 3.0, "gpu0_power_w": None},
    ]


def test_only_the_end_of_a_long_table_is_read(path):
    table = Table(path)
    for number in range(4000):
        table.append({"number": number, "text": "x" * 100})
    assert [row["number"] for row in last(path, 3)] == [3997.0, 3998.0, 3999.0]
    assert [row["number"] for row in last(path, 3)] == [row["number"] for row in read(path)[-3:]]


FULL = """
import resource, sys
from tfgpu.sensors.table import Table, read
table = Table(sys.argv[1])
table.append({"a": 1, "text": "x" * 400})
table.append({"a": 2, "text": "x" * 400})
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    table.append({"a": 3, "text": "y" * 400})
except OSError as error:
    print(error.strerror)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
table.append({"a": 4, "text": "z"})
print([row["a"] for row in read(sys.argv[1])])
"""


def test_a_write_that_fails_in_its_middle_spoils_nothing(path):
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=550)
    assert done.stdout.splitlines() == ["No space left on device", "[1.0, 2.0, 4.0]"], done.stderr


def test_a_missing_table_is_an_os_error(tmp_path):
    for function in (read, lambda path: last(path, 1)):
        with pytest.raises(FileNotFoundError):
            function(tmp_path / "none.csv")


@given(st.binary(max_size=300))
def test_any_bytes_are_read_or_left_out(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("any") / "table.csv"
    path.write_bytes(content)
    assert isinstance(read(path), list) and isinstance(last(path, 3), list)


@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5))
def test_numbers_come_back_to_six_digits(tmp_path_factory, numbers):
    path = tmp_path_factory.mktemp("numbers") / "table.csv"
    table = Table(path)
    for number in numbers:
        table.append({"value": number})
    assert [row["value"] for row in read(path)] == pytest.approx(numbers, rel=1e-5)


def test_a_removed_table_starts_over(tmp_path):
    table = Table(tmp_path / "folder/table.csv")
    table.append({"a": 1})
    shutil.rmtree(tmp_path / "folder")
    table.append({"a": 2})
    table.append({"a": 3, "b": 4})
    assert read(tmp_path / "folder/table.csv") == [{"a": 2.0, "b": None}, {"a": 3.0, "b": 4.0}]


def test_only_regular_files_are_read(tmp_path):
    os.symlink("/dev/zero", tmp_path / "table.csv")  # has no end
    with pytest.raises(OSError, match="not a regular file"):
        Table(tmp_path / "table.csv").append({"a": 1})
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(OSError, match="not a regular file"):
        Table(tmp_path / "pipe.csv").append({"a": 1})
