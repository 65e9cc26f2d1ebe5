import subprocess
import sys

import pytest

from tfgpu.data.names import SourceName, parse_source
from tfgpu.errors import InputError


def test_every_kind_of_source_is_told_apart(tmp_path):
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "a.tfrecord-00000-of-00001").touch()
    assert parse_source("digits") == SourceName("digits", "digits")
    assert parse_source("tfds:mnist:3.0.1") == SourceName("tfds", "mnist:3.0.1")
    assert parse_source("my_project.data:load") == SourceName("function", "my_project.data:load")
    assert parse_source(str(tmp_path / "photos")).kind == "folder"
    assert parse_source(str(tmp_path / "shards")).kind == "records"
    assert parse_source("data/*.tfrecord") == SourceName("records", "data/*.tfrecord")


@pytest.mark.parametrize(
    "text, message",
    [
        ("digit", "Did you mean 'digits'"),
        ("", "Try 'digits'"),
        ("tfds:", "takes the name of a tensorflow-datasets dataset"),
        ("no/such/folder", "No such data folder"),
        (7, "must be a name"),
    ],
)
def test_a_wrong_source_names_the_fix(text, message):
    with pytest.raises(InputError, match=message):
        parse_source(text)


def test_a_file_that_is_no_record_is_refused(tmp_path):
    (tmp_path / "a.xls").touch()
    with pytest.raises(InputError, match="not a .tfrecord, .csv, .parquet or .npz file"):
        parse_source(str(tmp_path / "a.xls"))


def test_tables_and_their_labels(tmp_path):
    for name in ("a#b.csv", "tables/one.parquet", "both/one.csv", "both/one.tfrecord"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert parse_source("a.csv#species") == SourceName("csv", "a.csv", "species")
    assert parse_source("a.CSV.gz") == SourceName("csv", "a.CSV.gz")
    assert parse_source("parquet:some/*.part#y") == SourceName("parquet", "some/*.part", "y")
    assert parse_source(f"{tmp_path}/a#b.csv") == SourceName("csv", f"{tmp_path}/a#b.csv")
    assert parse_source(f"{tmp_path}/tables#kind") == SourceName("parquet", f"{tmp_path}/tables", "kind")
    assert parse_source(f"{tmp_path}/both").kind == "records"
    assert parse_source("csv.tools:load").kind == "function"


def test_names_are_checked_without_tensorflow():
    code = "import sys; from tfgpu.data import parse_source; parse_source('digits')"
    check = "; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code + check], check=True, timeout=550)
