"""Predictions of a saved Keras model for the rows of a Spark DataFrame."""

import atexit
import functools
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgpu.errors import InputError, unknown, whole_number
from tfgpu.launch.spark.data import Columns, arrays_of, planned, pyarrow
from tfgpu.launch.spark.frame import to_frame

OUTPUTS = ("array<float>", "float")
"""Spark's types of a prediction."""


@dataclass(frozen=True)
class TaskSpec:
    """What is sent to each task.

    Args:
        name: the name under which the model's file was sent.
        plan: what the model gets, from `data.planned`.
        output, output_type, batch_rows: as in `spark_predict`.
    """

    name: str
    plan: object
    output: str
    output_type: str
    batch_rows: int


def spark_predict(
    frame: Any,
    model: str | Path,
    *,
    columns: Columns,
    output: str = "prediction",
    output_type: str = "array<float>",
    batch_rows: int = 256,
) -> Any:
    """Adds a model's predictions to a DataFrame, as a column.

    Nothing runs until the DataFrame is used. The model's file is sent with the job, and each Python worker of Spark
    loads it once. Rows are exchanged as Arrow batches of at most `spark.sql.execution.arrow.maxRecordsPerBatch` rows
    (`mapInArrow` leaves the other columns bit for bit unchanged; pandas, with `mapInPandas`, turns integers into floats
    where values are missing). The model predicts `batch_rows` of them at once.

    Args:
        frame: a `pyspark.sql.DataFrame`.
        model: a `.keras` file, as `model.save` writes it; its first output counts.
        columns: what the model gets: a column, a list of columns to concatenate as float32, or a mapping from each of
            the model's inputs to one of these.
        output: the name of the new column.
        output_type: its Spark type: `"float"` for a model with one number per row, `"array<float>"` for several. Cast
            the column for another.
        batch_rows: rows per call of the model.

    Returns:
        The DataFrame with one more column.

    Raises:
        InputError: Spark is not installed, the file or a column does not exist, the new column's name is taken, or
            `output_type` is none of the types above.
            When the DataFrame is used: the model has several outputs, or another shape.

    Example:
        scored = tfgpu.launch.spark_predict(frame, "model.keras", columns=["a", "b"], output="score")
    """
    from tfgpu.launch.spark.job import pyspark_sql

    frame = to_frame(pyspark_sql(), frame)
    path = Path(model)
    if not path.is_file() or path.suffix != ".keras":
        raise InputError(f"`model` must be a .keras file. Received: {str(model)!r}. Create one with `model.save(...)`.")
    batch_rows = whole_number("batch_rows", batch_rows)
    if output in frame.columns:
        raise InputError(f"The data already has a column {output!r}. Give `output` another name.")
    if output_type not in OUTPUTS:
        raise unknown("output_type", output_type, OUTPUTS)
    name = _sent(frame.sparkSession.sparkContext, path)
    spec = TaskSpec(name, planned(columns, frame.columns), output, output_type, batch_rows)
    from pyspark.sql.types import StructType

    new = StructType.fromDDL(f"`{output}` {output_type}")
    schema = StructType([*frame.schema.fields, *new.fields])
    return frame.mapInArrow(lambda batches: predicted(batches, spec), schema)


def predicted(batches: Iterator, spec: TaskSpec) -> Iterator:
    """The task: adds the predictions as a column to each Arrow batch.

    Args:
        batches: `pyarrow.RecordBatch` objects.
        spec: what to run.
    """
    arrow = pyarrow()
    for batch in batches:
        if batch.num_rows == 0:
            continue
        given = arrays_of(spec.plan, arrow.Table.from_batches([batch]))
        found = _model(spec.name).predict(given, spec.batch_rows, verbose=0)
        columns = [*batch.columns, to_arrow(found, spec.output_type)]
        yield arrow.RecordBatch.from_arrays(columns, [*batch.schema.names, spec.output])


def to_arrow(found, output_type: str):
    """Predictions as an Arrow array.

    Args:
        found: what `predict` returned, of shape `[rows, ...]`.
        output_type: one of `OUTPUTS`.

    Raises:
        InputError: there are several outputs, or a row has another shape.
    """
    import numpy as np

    if not isinstance(found, np.ndarray):
        raise InputError("The model has several outputs. Save one with a single output: `keras.Model(inputs, one)`.")
    shape = found.shape[1:]
    if len(shape) > 1 or (output_type == "float" and shape not in ((), (1,))):
        fits = "a flat output" if len(shape) > 1 else "'array<float>'"
        raise InputError(
            f"The model predicts a shape of {shape} per row. Received: output_type={output_type!r}. Use {fits}."
        )
    rows = found.astype("float32").reshape(len(found), -1)
    return pyarrow().array(rows[:, 0] if output_type == "float" else list(rows))


@functools.lru_cache(maxsize=2)
def _model(name: str):
    """Loads the model once per Python process: Spark reuses its Python workers for further tasks."""
    from pyspark import SparkFiles, TaskContext

    gpus = TaskContext.get().resources().get("gpu")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus.addresses) if gpus else ""  # before TensorFlow reads it
    import keras

    return keras.models.load_model(SparkFiles.get(name), compile=False)


def _sent(context, path: Path) -> str:
    """Sends the file to all executors under a name made from its content: Spark accepts each name once."""
    from pyspark import SparkFiles

    name = f"tfgpu-{hashlib.sha256(path.read_bytes()).hexdigest()[:24]}.keras"
    if not os.path.exists(SparkFiles.get(name)):
        folder = Path(tempfile.mkdtemp(prefix="tfgpu-model-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)  # executors that start later request it too
        shutil.copyfile(path, folder / name)
        context.addFile(str(folder / name))
    return name
