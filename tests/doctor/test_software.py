import dataclasses
import json
import subprocess
import sys

import keras
import pytest

import tfgpu
from tfgpu import doctor
from tfgpu.compat.versions import INSTALL
from tfgpu.doctor import Check
from tfgpu.doctor.facts import software
from tfgpu.errors import InputError


@pytest.fixture(scope="module")
def here(clean):
    """The real facts of this machine, collected once."""
    return doctor.gather(clean())


def test_a_machine_that_is_well(facts, by_name):
    assert {check.status for check in by_name(facts).values()} == {"ok"}


@pytest.mark.slow
def test_this_machine_can_train(here, clean, facts):
    assert set(here) == set(facts) and set(here["machine"]) == set(facts["machine"])
    checks = doctor.judge(here, clean())
    assert not doctor.stops_training(checks), [check for check in checks if check.status == "problem"]
    assert all(bool(check.fix) == (check.status != "ok") for check in checks)
    assert all(check.found and "\n" not in check.found for check in checks)
    by_name = {check.name: check for check in checks}
    assert by_name["TensorFlow"].found == here["packages"]["tensorflow"]
    assert by_name["Keras"].found == keras.__version__
    assert "CUDA" in by_name["TensorFlow build"].found or "CPU" in by_name["TensorFlow build"].found
    repairs = [check for check in checks if check.name.startswith("Keras repair ")]
    from tfgpu import repairs as catalog

    assert [check.name.removeprefix("Keras repair ") for check in repairs] == [f.name for f in catalog.all_repairs()]
    gone = {name for name, is_there in here["repairs"].items() if not is_there}
    # Empty batches fail in oneDNN's kernels, which TensorFlow leaves out on some processors.
    assert gone <= {"no-rows"}, "delete them: Keras has them"


@pytest.mark.slow
def test_the_checks_are_json(here, clean):
    checks = doctor.judge(here, clean())
    assert json.loads(doctor.to_json(checks)) == [dataclasses.asdict(check) for check in checks]


def test_settings_in_the_environment_that_stop_training(facts, by_name):
    named = by_name(facts, TF_CONFIG="{", TF_USE_LEGACY_KERAS="1")
    assert named["Cluster"].status == "problem" and "Expected a value such as" in named["Cluster"].found
    assert named["Legacy Keras"] == dataclasses.replace(
        named["Legacy Keras"], status="problem", command="unset TF_USE_LEGACY_KERAS"
    )
    task = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    assert by_name(facts, TF_CONFIG=task)["Cluster"].found == "TF_CONFIG: worker 1 of 2 worker"


def test_packages_that_are_missing_or_old_or_in_the_way(facts, by_name):
    facts["packages"] |= {"tensorboard": None, "tf-keras": "2.20.1"}
    facts["tensorflow"]["version"], facts["keras"]["version"] = "2.15.0", "2.15.0"
    named = by_name(facts)
    assert named["TensorBoard"].status == "problem" and "pip install" in named["TensorBoard"].fix
    assert named["Legacy Keras"].status == "warning"
    assert named["TensorFlow"].status == named["Keras"].status == "problem"
    assert named["Keras"].found == "Keras 2.15.0 is too old: tfgpu supports 3.13 to 3.16."
    facts["tensorflow"]["version"], facts["keras"]["version"] = "2.22.0-rc1", "3.16.2"
    named = by_name(facts)
    assert named["TensorFlow"].status == named["Keras"].status == "ok"
    facts["tensorflow"]["version"], facts["keras"]["version"] = "2.23.0", "4.0.0"
    named = by_name(facts)
    assert named["TensorFlow"].status == named["Keras"].status == "warning"
    assert named["TensorFlow"].command == named["Keras"].command == INSTALL


