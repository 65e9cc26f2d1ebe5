"""Rows from Arrow files as batches, without Spark."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tfgpu.errors import InputError
from tfgpu.launch.spark.data import SparkData, arrays_of, planned, spool, to_array
from tfgpu.launch.spark.frame import RowAssignment

arrow = pytest.importorskip("pyarrow")


def share(folder, assignment: RowAssignment, rank: int, sizes: list[int], **columns) -> SparkData:
    """A worker's share of `columns`, which come in record batches of `sizes` rows."""
    table = {name: arrow.array(values) for name, values in columns.items()}
    mine = [
        row
        for batch in range(assignment.batches)
        for at in assignment.pieces_of(rank)
        for row in rows(*assignment.piece(batch, at))
    ]
    whole, batches, first = arrow.table(table).take(arrow.array(mine, arrow.int64())), [], 0
    for size in [*sizes, len(mine) - sum(sizes)]:
        batches += whole.slice(first, size).combine_chunks().to_batches()
        first += size
    folder.mkdir(exist_ok=True)
    path, count = spool(iter(batches), folder)
    assert count == assignment.rows_of(rank) == len(mine)
    return SparkData(assignment, rank, str(path))


def rows(first, count):
    return range(first, first + count)


def test_batches_of_one_worker_are_the_rows_in_their_order(tmp_path):
    data = share(tmp_path, RowAssignment(10, 4, 1), 0, [3, 5], a=[float(i) for i in range(10)], b=list(range(10)))
    batches = list(data.batches(["a", "b"], "b"))
    assert [x.shape.as_list() for x, _ in batches] == [[4, 2], [4, 2], [2, 2]]
    assert np.concatenate([y for _, y in batches]).tolist() == list(range(10))
    assert np.concatenate([x for x, _ in batches])[:, 0].tolist() == list(range(10))
    assert batches[0][0].dtype == tf.float32 and batches[0][1].dtype == tf.int64


def test_a_seed_reshuffles_the_batches_in_each_epoch(tmp_path):
    data = share(tmp_path, RowAssignment(40, 4, 1), 0, [], a=list(range(40)))
    batches = data.batches("a", seed=3)
    first, second = ([x.numpy()[0] for (x,) in batches] for _ in range(2))
    assert first != second and sorted(first) == sorted(second) == list(range(0, 40, 4))
    again = [x.numpy()[0] for (x,) in data.batches("a", seed=3)]
    assert again == first


def test_columns_by_input_weights_and_a_function(tmp_path):
    texts = ["a", "bb", "ccc"]
    numbers = {"n": [[1, 2], [3, 4], [5, 6]], "y": [0.0, 1.0, 2.0], "w": [1.0, 0.5, 2.0]}
    data = share(tmp_path, RowAssignment(3, 2, 1), 0, [], t=texts, **numbers)

    def lengths(x, y, weight):
        return {**x, "text": tf.strings.length(x["text"])}, y, weight

    batches = data.batches({"text": "t", "numbers": ["n", "y"]}, "y", weight="w", prepare=lengths)
    (x, y, weight), _ = batches
    assert x["text"].numpy().tolist() == [1, 2] and weight.numpy().tolist() == [1.0, 0.5]
    assert x["numbers"].numpy().tolist() == [[1, 2, 0], [3, 4, 1]]


def test_several_workers_need_the_strategy(tmp_path):
    data = share(tmp_path, RowAssignment(4, 2, 2), 0, [], a=[1.0, 2, 3, 4])
    with pytest.raises(InputError, match="pass the model's strategy to `batches`"):
        data.batches("a")


@pytest.mark.parametrize(
    "values, message",
    [
        ([1.0, None], "has 1 missing value"),
        ([[1], [1, 2]], "the same length. Received: 1 to 2"),
        ([{"a": 1}], "has the type struct"),
    ],
)
def test_columns_that_are_not_arrays(values, message):
    with pytest.raises(InputError, match=message):
        to_array(arrow.array(values), "c")


@pytest.mark.parametrize(
    "values, dtype",
    [([1, 2], "int64"), ([True, False], "bool"), ([0.5, 1.5], "float32"), ([[[1.0, 2.0]], [[3.0, 4.0]]], "float32")],
)
def test_columns_that_are(values, dtype):
    found = to_array(arrow.array(values), "c")
    assert found.dtype == dtype and found.tolist() == values


def test_part_of_a_larger_array_keeps_its_rows():
    assert to_array(arrow.array([[1, 2], [3, 4], [5, 6]]).slice(1, 2), "c").tolist() == [[3, 4], [5, 6]]


def test_strings_cannot_be_combined_with_numbers():
    table = arrow.table({"t": ["a"], "n": [1]})
    with pytest.raises(InputError, match="'t' holds strings"):
        arrays_of(planned(["n", "t"], table.column_names), table)
    with pytest.raises(InputError, match="Unknown column 'nn'. Did you mean 'n'"):
        planned(["nn"], table.column_names)


MODEL = """
import json, os, sys
import numpy as np
import keras, tensorflow as tf, tfgpu
from tfgpu.cluster import Cluster
from tfgpu.launch.spark.frame import RowAssignment
from tfgpu.launch.spark.data import SparkData

keras.config.set_floatx("float64")  # In float32, Adam makes 6e-5 of the last bits of gradients near 0.
strategy = tfgpu.strategy()
keras.utils.set_random_seed(1)
with strategy.scope():
    layers = [keras.layers.Input((2,)), keras.layers.Dense(6, "relu"), keras.layers.BatchNormalization()]
    model = keras.Sequential([*layers, keras.layers.Dropout(0.4), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.05), "mse", weighted_metrics=["mae"])
"""
TRAIN = (
    MODEL
    + """
data = SparkData(RowAssignment(21, 5, 2), Cluster.from_environment().rank, sys.argv[1])
batches = data.batches(["a", "b"], "y", weight="w", strategy=strategy, seed=int(sys.argv[2]) or None)
history = model.fit(batches, epochs=3, verbose=0).history
print(json.dumps([history, [w.tolist() for w in model.get_weights()]]))
"""
)
ALONE = (
    MODEL
    + """
data = SparkData(RowAssignment(21, 5, 1), 0, sys.argv[1])
batches = data.batches(["a", "b"], "y", weight="w", seed=int(sys.argv[2]) or None)
history = model.fit(batches, epochs=3, verbose=0).history
print(json.dumps([history, [w.tolist() for w in model.get_weights()]]))
"""
)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 7])
def test_two_workers_with_shares_train_as_one_device_with_all_rows(together, tmp_path, seed):
    """Dropout, batch statistics, weights, and a last batch of one row: the second worker then has none."""
    draw = np.random.default_rng(0)
    columns = {name: draw.normal(size=21).tolist() for name in ("a", "b", "y")} | {"w": draw.uniform(size=21).tolist()}
    for rank in range(2):
        share(tmp_path / f"worker{rank}", RowAssignment(21, 5, 2), rank, [4], **columns)
    share(tmp_path / "alone", RowAssignment(21, 5, 1), 0, [4], **columns)
    found = together(TRAIN, {"worker": 2}, str(tmp_path / "{task}" / "rows.arrow"), seed, timeout=600)
    expected = run_alone(ALONE, tmp_path / "alone" / "rows.arrow", seed)
    for history, weights in found.values():
        for name, values in expected[0].items():
            np.testing.assert_allclose(history[name], values, rtol=1e-6, err_msg=name)
        for mine, one in zip(weights, expected[1], strict=True):
            np.testing.assert_allclose(mine, one, atol=1e-7)


def run_alone(script, *arguments):
    import subprocess
    import sys

    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
