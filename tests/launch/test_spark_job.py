"""Training on data of a real Spark: in one process, with executors of its own, and on a standalone cluster."""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

import tfgpu
from tfgpu.errors import InputError, MachineError

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(1500)]
ROWS = 49


@pytest.fixture(scope="module")
def pyspark():
    found = pytest.importorskip("pyspark", reason="needs Spark: pip install 'tfgpu[spark]'")
    if shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        pytest.skip("needs Java: apt-get install openjdk-17-jre-headless")
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield found


@contextlib.contextmanager
def session(master: str, **settings):
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(master).config("spark.ui.enabled", "false")
    builder = builder.config("spark.driver.host", "localhost").config("spark.executor.memory", "512m")
    for name, value in settings.items():
        builder = builder.config(name.replace("_", "."), value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    try:
        yield spark
    finally:
        spark.stop()


def table():
    draw = np.random.default_rng(0)
    return draw.normal(size=(ROWS, 3))


def frame(spark):
    rows = [(float(a), [float(b), float(c)], float(a + b + c)) for a, b, c in table()]
    return spark.createDataFrame(spark.sparkContext.parallelize(rows, 5), "a double, b array<double>, y double")


def model_of(strategy):
    import keras

    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((3,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def train(data, folder, epochs=3, seed=None):
    import keras

    import tfgpu

    strategy = tfgpu.strategy()
    model = model_of(strategy)
    callbacks = [
        keras.callbacks.BackupAndRestore(folder, save_freq=2, delete_checkpoint=False),
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: tfgpu.launch.report({"engine": os.getppid()})),
        tfgpu.callbacks.Report(),
    ]
    batches = data.batches(["a", "b"], "y", strategy=strategy, seed=seed)
    history = model.fit(batches, epochs=epochs, verbose=0, callbacks=callbacks)
    return history.history, model.get_weights(), data.steps


@pytest.fixture(scope="module")
def one_device():
    """What one device makes of the rows in their order."""
    import tensorflow as tf

    model = model_of(tfgpu.strategy("one_device"))
    rows = table().astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((rows, table().sum(axis=1).astype("float32"))).batch(16)
    return model.fit(batches, epochs=3, verbose=0).history, model.get_weights()


def check(found, one_device, epochs=3):
    """Compares with one device the weights, and the history of the last epochs."""
    history, weights, steps = found
    assert steps == 4
    for name, values in one_device[0].items():
        np.testing.assert_allclose(history[name], values[-epochs:], rtol=1e-5)
    for mine, one in zip(weights, one_device[1], strict=True):
        np.testing.assert_allclose(mine, one, atol=1e-5)


def is_ours(process):
    try:
        return process.environ().get("TFGPU_TEST") == MINE["TFGPU_TEST"]
    except psutil.Error:  # it has ended
        return False


def check_nothing_is_left():
    end = time.monotonic() + 60
    while left := [process for process in psutil.process_iter() if is_ours(process)]:
        assert time.monotonic() < end, left
        time.sleep(0.2)


MINE = {"TFGPU_TEST": f"tfgpu-test-{os.getpid()}"}


@pytest.fixture(scope="module")
def local(pyspark):
    with session("local[2]") as spark:
        yield spark


def test_two_workers_train_as_one_device_does(local, one_device, tmp_path):
    reports = []
    found = tfgpu.launch.spark_job(
        train,
        frame(local),
        2,
        global_batch=16,
        arguments=(str(tmp_path),),
        startup_timeout_s=300,
        environment=MINE,
        on_progress=reports.append,
    )
    check(found, one_device)
    epochs = [report for report in reports if "epoch" in report]
    assert [report["epoch"] for report in epochs] == [0, 1, 2]
    assert [report["loss"] for report in epochs] == found[0]["loss"]
    check_nothing_is_left()


def test_shuffled_rows_of_an_rdd_are_dealt_once_to_any_number_of_workers(local):
    def read(data):
        import pyarrow

        return pyarrow.ipc.open_file(data.path).read_all().column("_1").to_pylist()

    rdd = local.sparkContext.parallelize([(i, 0) for i in range(23)], 4)
    options = {"global_batch": 6, "shuffle_seed": 5, "startup_timeout_s": 300}
    whole, chiefs = (tfgpu.launch.spark_job(read, rdd, workers, **options) for workers in (1, 2))
    assert sorted(whole) == list(range(23)) != whole
    batches = [whole[at : at + 6] for at in range(0, 23, 6)]
    assert chiefs == [row for batch in batches for row in batch[: (len(batch) + 1) // 2]]


def test_a_failing_function_is_told_with_its_last_lines(local):
    def fail(data):
        raise ZeroDivisionError(f"{data.rows} rows are too many")

    with pytest.raises(MachineError, match=rf"exit code 1(.|\n)*{ROWS} rows are too many"):
        tfgpu.launch.spark_job(fail, frame(local), 1, global_batch=16, environment=MINE)
    check_nothing_is_left()


def test_a_failure_and_a_preemption_start_the_group_again(local, tmp_path):
    def leave(data, path):
        import os
        import sys

        for name, code in (("failed", 1), ("preempted", 75)):
            if not os.path.exists(path + name):
                open(path + name, "w").close()
                sys.exit(code)
        return data.rows

    path = str(tmp_path / "x")
    assert tfgpu.launch.spark_job(leave, frame(local), 1, global_batch=16, arguments=(path,), max_restarts=1) == ROWS


def test_ctrl_c_leaves_nothing_behind(local, tmp_path):
    def interrupt(report):
        if report.get("epoch") == 0:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tfgpu.launch.spark_job(
            train,
            frame(local),
            2,
            global_batch=16,
            arguments=(str(tmp_path), 1000),
            grace_s=2,
            startup_timeout_s=300,
            environment=MINE,
            on_progress=interrupt,
        )
    check_nothing_is_left()
    assert frame(local).count() == ROWS


def test_what_cannot_be_had_is_told(local):
    rows = frame(local)
    with pytest.raises(MachineError, match="Spark has 2 task slots after startup_timeout_s=1; 3 workers"):
        tfgpu.launch.spark_job(train, rows, 3, global_batch=16, startup_timeout_s=1)
    with pytest.raises(InputError, match="global_batch=1"):
        tfgpu.launch.spark_job(train, rows, 2, global_batch=1)
    with pytest.raises(InputError, match="rows=1"):
        tfgpu.launch.spark_job(train, rows.limit(1), 2, global_batch=16)
    with pytest.raises(InputError, match="Received: list"):
        tfgpu.launch.spark_job(train, [1, 2], 2, global_batch=16)
    with pytest.raises(InputError, match="Received: 0"):
        tfgpu.launch.spark_job(train, rows, 2, global_batch=0)


def test_predictions_are_the_models(local, tmp_path):
    import keras

    model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(2)])
    model.save(tmp_path / "model.keras")
    rows = frame(local).selectExpr("a", "b", "y", "if(a > 0, cast(7 as int), null) as n")
    scored = tfgpu.launch.spark_predict(rows, tmp_path / "model.keras", columns=["a", "b"], output="score")
    found = scored.collect()
    expected = model.predict(table().astype("float32"), verbose=0)
    np.testing.assert_allclose([row.score for row in found], expected, rtol=1e-5)
    assert [row.asDict() for row in scored.drop("score").collect()] == [row.asDict() for row in rows.collect()]
    assert {row.n for row in found} == {7, None}  # pandas would have made 7.0 of it


def test_predictions_that_cannot_be_had_are_told(local, tmp_path):
    (tmp_path / "model.keras").touch()
    rows, model = frame(local), tmp_path / "model.keras"
    with pytest.raises(InputError, match="must be a .keras file"):
        tfgpu.launch.spark_predict(rows, tmp_path / "other.keras", columns="a")
    with pytest.raises(InputError, match="has a column 'y' already"):
        tfgpu.launch.spark_predict(rows, model, columns="a", output="y")
    with pytest.raises(InputError, match="Unknown column 'c'"):
        tfgpu.launch.spark_predict(rows, model, columns=["a", "c"])
    with pytest.raises(InputError, match="`output_type`"):
        tfgpu.launch.spark_predict(rows, model, columns="a", output_type="string")


def test_a_lost_executor_restarts_the_group_which_ends_with_the_same_weights(pyspark, one_device, tmp_path):
    seen, killed = [], []

    def kill(report):
        seen.append(report)
        if report["start"] == 0 and report.get("epoch") == 1:
            task = psutil.Process(next(report["engine"] for report in seen if "engine" in report))
            executor = next(p for p in task.parents() if p.name() == "java")
            assert executor.pid != os.getpid()
            killed.append(executor.pid)
            executor.send_signal(signal.SIGKILL)

    with session("local-cluster[2,1,512]") as spark:
        found = tfgpu.launch.spark_job(
            train,
            frame(spark),
            2,
            global_batch=16,
            arguments=(str(tmp_path),),
            max_restarts=1,
            startup_timeout_s=300,
            environment=MINE,
            on_progress=kill,
        )
    assert killed and {report["start"] for report in seen} == {0, 1}
    again = [report["epoch"] for report in seen if report["start"] == 1 and "epoch" in report]
    assert again and again[0] > 0  # it went on, and did not begin anew
    check(found, one_device, epochs=len(again))
    check_nothing_is_left()


@pytest.fixture
def standalone(pyspark, tmp_path):
    """A master and two workers of one core each, as the pip package has them."""
    home = Path(pyspark.__file__).parent
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["--host", "127.0.0.1", "--cores", "1", "--memory", "600M", "--webui-port", "0"]
    commands = [["deploy.master.Master", *options]]
    commands += [["deploy.worker.Worker", *worker, "--work-dir", str(tmp_path / f"w{at}"), master] for at in range(2)]
    environment = {**os.environ, "SPARK_HOME": str(home)}
    running = []
    try:
        for name, *rest in commands:
            command = [home / "bin" / "spark-class", f"org.apache.spark.{name}", *rest]
            log = open(tmp_path / f"{len(running)}.log", "wb")
            running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        yield master
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


def test_a_standalone_cluster(standalone, one_device, tmp_path):
    with session(standalone) as spark:
        found = tfgpu.launch.spark_job(
            train,
            frame(spark),
            2,
            global_batch=16,
            arguments=(str(tmp_path / "backup"),),
            startup_timeout_s=300,
            environment=MINE,
        )
        rows = frame(spark).limit(5)
        model = model_of(tfgpu.strategy("one_device"))
        model.save(tmp_path / "model.keras")
        scored = tfgpu.launch.spark_predict(rows, tmp_path / "model.keras", columns=["a", "b"], output_type="float")
        assert [row.prediction for row in scored.collect()] == pytest.approx(
            model.predict(table()[:5], verbose=0)[:, 0].tolist(), rel=1e-5
        )
    check(found, one_device)
    check_nothing_is_left()


def test_the_example_of_the_page_runs(pyspark, tmp_path):
    page = Path(__file__).parents[2] / "docs" / "spark.md"
    script = tmp_path / "page.py"
    script.write_text(re.search(r"^```py\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)[1])
    done = subprocess.run([sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "accuracy 0." in done.stdout
