import numpy as np
import pytest

pa = pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'tfgpu[arrow]'")

from pyarrow import csv, parquet  # noqa: E402

from tfgpu.data import load, tables  # noqa: E402
from tfgpu.data.decoding import Reading  # noqa: E402
from tfgpu.data.sources import open_source  # noqa: E402
from tfgpu.errors import InputError  # noqa: E402


def flowers(count=60):
    random = np.random.default_rng(0)
    return pa.table(
        {
            "length": random.normal(size=count),
            "petals": random.integers(3, 9, count),
            "species": [("iris", "rose", "tulip")[i % 3] for i in range(count)],
            "wild": random.integers(0, 2, count).astype(bool),
        }
    )


def expected(table):
    return np.stack([table[n].to_numpy().astype(np.float32) for n in ("length", "petals", "wild")], axis=1)


def write(path, table):
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path, row_group_size=16)
    return str(path)


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_columns_become_examples_and_labels(tmp_path, end):
    table = flowers()
    examples = open_source(write(tmp_path / f"flowers.{end}", table) + "#species")
    np.testing.assert_array_equal(examples.array, expected(table))
    assert examples.array.dtype == np.float32 and examples.name == f"flowers.{end}"
    assert examples.class_names == ("iris", "rose", "tulip")
    assert examples.labels.tolist() == [i % 3 for i in range(60)]


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_a_table_larger_than_memory_gives_the_same_batches(tmp_path, end):
    table = pa.concat_tables([flowers(), flowers(10)])  # with copies
    source = write(tmp_path / f"flowers.{end}", table) + "#species"
    given = {"global_batch": 8, "seed": 2, "validation": 0.1, "test": 0.2}
    memory, disk = (load(source, memory_bytes=m, **given) for m in (1 << 30, 100))
    assert memory.info == disk.info
    for part in ("train", "validation", "test"):
        for (x, y), (u, v) in zip(getattr(memory, part), getattr(disk, part), strict=True):
            np.testing.assert_array_equal(x, u)
            np.testing.assert_array_equal(y, v)


def test_files_of_parts_and_the_usual_names_of_labels(tmp_path):
    table = flowers().rename_columns(["a", "b", "target", "c"])
    for name, rows in (("train-0", (0, 30)), ("train-1", (30, 45)), ("test-0", (45, 60))):
        write(tmp_path / "set" / f"{name}.parquet", table.slice(rows[0], rows[1] - rows[0]))
    info = load(str(tmp_path / "set"), global_batch=4, validation=0).info
    assert (info.train_examples, info.test_examples, info.input_shape) == (45, 15, (3,))


