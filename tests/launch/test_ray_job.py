"""Training on a real Ray cluster of this machine."""

import os
import signal
import sys
import time

import numpy as np
import psutil
import pytest

import tfgpu
from tfgpu.errors import InputError, MachineError

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray", reason="needs Ray: pip install 'tfgpu[ray]'")
    import cloudpickle

    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    start(ray)
    yield ray
    ray.shutdown()


def start(ray, tries=6):
    """Starts a cluster on this machine. Ray gives its own processes 30 s, which a busy machine may not keep."""
    for left in reversed(range(tries)):
        try:
            return ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        except Exception:  # Ray raises no narrower one
            ray.shutdown()
            if not left:
                raise


def train(folder, epochs=4, pause_s=0.0):
    """Trains under the environment's strategy; resumes from `folder`. With a pause it reports every step."""
    import time

    import keras
    import numpy as np
    import psutil

    import tfgpu

    keras.utils.set_random_seed(1)
    strategy = tfgpu.strategy()
    draw = np.random.default_rng(0)
    x = draw.normal(size=(50, 4)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.layers.Input((4,)), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])

    def tell(batch, logs):
        tfgpu.launch.report({"step": batch})
        time.sleep(pause_s)

    # This process's supervisor and the guard of that stand between it and the actor.
    engine = psutil.Process().parents()[2].pid
    facts = {"engine": engine, "process": os.getpid(), "attempt": os.environ.get("TFGPU_ATTEMPT")}
    callbacks = [
        tfgpu.callbacks.Checkpoint(folder, every_steps=2),
        keras.callbacks.LambdaCallback(on_train_begin=lambda logs: tfgpu.launch.report(facts)),
        tfgpu.callbacks.Report(),
    ]
    if pause_s:
        callbacks.append(keras.callbacks.LambdaCallback(on_train_batch_end=tell))
    history = model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=callbacks)
    return history.history, model.get_weights(), strategy.num_replicas_in_sync


@pytest.fixture(scope="module")
def unbroken(cluster, tmp_path_factory):
    """What two undisturbed workers return and report."""
    reports = []
    folder = tmp_path_factory.mktemp("unbroken")
    found = tfgpu.launch.ray_job(
        train, 2, arguments=(str(folder),), logs=folder / "logs", startup_timeout_s=300, on_progress=reports.append
    )
    return found, reports, folder