def test_triton_beside_tensorflow(facts, by_name, tmp_path, monkeypatch):
    def judged(**packages):
        facts["packages"] |= packages
        return by_name(facts).get("Triton")

    assert judged(shares_symbols=True) is None
    assert judged(triton="3.6.0").status == "ok"
    found = judged(triton="3.8.0")
    assert found.status == "warning" and found.found.startswith("3.8.0: ") and "`import triton`" in found.fix
    assert judged(shares_symbols=False).status == "ok"

    (tmp_path / "tensorflow" / "python").mkdir(parents=True)
    (tmp_path / "tensorflow" / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "tensorflow")
    assert not software.shares_symbols()
    (tmp_path / "tensorflow" / "python" / "pywrap_dlopen_global_flags.py").touch()
    assert software.shares_symbols()


def test_several_tensorflows_in_one_folder(facts, by_name):
    facts["packages"]["tensorflows"] = ["tensorflow 2.21.0", "tensorflow-cpu 2.20.0"]
    check = by_name(facts)["TensorFlow packages"]
    assert check.status == "problem" and "tensorflow-cpu 2.20.0" in check.found
    assert check.command.startswith("pip uninstall -y tensorflow tensorflow-cpu; pip install ")


def test_the_state_of_each_repair(facts, by_name):
    facts["repairs"] = {"a": True, "b": False}
    named = by_name(facts)
    assert named["Keras repair a"].status == named["Keras repair b"].status == "ok"
    assert "needed here" in named["Keras repair a"].found and "finds no fault" in named["Keras repair b"].found
    named = by_name(facts, TFGPU_REPAIR="0")
    assert (named["Keras repair a"].fix, named["Keras repair b"].fix) == ("unset TFGPU_REPAIR", "")
    facts["repairs"] = {"error": "MachineError: Keras 4.0 has no `Loss.__call__`"}
    assert by_name(facts)["Keras repairs"].status == "problem"
    assert by_name(facts)["Keras repairs"].found == facts["repairs"]["error"]


def test_every_patch_is_listed(facts, by_name):
    facts["patches"] = {
        "in force": [["Loss.__call__", "tfgpu.a", "tried"], ["Loss.__call__", "tfgpu.b", "changed"]],
        "on use": [["Loss.__call__", "tfgpu.c"], ["*.update_state", "tfgpu.d"]],
    }
    check = by_name(facts)["Patches"]
    assert check.status == "warning" and "Loss.__call__ (by tfgpu.b) was not tested" in check.found
    assert check.found.startswith("2 patches of 1 functions of Keras and TensorFlow, 2 more on use (--json lists them)")
    listed = json.loads(doctor.to_json([check]))[0]["details"]
    assert [tuple(each.values()) for each in listed] == [
        ("Loss.__call__", "tfgpu.a", "tried"),
        ("Loss.__call__", "tfgpu.b", "changed"),
        ("Loss.__call__", "tfgpu.c", "wrapped on use"),
        ("*.update_state", "tfgpu.d", "wrapped on use"),
    ]


def test_a_version_that_is_too_old_is_said_once(facts, by_name):
    facts["keras"]["version"] = "3.12.4"
    facts["repairs"] = {"error": "MachineError: Keras 3.12.4 is too old: tfgpu supports 3.13 to 3.16."}
    named = by_name(facts)
    assert [name for name, check in named.items() if "too old" in check.found] == ["Keras"]
    assert named["Keras"].command == INSTALL
    assert named["Keras repairs"].fix == "Fix TensorFlow and Keras first."