def test_whole_numbers_at_the_beginning_of_a_csv_do_not_fix_its_type(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_CSV_BLOCK", 64)
    path = tmp_path / "a.csv"
    path.write_text("a,y\n" + "".join(f"{i},{i % 2}\n" for i in range(50)) + "0.5,1\n")
    assert open_source(str(path)).array[-1].tolist() == [0.5]


def test_lists_of_one_length_are_features(tmp_path):
    lists = {"fixed": pa.array([[1, 2], [3, 4]], pa.list_(pa.float64(), 2)), "free": [[5], [6]], "y": [0, 1]}
    examples = open_source(write(tmp_path / "a.parquet", pa.table(lists)))
    assert examples.array.tolist() == [[1, 2, 5], [3, 4, 6]]
    ragged = pa.table({"a": [[1, 2], [3]], "y": [0, 1]})
    with pytest.raises(InputError, match="'a' must have one length"):
        open_source(write(tmp_path / "b.parquet", ragged))


@pytest.mark.parametrize(
    ("text", "label", "message"),
    [
        ("a,b\n1,2\n", "", "has no column label, class, target or y. Received: a, b.*#b'"),
        ("a,y\n1,2\n", "#why", "Did you mean 'y'"),
        ("a,b,y\n1,red,0\n2,blue,1\n", "", r"1 column.* are not numeric: 'b' \(string\)"),
        ("a,y\n1,0\n,1\n", "", "column 'a' has 1 missing value.*line 3"),
        ("a,y\n1,x\n2,\n", "", "column 'y' has 1 missing value.*line 3"),
        ("a,y\n1,0\n2,1,3\n", "", "Cannot read .*a.csv as csv"),
        ("a,y\n1,2020-01-01\n2,2020-01-02\n", "", "labels must be whole numbers or strings. Received: date32"),
        ("a,y\n1,0\n2,0\n", "", "at least two classes"),
        ("y\n1\n", "", "only the label column"),
        ("", "", "Cannot read .*a.csv as csv"),
    ],
)
def test_tables_that_cannot_be_used_are_named(tmp_path, text, label, message):
    path = tmp_path / "a.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        open_source(f"{path}{label}")
    assert "\n" not in str(caught.value)


def test_files_that_are_not_alike_or_not_there_are_named(tmp_path):
    with pytest.raises(InputError, match="No Parquet files"):
        open_source(str(tmp_path / "none.parquet"))
    write(tmp_path / "a.csv", pa.table({"a": [1, 2], "y": [0, 1]}))
    write(tmp_path / "b.csv", pa.table({"b": [1, 2], "y": [0, 1]}))
    with pytest.raises(InputError, match="b.csv and .*a.csv have different columns"):
        open_source(str(tmp_path / "*.csv"))
    (tmp_path / "c.parquet").write_text("text")
    with pytest.raises(InputError, match="Cannot read .*c.parquet as parquet"):
        open_source(str(tmp_path / "c.parquet"))
    with pytest.raises(InputError, match="image files"):
        open_source(str(tmp_path / "a.csv"), Reading(image_size=(4, 4)))


def homes(count=40):
    random = np.random.default_rng(1)
    columns = {"rooms": random.integers(1, 6, count), "kind": ["flat", "house"] * (count // 2)}
    return pa.table({**columns, "price": random.normal(size=count), "sample_weight": random.uniform(1, 2, count)})


@pytest.mark.parametrize("end", ["csv", "parquet"])
def test_several_columns_are_named_targets_and_one_weighs(tmp_path, end):
    table = homes()
    source = write(tmp_path / f"homes.{end}", table)
    data = load(source + "#kind,price", global_batch=40, shuffle=False)
    (x, y, weight) = next(iter(data.train))
    np.testing.assert_array_equal(x[:, 0], table["rooms"].to_numpy())
    np.testing.assert_array_equal(y["price"], table["price"].to_numpy().astype("float32"))
    np.testing.assert_array_equal(y["kind"], np.arange(40) % 2)
    np.testing.assert_array_equal(weight, table["sample_weight"].to_numpy().astype("float32"))
    assert data.info.targets["kind"].class_names == ("flat", "house")
    assert data.info.targets["price"].kind == "numbers" and data.info.input_shape == (1,)
    whole = load(source + "#kind,rooms", global_batch=8, task={"rooms": "regression"}).info.targets
    assert whole["rooms"].kind == "numbers"


def test_lists_are_numbers_to_predict(tmp_path):
    table = pa.table({"a": [1.0, 2.0, 3.0], "place": [[0.5, 1], [1.5, 2], [2.5, 3]]})
    data = load(write(tmp_path / "a.parquet", table) + "#place", global_batch=3, shuffle=False)
    assert next(iter(data.train))[1].numpy().tolist() == [[0.5, 1], [1.5, 2], [2.5, 3]]


def test_labels_that_are_whole_at_first_may_be_numbers_later(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "_CSV_BLOCK", 64)
    (tmp_path / "a.csv").write_text("a,y,b\n" + "".join(f"{i},{i % 2},1\n" for i in range(50)) + "3,0.5,1\n")
    assert load(f"{tmp_path}/a.csv", global_batch=8).info.labels == "numbers"
    assert load(f"{tmp_path}/a.csv#y,b", global_batch=8).info.targets["y"].kind == "numbers"


def test_a_row_is_placed_as_an_editor_counts_lines(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('text,y\n"two\nlines",1\n\nfree,2\n')
    assert [tables.place_of(path, "csv", row) for row in (0, 1, 2)] == ["line 2", "line 5", "row 2 (the first is 0)"]
    assert tables.place_of(path, "parquet", 3) == "row 3 (the first is 0)"


@pytest.mark.parametrize(
    ("row", "label", "message"),
    [
        ("1,dear,flat,1", "#price,kind", "'dear' in line 52"),
        ("many,1,flat,1", "#price,kind", "'many' in line 52"),
        ("1,1,flat,heavy", "#price,kind", "'heavy' in line 52"),
        ("1,,flat,1", "#price,kind", "'price' has 1 missing value.*line 52"),
        ("1,1,flat,-1", "#price,kind", "sample weights must be at least 0 and finite. Received: -1.0"),
        ("1,1,flat,1", "#prise,kind", "Did you mean 'price'"),
        ("1,1,flat,1", "#kind,kind", "named once"),
    ],
)
def test_a_bad_row_is_named_by_column_and_row(tmp_path, monkeypatch, row, label, message):
    monkeypatch.setattr(tables, "_CSV_BLOCK", 128)  # the row is not in the first block, which decides the types
    rows = "".join(f"{i},{i / 7},{['flat', 'hut'][i % 2]},1\n" for i in range(50))
    (tmp_path / "a.csv").write_text(f"rooms,price,kind,sample_weight\n{rows}{row}\n")
    with pytest.raises(InputError, match=message) as caught:
        open_source(f"{tmp_path}/a.csv{label}")
    assert "\n" not in str(caught.value)
