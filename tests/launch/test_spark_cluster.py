"""Training on executors in JVMs of their own, which are killed, and so is their driver."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import tfgpu

sys.path.insert(0, str(Path(__file__).parent))
import spark_training
from spark_training import MINE, check, check_nothing_is_left, marked, run, session

pytestmark = [pytest.mark.processes, pytest.mark.slow]
DRIVER = """
import json, sys
import spark_training
spark_training.pyspark()
master, folder, environment = sys.argv[1:]
with spark_training.session(master) as spark:
    spark_training.run(
        spark, folder, 10**6, environment=json.loads(environment),
        on_progress=lambda report: print(json.dumps(report), flush=True),
    )
"""


@pytest.fixture(scope="module")
def pyspark():
    found = spark_training.pyspark()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        yield found


def executor_of(task: psutil.Process) -> psutil.Process:
    """The JVM that started the Python process of a task."""
    executor = next(parent for parent in task.parents() if parent.name() == "java")
    assert any("CoarseGrainedExecutorBackend" in word for word in executor.cmdline())
    return executor


def rank_of(process: psutil.Process) -> int:
    return json.loads(process.environ()["TF_CONFIG"])["task"]["index"]


@pytest.mark.parametrize("victim", ["executor", "python"])
def test_a_lost_executor_restarts_the_group_which_ends_with_the_same_weights(pyspark, tmp_path, victim):
    seen, first = [], []

    def kill(report):
        seen.append(report)
        if report["start"] == 1:
            assert not psutil.wait_procs(first, 5)[1]
        elif report.get("epoch") == 1:
            task = psutil.Process(next(report["engine"] for report in seen if "engine" in report))
            killed = executor_of(task) if victim == "executor" else task
            first.extend({killed, *killed.children(recursive=True), *marked()})
            assert {rank_of(process) for process in marked()} == {0, 1}
            killed.kill()

    with session("local-cluster[2,1,512]") as spark:
        found = run(spark, tmp_path, max_restarts=1, on_progress=kill)
        check_nothing_is_left()
    assert {report["start"] for report in seen} == {0, 1}
    again = [report["epoch"] for report in seen if report["start"] == 1 and "epoch" in report]
    assert again and again[0] > 0  # it resumed, and did not start over
    check(found)


@pytest.fixture(scope="module")
def standalone(pyspark, tmp_path_factory):
    """A master and two workers of one core each, as the pip package has them: its address, their temporary folder."""
    home, folder = Path(pyspark.__file__).parent, tmp_path_factory.mktemp("standalone")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    master = f"spark://127.0.0.1:{port}"
    options = ["--host", "127.0.0.1", "--port", str(port), "--webui-port", "0"]
    worker = ["--host", "127.0.0.1", "--cores", "1", "--memory", "600M", "--webui-port", "0"]
    commands = [["deploy.master.Master", *options]]
    commands += [["deploy.worker.Worker", *worker, "--work-dir", str(folder / f"w{at}"), master] for at in range(2)]
    environment = {**os.environ, "SPARK_HOME": str(home), "SPARK_DAEMON_MEMORY": "256m"}
    environment |= {"TMPDIR": str(folder), "SPARK_LOCAL_DIRS": str(folder)}
    running = []
    try:
        for name, *rest in commands:
            command = [home / "bin" / "spark-class", f"org.apache.spark.{name}", *rest]
            with open(folder / f"{len(running)}.log", "wb") as log:
                running.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
        yield master, folder
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(500)


def test_a_killed_driver_leaves_nothing_behind(standalone, tmp_path):
    master, folder = standalone
    command = [sys.executable, "-c", DRIVER, master, str(tmp_path / "checkpoints"), json.dumps(MINE)]
    paths = [str(Path(tfgpu.__file__).parents[1]), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as driver:
        try:
            reports = (json.loads(line) for line in driver.stdout if line.startswith("{"))
            task = psutil.Process(next(report["engine"] for report in reports if "engine" in report))
            assert next(report["epoch"] for report in reports if "epoch" in report) == 0
            assert {rank_of(process) for process in marked()} == {0, 1}
            engine = [*executor_of(task).children(recursive=True), executor_of(task)]
            assert task in engine and len(list(folder.rglob("tfgpu-*"))) == 6  # rows, the script, the heartbeat
        finally:
            driver.kill()
    check_nothing_is_left(15)
    assert not psutil.wait_procs(engine, 30)[1]
    assert not list(folder.rglob("tfgpu-*"))


def test_a_standalone_cluster(standalone, tmp_path):
    with session(standalone[0]) as spark:
        found = run(spark, tmp_path / "checkpoints")
    check(found)
    check_nothing_is_left()