BROKEN = {
    "missing library": (
        {"tensorflow/__init__.py": "raise ImportError('libcudart.so.12: cannot open shared object file')"},
        "TensorFlow",
        "cannot be imported: ImportError: libcudart.so.12: cannot open shared object file",
    ),
    "dies on import": (
        {"tensorflow/__init__.py": "import os, signal; os.kill(os.getpid(), signal.SIGILL)"},
        "TensorFlow",
        "cannot be imported: the process was ended by SIGILL",
    ),
    "leaves on import": (
        {"tensorflow/__init__.py": "raise SystemExit(3)"},
        "TensorFlow",
        "cannot be imported: SystemExit: 3",
    ),
    "empty folder in the way": (
        {"tensorflow/__init__.py": ""},
        "TensorFlow",
        "cannot be imported: AttributeError",
    ),
    "no tensorflow": (
        {"tensorflow/__init__.py": "raise ModuleNotFoundError(\"No module named 'tensorflow'\")"},
        "TensorFlow",
        "not installed",
    ),
    "no keras": (
        {
            "tensorflow/__init__.py": "raise ImportError('so that this test is quick')",
            "keras/__init__.py": "raise ModuleNotFoundError(\"No module named 'keras'\")",
        },
        "Keras",
        "not installed",
    ),
    "no psutil": (
        {
            "tensorflow/__init__.py": "raise ImportError('so that this test is quick')",
            "psutil.py": "raise ModuleNotFoundError(\"No module named 'psutil'\")",
        },
        "Memory",
        "No module named 'psutil'",
    ),
    "no nvml": (
        {
            "tensorflow/__init__.py": "raise ImportError('so that this test is quick')",
            "pynvml.py": "raise ModuleNotFoundError(\"No module named 'pynvml'\")",
        },
        "NVIDIA driver",
        "nvidia-ml-py is not installed",
    ),
}


@pytest.mark.sample("no tensorflow")
@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_package_is_a_finding_with_a_fix(case, tmp_path, clean):
    files, name, words = BROKEN[case]
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    checks = doctor.examine(environ=clean(PYTHONPATH=str(tmp_path)), model="mlp")
    named = {check.name: check for check in checks}
    assert words in named[name].found
    assert named[name].status in ("warning", "problem") and "pip install" in named[name].fix
    assert doctor.stops_training(checks)
    assert named["Python"].status == "ok" and named["CPU"].found
    assert named["Keras repairs"].fix == "Fix TensorFlow and Keras first."
    assert all(check.fix for check in checks if check.status != "ok")


@pytest.mark.slow
def test_another_backend_is_a_problem(tmp_path, clean):
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError(\"No module named 'jax'\")")
    (tmp_path / "tensorflow").mkdir()
    (tmp_path / "tensorflow/__init__.py").write_text("raise ImportError('so that this test is quick')")
    checks = doctor.examine(environ=clean(PYTHONPATH=str(tmp_path), KERAS_BACKEND="jax"))
    named = {check.name: check for check in checks}
    assert named["Keras"] == Check(
        "Keras", "problem", "its backend is jax, not TensorFlow", command="export KERAS_BACKEND=tensorflow"
    )


def test_tensor_core_advice_for_a_model_and_for_a_name():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(100, name="wide"), keras.layers.Dense(10)])
    check = doctor.tensor_cores(model)
    assert (check.status, check.found) == ("warning", "wide: units=100")
    assert check.fix == "wide: Use 96 or 104: Tensor Cores work best on multiples of 8."
    assert doctor.tensor_cores("mlp").status == "ok"
    assert doctor.tensor_cores("transformer").status == "ok"
    with pytest.raises(InputError, match="Did you mean 'resnet'"):
        doctor.tensor_cores("resnt")


@pytest.mark.parametrize(("scope", "status"), [("global", "ok"), ("replica", "warning")])
def test_batch_normalization_by_replicas_is_named(scope, status):
    with tfgpu.strategy("mirrored", devices=2, batch_norm=scope).scope():
        layers = [keras.layers.BatchNormalization(), keras.layers.BatchNormalization(synchronized=True)]
        model = keras.Sequential([keras.Input((8,)), *layers])
    (check,) = doctor.batch_norm(model)
    assert (check.name, check.status) == ("BatchNormalization", status)
    found = {
        "ok": "2 layers normalize by the whole batch: on several replicas up to 4 collectives a step",
        "warning": "1 layer normalizes by each replica's own rows: the result depends on the number of replicas",
    }
    assert check.found == found[status] and ("synchronized=True" in check.fix) == (status == "warning")


def test_a_model_without_batch_normalization_has_no_such_check():
    assert doctor.batch_norm("mlp") == []
    assert [check.name for check in doctor.advise("resnet")] == ["Tensor Cores", "BatchNormalization"]


def test_the_doctor_itself_starts_no_tensorflow():
    code = "import sys, tfgpu.doctor; print('tensorflow' in sys.modules or 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=550, check=True)
    assert done.stdout.strip() == "False"