def ours():
    """Processes of this test's that TensorFlow runs in."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if {"tfgpu.launch.ending", "tfgpu.launch.remote"} & set(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def check_nothing_is_left(ray):
    end = time.monotonic() + 500
    while time.monotonic() < end:
        groups = [group["state"] for group in ray.util.placement_group_table().values()]
        if not ours() and ray.available_resources().get("CPU") == 4 and set(groups) <= {"REMOVED"}:
            return
        time.sleep(0.2)
    raise AssertionError((ours(), ray.available_resources(), groups))


def test_two_workers_train_as_one_device_does(cluster, unbroken, tmp_path):
    (history, weights, replicas), reports, folder = unbroken
    expected_history, expected, _ = train(str(tmp_path))
    assert replicas == 2
    for mine, one in zip(weights, expected, strict=True):
        np.testing.assert_allclose(mine, one, atol=1e-5)
    for name, values in expected_history.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5)
    epochs = [report for report in reports if "epoch" in report]
    assert [report["epoch"] for report in epochs] == [0, 1, 2, 3]
    assert [report["loss"] for report in epochs] == history["loss"]
    assert {path.name for path in (folder / "logs").iterdir()} == {"worker-0.log", "worker-1.log"}
    check_nothing_is_left(cluster)


def test_a_killed_actor_restarts_the_group_which_ends_with_the_same_weights(cluster, unbroken, tmp_path):
    seen = []

    def kill(report):
        seen.append(report)
        if report["start"] == 0 and report.get("epoch") == 1:
            actor = next(report["engine"] for report in seen if "engine" in report)
            os.kill(actor, signal.SIGKILL)

    found = tfgpu.launch.ray_job(
        train, 2, arguments=(str(tmp_path),), max_restarts=1, startup_timeout_s=300, on_progress=kill
    )
    assert [(report["start"], report["attempt"]) for report in seen if "engine" in report] == [(0, "1"), (1, "2")]
    again = [report["epoch"] for report in seen if report["start"] == 1 and "epoch" in report]
    assert again[0] > 0  # after the first epoch, or the second where its checkpoint was written before the kill
    check_equal(found, unbroken[0])
    check_nothing_is_left(cluster)


def test_a_worker_that_is_asked_to_stop_saves_at_its_step_and_no_step_is_lost(cluster, unbroken, tmp_path):
    seen = []

    def ask(report):
        seen.append(report)
        if report["start"] == 0 and len(steps(seen)) == 6:
            os.kill(next(report["process"] for report in seen if "process" in report), signal.SIGTERM)

    found = tfgpu.launch.ray_job(
        train, 2, arguments=(str(tmp_path), 4, 0.3), startup_timeout_s=300, grace_period_s=60, on_progress=ask
    )
    assert steps(seen) == [0, 1, 2, 3] * 4  # over both starts: none twice, none left out
    assert 6 <= len(steps([report for report in seen if report["start"] == 0])) < 16
    assert {report["start"] for report in seen} == {0, 1}
    check_equal(found, unbroken[0])
    check_nothing_is_left(cluster)


def steps(reports):
    return [report["step"] for report in reports if "step" in report]


def check_equal(found, expected):
    """The same history and weights, bit for bit."""
    assert found[0] == expected[0]
    for mine, one in zip(found[1], expected[1], strict=True):
        np.testing.assert_array_equal(mine, one)


def test_ctrl_c_leaves_nothing_behind(cluster, tmp_path):
    def interrupt(report):
        if report.get("epoch") == 0:
            assert len(ours()) >= 2
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        tfgpu.launch.ray_job(
            train, 2, arguments=(str(tmp_path), 1000), grace_period_s=2, startup_timeout_s=300, on_progress=interrupt
        )
    check_nothing_is_left(cluster)


def test_a_failing_function_is_told_with_its_last_lines(cluster):
    def fail():
        raise ZeroDivisionError("the third row is empty")

    with pytest.raises(MachineError, match=r"exit code 1(.|\n)*the third row is empty"):
        tfgpu.launch.ray_job(fail, 1)
    check_nothing_is_left(cluster)


def test_wrong_input_is_not_tried_again(cluster, tmp_path):
    def refuse(path):
        from tfgpu.errors import InputError

        with open(path, "a") as file:
            file.write("x")
        raise InputError("`rate` must be above 0.")

    with pytest.raises(InputError, match="`rate` must be above 0"):
        tfgpu.launch.ray_job(refuse, 1, arguments=(str(tmp_path / "starts"),), max_restarts=3)
    assert (tmp_path / "starts").read_text() == "x"


def test_a_preemption_uses_no_restart(cluster, tmp_path):
    def leave_once(path):
        import os
        import sys

        if not os.path.exists(path):
            open(path, "w").close()
            sys.exit(75)
        return os.environ["COLOR"]

    found = tfgpu.launch.ray_job(leave_once, 1, arguments=(str(tmp_path / "left"),), environment={"COLOR": "red"})
    assert found == "red"


def test_a_silent_worker_is_ended(cluster):
    def fall_silent():
        import os
        import pathlib
        import signal

        pathlib.Path(os.environ["TFGPU_HEARTBEAT"]).touch()
        os.kill(os.getpid(), signal.SIGSTOP)

    with pytest.raises(MachineError, match="no heartbeat for 3 s"):
        tfgpu.launch.ray_job(fall_silent, 1, heartbeat_timeout_s=3)
    check_nothing_is_left(cluster)


def test_a_script_runs_with_its_arguments(cluster, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys\nopen(sys.argv[1] + os.environ['TF_CONFIG'][-2:-1], 'w').write(sys.argv[2])\n")
    assert tfgpu.launch.ray_job(script, 2, arguments=(tmp_path / "out", "red")) is None
    assert len(list(tmp_path.glob("out*"))) == 1 and next(tmp_path.glob("out*")).read_text() == "red"


def test_missing_resources_are_named(cluster):
    with pytest.raises(MachineError, match=r"Asked for: 3 workers with 2 CPU each.*machines have: 4 CPU"):
        tfgpu.launch.ray_job(train, 3, cpus_per_worker=2, startup_timeout_s=2)
    check_nothing_is_left(cluster)


def test_settings_are_checked(cluster):
    with pytest.raises(InputError, match="Unknown placement 'SPRAED'. Choices: SPREAD"):
        tfgpu.launch.ray_job(train, placement="SPRAED")
    with pytest.raises(InputError, match="`cpus_per_worker`"):
        tfgpu.launch.ray_job(train, cpus_per_worker=0)
